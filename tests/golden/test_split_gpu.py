"""Every reference file split over streams of one GPU, over two and four GPUs, and over a GPU and the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.backend.microbatch import split_microbatches
from luce.runtime.device import Array, CopyStream, Device
from luce.runtime.found import found
from luce.runtime.gpu import GpuDevice
from luce.runtime.gpu_stream import GpuCopyStream
from luce.runtime.host import HostDevice
from luce.shard import graphs
from luce.shard.local import LocalShard
from tests.support.drive import Driver
from tests.support.golden_checks import check_greedy_tokens, check_logits_in_chunks, check_restored, typical_error
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, references

pytestmark = pytest.mark.gpu
each_file = pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)
Open = Callable[..., list[GpuDevice]]


@pytest.fixture
def open_gpus() -> Iterator[Open]:
    """Opens GPUs by index, one as often as it is named. Skips if there are too few."""
    opened: list[GpuDevice] = []

    def open_them(indices: Sequence[int], make: type[GpuDevice] = GpuDevice) -> list[GpuDevice]:
        gpus = [gpu.name for gpu in found() if gpu.name.kind != "cpu"]
        if len(gpus) <= max(indices):
            pytest.skip(f"needs {max(indices) + 1} GPUs, {len(gpus)} found")
        for index in indices:
            name = gpus[index]
            assert name.kind != "cpu"
            opened.append(make(name.kind, name.index))
        return opened[-len(indices) :]

    yield open_them
    for device in opened:
        device.close()


class Dawdling(GpuDevice):
    """Every now and then, something that takes a millisecond comes before a launch or a copy."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._random = random.Random(repr(args))
        source = 'extern "C" __global__ void dawdle(long long t) { for (t += clock64(); clock64() < t;) {} }'
        self._dawdle = self.cupy.RawKernel(source, "dawdle")

    def maybe_dawdle(self, odds: int, stream: Any) -> None:
        if not self._random.randrange(odds):
            self._dawdle((1,), (1,), (1_500_000,), stream=stream)

    def launch(self, *args: Any, **options: Any) -> None:
        self.activate()
        self.maybe_dawdle(40, self._stream)
        super().launch(*args, **options)

    def copy_stream(self) -> CopyStream:
        self.activate()
        return DawdlingStream(self)


class DawdlingStream(GpuCopyStream):
    def copy(self, target: Array, source: Array) -> None:
        assert isinstance(self._device, Dawdling)
        self._device.activate()
        self._device.maybe_dawdle(2, self._stream)
        super().copy(target, source)


