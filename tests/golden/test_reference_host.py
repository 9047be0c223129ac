"""Every reference file on the NumPy device, at float32 tolerance: logits, residual stream, greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest

from luce.runtime.host import HostDevice
from luce.shard.sizes import activation_bytes
from tests.support.covering import each_kind
from tests.support.golden_checks import (
    TREES,
    check_batched,
    check_greedy_tokens,
    check_logits_in_chunks,
    check_restored,
    check_shards,
    check_tree,
)
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, references

each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)


def check_in_chunks(reference: Reference, make_driver: MakeDriver, chunk: int) -> None:
    """The logits of all prompts, cut into chunks, and the greedy tokens behind them."""
    driver = make_driver(reference, [HostDevice()])
    prompts = check_logits_in_chunks(reference, driver, "f32", chunk)
    check_greedy_tokens(reference, driver, prompts, error=0)


@each_file
def test_logits_and_greedy_tokens(reference: Reference, make_driver: MakeDriver) -> None:
    check_in_chunks(reference, make_driver, 1000)


@each_kind()
@pytest.mark.parametrize("chunk", [7, 1])
def test_logits_and_greedy_tokens_in_chunks(reference: Reference, make_driver: MakeDriver, chunk: int) -> None:
    check_in_chunks(reference, make_driver, chunk)


@each_kind()
def test_batched(reference: Reference, make_driver: MakeDriver) -> None:
    check_batched(reference, make_driver(reference, [HostDevice()]), "f32", error=0)


@each_kind()
def test_rows_of_trees_are_those_of_chains(reference: Reference, make_driver: MakeDriver) -> None:
    devices = [HostDevice(i) for i in range(min(3, len(reference.spec.layers)))]
    driver = make_driver(reference, devices, verify_rows=16)
    for case, length in ((1, 64), (2, 60)):
        check_tree(driver, reference.spec.vocab, *TREES[case], length)


@pytest.mark.parametrize(
    "reference", [each for each in references() if "greedy_17_logits" in each.expected], ids=lambda r: r.name
)
def test_decode_logits(reference: Reference, make_driver: MakeDriver) -> None:
    driver = make_driver(reference, [HostDevice()])
    sequence = driver.start()
    fed = [reference.expected["prompt_17"], *reference.expected["greedy_17"][:-1, None]]
    logits = [driver.feed((sequence, tokens))[0][-1] for tokens in fed]
    expected = reference.expected["greedy_17_logits"]
    assert ((np.array(logits) - expected) ** 2).mean() / expected.var() <= reference.limits("f32")["nmse_median"]


@each_file
def test_residual_stream(reference: Reference, make_driver: MakeDriver) -> None:
    # One shard per layer: what is handed from shard to shard begins with the residual stream.
    layers, prompt = len(reference.spec.layers), reference.expected["prompt_17"]
    # Some files hold the last layer's output too.
    expected = reference.expected["hidden_17"][1:layers]
    driver = make_driver(reference, [HostDevice(i) for i in range(layers)])
    step = driver.step((driver.start(), prompt))
    handed = None
    for boundary, (shard, wanted) in enumerate(zip(driver.backend.shards[:-1], expected, strict=True), 1):
        handed = shard.forward(step, handed)
        assert np.abs(handed[0] - wanted).max() <= reference.limits("f32")["hidden_max_abs"]
        assert sum(array[0].nbytes for array in handed) == activation_bytes(reference.spec, boundary)


@each_kind()
def test_shards_change_nothing(reference: Reference, make_driver: MakeDriver) -> None:
    layers = len(reference.spec.layers)
    counts = sorted({min(count, layers) for count in (1, 2, 3, 4, layers)})
    check_shards(reference, (make_driver(reference, [HostDevice(i) for i in range(count)]) for count in counts))


@each_kind()
def test_save_and_restore(reference: Reference, make_driver: MakeDriver) -> None:
    # One shard per layer: every block that lends keys and values has mirrors elsewhere.
    check_restored(reference, make_driver(reference, [HostDevice(i) for i in range(len(reference.spec.layers))]))
