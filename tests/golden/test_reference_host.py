"""Every reference file on the NumPy device, at float32 tolerance: logits, residual stream, greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest

from luce.runtime.host import HostDevice
from tests.golden.conftest import MakeDriver
from tests.support.golden_checks import check_batched, check_greedy_tokens, check_logits_in_chunks
from tests.support.reference import Reference, references

each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)
# Every layer of gemma4-eb but the first is bound to it by shared keys and values.
each_file_that_splits = pytest.mark.parametrize(
    "reference", [r for r in references() if r.spec.first_donor > 0], ids=lambda r: r.name
)


@each_file
@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_logits(reference: Reference, make_driver: MakeDriver, chunk: int) -> None:
    check_logits_in_chunks(reference, make_driver(reference, [HostDevice()]), "f32", chunk)


@each_file
@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_greedy(reference: Reference, make_driver: MakeDriver, chunk: int) -> None:
    check_greedy_tokens(reference, make_driver(reference, [HostDevice()]), chunk, error=0)


@each_file
def test_batched(reference: Reference, make_driver: MakeDriver) -> None:
    check_batched(reference, make_driver(reference, [HostDevice()]), "f32", error=0)


@each_file
def test_decode_logits(reference: Reference, make_driver: MakeDriver) -> None:
    driver = make_driver(reference, [HostDevice()])
    sequence = driver.start()
    fed = [reference.expected["prompt_17"], *reference.expected["greedy_17"][:-1, None]]
    logits = [driver.feed((sequence, tokens))[0][-1] for tokens in fed]
    expected = reference.expected["greedy_17_logits"]
    assert ((np.array(logits) - expected) ** 2).mean() / expected.var() <= reference.limits("f32")["nmse_median"]


@each_file_that_splits
def test_residual_stream(reference: Reference, make_driver: MakeDriver) -> None:
    # One shard per layer: what is handed from shard to shard is the residual stream. Layers that share keys and values
    # stay on the last one.
    expected, prompt = reference.expected["hidden_17"], reference.expected["prompt_17"]
    layers = len(expected) - 1
    count = min(layers, reference.spec.first_donor + 1)
    shares = [1.0] * (count - 1) + [layers - count + 1.0]
    driver = make_driver(reference, [HostDevice(i) for i in range(count)], weights=shares)
    step = driver.step((driver.start(), prompt))
    hidden = None
    for shard, wanted in zip(driver.backend.shards[:-1], expected[1:], strict=False):
        hidden = shard.forward(step, hidden)
        assert np.abs(hidden[: len(prompt)] - wanted).max() <= reference.limits("f32")["hidden_max_abs"]
    assert hidden is not None


@each_file_that_splits
def test_shards_change_nothing(reference: Reference, make_driver: MakeDriver) -> None:
    prompt = reference.expected["prompt_long"]
    results = []
    for shares in ((1,), (1, 1), (1, 1, reference.spec.first_donor)):
        driver = make_driver(reference, [HostDevice(i) for i in range(len(shares))], weights=shares)
        sequence = driver.start()
        parts = [driver.feed((sequence, part))[0] for part in (prompt[:100], prompt[100:])]
        results.append(np.concatenate(parts))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


@each_file_that_splits
def test_save_and_restore(reference: Reference, make_driver: MakeDriver) -> None:
    driver = make_driver(reference, [HostDevice(0), HostDevice(1)])
    prompt = reference.expected["prompt_long"]
    sequence = driver.start()
    driver.feed((sequence, prompt[:90]))
    saved = [shard.save(sequence.slot, sequence.pages) for shard in driver.backend.shards]
    expected = driver.feed((sequence, prompt[90:]))[0]
    other = driver.start()
    driver.feed((other, prompt[5:95]))
    for shard, tensors in zip(driver.backend.shards, saved, strict=True):
        shard.restore(other.slot, other.pages, tensors)
    assert (driver.feed((other, prompt[90:]))[0] == expected).all()