def crowded_logits(driver: Driver, prompt: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits of the last row of a prompt, and of three tokens after it: float32 [4, vocab].

    The prompt, and two others before it, are read in steps of which nothing is wanted, so that nobody waits for them;
    the tokens go beside those of the others.
    """
    first, second, third = sequences = [driver.start() for _ in range(3)]
    for sequence, tokens in ((first, prompt[::-1]), (second, prompt[7:]), (third, prompt[:-50])):
        for at in range(0, len(tokens), 50):
            driver.feed((sequence, tokens[at : at + 50]), wanted=False)
    rows = driver.feed((third, prompt[-50:]))
    for token in prompt[:3, None]:
        rows.append(driver.feed(*((sequence, token) for sequence in sequences))[2])
    return np.stack([row[-1] for row in rows])


@each_file
def test_streams_of_one_gpu_keep_order(reference: Reference, make_driver: MakeDriver, open_gpus: Open) -> None:
    prompt = np.tile(reference.expected["prompt_long"], 2)[:250]
    results = []
    layers = len(reference.spec.layers)
    for count, peer in ((1, True), (2, True), (2, False), (layers, True), (min(3, layers), False)):
        devices = open_gpus([0] * count, Dawdling if count > 1 else GpuDevice)
        driver = make_driver(reference, devices, slots=9, peer=peer)
        results += [crowded_logits(driver, prompt) for _ in range(3 if count > 1 else 1)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@each_file
def test_microbatches_keep_order(reference: Reference, make_driver: MakeDriver, open_gpus: Open) -> None:
    prompt = np.tile(reference.expected["prompt_long"], 2)[:250]
    alone = make_driver(reference, open_gpus([0]))
    split = make_driver(reference, open_gpus([0] * min(3, len(reference.spec.layers)), Dawdling), microbatch=64)
    pieces = split_microbatches(alone.step((alone.start(), prompt)), 64)
    expected = np.concatenate([alone.backend.forward(piece).logits for piece in pieces])
    assert len(pieces) == 3
    for _ in range(3):
        np.testing.assert_array_equal(split.feed((split.start(), prompt))[0], expected)


@each_file
def test_microbatches_are_replayed(
    reference: Reference, make_driver: MakeDriver, open_gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = np.tile(reference.expected["prompt_long"], 2)[:250]
    eager = make_driver(reference, open_gpus([0, 1]), microbatch=64)
    expected = eager.feed((eager.start(), prompt))[0]
    monkeypatch.setattr(graphs, "LONG_ROWS", 32)
    replayed = make_driver(reference, open_gpus([0, 1], Dawdling), microbatch=64)
    for _ in range(4):
        np.testing.assert_array_equal(replayed.feed((replayed.start(), prompt))[0], expected)
    shards = [shard for shard in replayed.backend.shards if isinstance(shard, LocalShard)]
    assert [shard.replayed > 0 for shard in shards] == [True, True]


@each_file
def test_unpacked_weights_change_no_bits(reference: Reference, make_driver: MakeDriver, open_gpus: Open) -> None:
    prompt = np.tile(reference.expected["prompt_long"], 2)[:250]
    drivers = [make_driver(reference, open_gpus([0]), unpack=unpack) for unpack in (False, True)]
    expected, actual = (driver.feed((driver.start(), prompt))[0] for driver in drivers)
    np.testing.assert_array_equal(actual, expected)
    unpacked = [driver.backend.devices[0].unpacked for driver in drivers]
    assert unpacked[0] == 0 and (unpacked[1] > 0 or reference.name.endswith(("F32", "F16")))


# The last 40 rows or fewer of each prompt are still too many to be rounded to bytes.
@each_file
@pytest.mark.parametrize("chunk", [1000, 40, 1])
@pytest.mark.parametrize("count", [2, 4])
def test_several_gpus(reference: Reference, make_driver: MakeDriver, open_gpus: Open, count: int, chunk: int) -> None:
    gpus = open_gpus(range(min(count, len(reference.spec.layers))))
    driver = make_driver(reference, gpus, slots=8, microbatch=64)
    prompts = check_logits_in_chunks(reference, driver, reference.kind(chunk), chunk)
    check_greedy_tokens(reference, driver, prompts, typical_error(reference, driver))


@each_file
@pytest.mark.parametrize("peer", [True, False])
def test_several_gpus_keep_order(reference: Reference, make_driver: MakeDriver, open_gpus: Open, peer: bool) -> None:
    prompt = np.tile(reference.expected["prompt_long"], 2)[:250]
    alone = make_driver(reference, open_gpus([0]))
    first, second = open_gpus([1, 0], Dawdling)
    split = make_driver(reference, [first, second], slots=9, peer=peer)
    assert split.backend.links[0].direct == (peer and first.reaches(second))
    expected = crowded_logits(alone, prompt)
    for _ in range(3):
        np.testing.assert_array_equal(crowded_logits(split, prompt), expected)


@each_file
@pytest.mark.parametrize("order", ["gpu first", "host first", "gpu twice"])
def test_with_the_host(reference: Reference, make_driver: MakeDriver, open_gpus: Open, order: str) -> None:
    devices: list[Device] = [*open_gpus([0]), HostDevice(), *open_gpus([0])]
    devices = {"gpu first": devices[:2], "host first": devices[1:], "gpu twice": devices}[order]
    devices = devices[: len(reference.spec.layers)]
    driver = make_driver(reference, devices, weights=[1.0] * len(devices), slots=8, microbatch=64)
    prompts = check_logits_in_chunks(reference, driver, reference.kind(1000), 1000)
    check_greedy_tokens(reference, driver, prompts, typical_error(reference, driver))
    times = driver.backend.times()
    assert all(time.work.total > 0 for time in times) and all(time.copies.total > 0 for time in times[:-1])


@each_file
def test_save_and_restore(reference: Reference, make_driver: MakeDriver, open_gpus: Open) -> None:
    check_restored(reference, make_driver(reference, open_gpus([0] * len(reference.spec.layers))))
