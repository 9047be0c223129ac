"""Every reference file on a GPU: logits at the tolerance of what products round, greedy tokens by the margin rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from luce.runtime.device import Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from luce.shard.local import LocalShard
from tests.support.golden_checks import (
    TREES,
    ReadPrompt,
    check_batched,
    check_greedy_tokens,
    check_logits_in_chunks,
    check_masks,
    check_replayed,
    check_rollback,
    check_tree,
    greedy,
    typical_error,
)
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, check_greedy, references

pytestmark = pytest.mark.gpu
each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)


@pytest.fixture(scope="module")
def eager(gpu: GpuDevice) -> Iterator[GpuDevice]:
    """The same GPU by another device object, which captures nothing."""
    device = GpuDevice("cuda" if gpu.name.kind == "cuda" else "hip", gpu.name.index)
    device.captures = False
    yield device
    device.close()


@each_file
@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_logits_and_greedy_tokens(reference: Reference, make_driver: MakeDriver, gpu: Device, chunk: int) -> None:
    driver = make_driver(reference, [gpu])
    prompts = check_logits_in_chunks(reference, driver, reference.kind(chunk), chunk)
    check_greedy_tokens(reference, driver, prompts, typical_error(reference, driver))


@each_file
def test_batched(reference: Reference, make_driver: MakeDriver, gpu: Device) -> None:
    driver = make_driver(reference, [gpu], slots=5)
    check_batched(reference, driver, reference.kind(1000), typical_error(reference, driver))


@each_file
def test_decoding_is_row_invariant(reference: Reference, make_driver: MakeDriver, gpu: Device) -> None:
    # The same decode step alone and beside three other sequences: bit-equal logits.
    prompt = reference.expected["prompt_17"]
    driver = make_driver(reference, [gpu], slots=5)
    alone = driver.start()
    driver.feed((alone, prompt))
    crowd = [driver.start() for _ in range(4)]
    driver.feed((crowd[0], prompt))
    for other, length in zip(crowd[1:], (3, 90, 17), strict=True):
        driver.feed((other, np.resize(prompt[::-1], length)))
    token = prompt[:1]
    single = driver.feed((alone, token))[0]
    batched = driver.feed(*((sequence, token) for sequence in crowd))[0]
    assert (single == batched).all()


@each_file
def test_mixed_with_host(reference: Reference, make_driver: MakeDriver, gpu: Device) -> None:
    key = "greedy_17"
    driver = make_driver(reference, [gpu, HostDevice()])
    sequence = driver.start()
    (logits,) = driver.feed((sequence, reference.expected["prompt_17"]))
    tokens = greedy(driver, ReadPrompt(sequence, logits[-1]), len(reference.expected[key]))
    check_greedy(reference, key, tokens, typical_error(reference, driver))


@each_file
def test_replayed_steps(reference: Reference, make_driver: MakeDriver, gpu: GpuDevice, eager: GpuDevice) -> None:
    driver = make_driver(reference, [gpu])
    check_replayed(reference, driver, make_driver(reference, [eager]))
    (shard,) = driver.backend.shards
    assert isinstance(shard, LocalShard) and shard.replayed == 8


@each_file
def test_replayed_steps_of_shards(
    reference: Reference, make_driver: MakeDriver, gpu: GpuDevice, eager: GpuDevice
) -> None:
    # Both shards on one device object: their graphs share its memory.
    driver = make_driver(reference, [gpu, gpu])
    check_replayed(reference, driver, make_driver(reference, [eager]))
    assert all(isinstance(shard, LocalShard) and shard.replayed == 8 for shard in driver.backend.shards)


@each_file
def test_masked_rows(reference: Reference, make_driver: MakeDriver, gpu: Device) -> None:
    check_masks(make_driver(reference, [gpu, gpu]), reference.expected["prompt_17"], 4)


@each_file
def test_rows_of_trees_are_those_of_chains(reference: Reference, make_driver: MakeDriver, gpu: Device) -> None:
    driver = make_driver(reference, [gpu, gpu], verify_rows=16, branch_pages=30)
    # The first time launch by launch, then captured, then replayed.
    for parents, path in TREES * 3:
        check_tree(driver, reference.spec.vocab, parents, path, 60)


@each_file
def test_rows_that_do_not_count_leave_no_trace(reference: Reference, make_driver: MakeDriver, gpu: Device) -> None:
    driver = make_driver(reference, [gpu, gpu], verify_rows=16)
    for rows, accepted in ((2, 1), (5, 5), (16, 1), (16, 11), (16, 16)) * 2:
        check_rollback(driver, reference.spec.vocab, rows, accepted)
