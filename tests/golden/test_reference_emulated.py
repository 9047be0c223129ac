"""The kernels' forward pass without a GPU: the smallest file of each family that has kernels or launches of its own, on
the emulated device, 32 and 64 lanes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from luce.runtime.device import Device
from tests.support.emulated import EmulatedDevice
from tests.support.golden_checks import check_logits_in_chunks, check_masks
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, check_logits

SMALLEST = (
    *("qwen3-a-MIX", "qwen35-a-Q8_0", "qwen35moe-a-Q4_0", "gemma4-e-Q4_0", "gemma4-moe-F32", "laguna-a-F32"),
    *("gemma2-a-F32", "gptoss-a-F32", "cohere2-a-F32", "starcoder2-a-F32", "mistral3-a-F32", "olmo2-a-F32"),
    *("lfm2-a-F32", "deepseek2-a-F32", "qwen3next-a-F32", "gemma3n-a-F32"),
)
smallest = pytest.mark.parametrize("name", SMALLEST)


@smallest
def test_logits(name: str, make_driver: MakeDriver, emulated: Device) -> None:
    reference = Reference(name)
    driver = make_driver(reference, [emulated])
    rows = {}
    for prompt in ("1", "17"):
        (rows[f"logits_{prompt}"],) = driver.feed((driver.start(), reference.expected[f"prompt_{prompt}"]))
    check_logits(reference, reference.kind(17), rows)


@pytest.mark.parametrize("name", [name for name in SMALLEST if Reference(name).kind(6) == "int8_activations"])
def test_logits_of_few_rows(name: str, make_driver: MakeDriver, emulated: Device) -> None:
    reference = Reference(name)
    # Where most types are not met as bytes, sixes are slow: there, past the end of the second page in one step.
    at_once = 130 if name == "qwen3-a-MIX" else 0
    check_logits_in_chunks(reference, make_driver(reference, [emulated]), reference.kind(6), 6, at_once)


@smallest
def test_rows_do_not_depend_on_their_neighbours(name: str, make_driver: MakeDriver, emulated: Device) -> None:
    reference = Reference(name)
    prompt = reference.expected["prompt_17"]
    driver = make_driver(reference, [emulated])
    first, second, third = driver.start(), driver.start(), driver.start()
    for sequence in (first, second):
        driver.feed((sequence, prompt[:5]))
    driver.feed((third, prompt[5:]))
    alone = [driver.feed((first, prompt[i : i + 1]))[0] for i in (5, 6)]
    beside = [driver.feed((third, prompt[:1]), (second, prompt[i : i + 1]))[1] for i in (5, 6)]
    together = driver.feed((driver.start(), prompt[:7]))[0]
    assert (np.array(alone) == np.array(beside)).all()
    assert (np.concatenate(alone) == together[5:]).all()


@pytest.mark.parametrize("name", ["qwen35-a-Q8_0", "gemma4-e-Q4_0", "qwen35moe-a-Q4_0"])
def test_replies_do_not_depend_on_prompts_that_are_read(name: str, make_driver: MakeDriver) -> None:
    """Products of more than 16 rows, of which a prompt makes every step, round otherwise."""
    reference = Reference(name)
    prompt, read = reference.expected["prompt_17"], reference.expected["prompt_long"][:20]
    driver = make_driver(reference, [EmulatedDevice()], verify_rows=16)
    alone, beside, reader, other = (driver.start() for _ in range(4))
    for sequence in (alone, beside):
        driver.feed((sequence, prompt[:5]))
    rows = [driver.feed((alone, prompt[i : i + 1]))[0] for i in (5, 6, 7)]
    (first, _) = driver.feed((beside, prompt[5:6]), (reader, read))
    # A draft with one accepted token, and prompts; a step of no more rows than decoding may have is one.
    work = driver.step((beside, prompt[[6, 8, 9]]), (other, read))
    beside.length -= 3
    draft, *prompts = work.spans
    step = replace(work, spans=(replace(draft, speculative=True), *prompts))
    verified = driver.backend.forward(step).logits[:3]
    driver.accept(beside, 1)
    (last, _) = driver.feed((beside, prompt[7:8]), (reader, read[:6]))
    np.testing.assert_array_equal(np.concatenate((first, verified[:1], last)), np.concatenate(rows))


def test_masked_rows(make_driver: MakeDriver, emulated: Device) -> None:
    reference = Reference("gemma4-e-Q4_0")
    check_masks(make_driver(reference, [emulated]), reference.expected["prompt_17"], 2)


# A recurrent state; windows, and layers that borrow keys and values; inputs of convolutions in pages; latents.
@pytest.mark.parametrize("name", ["qwen35-a-Q8_0", "gemma4-e-Q4_0", "lfm2-a-F32", "deepseek2-a-F32"])
def test_rows_of_a_tree_are_those_of_chains(name: str, make_driver: MakeDriver, emulated: Device) -> None:
    reference = Reference(name)
    prompt = reference.expected["prompt_17"]
    driver = make_driver(reference, [emulated], verify_rows=16)
    drafted, first, second = driver.start(), driver.start(), driver.start()
    for sequence in (drafted, first, second):
        driver.feed((sequence, prompt[:5]))
    logits = driver.tree(drafted, prompt[5:9], (0, 0, 2))
    (one,), (two,) = (driver.feed((s, prompt[own])) for s, own in ((first, [5, 6]), (second, [5, 7, 8])))
    np.testing.assert_array_equal(logits, np.concatenate((one, two[1:])))
    driver.accept_path(drafted, (0, 2, 3))
    np.testing.assert_array_equal(*driver.feed((drafted, prompt[9:10]), (second, prompt[9:10])))
