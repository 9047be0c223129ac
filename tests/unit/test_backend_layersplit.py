"""The backend's own work: refusing and failing without leftovers, naming shards, bounding what is queued, closing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

import luce
from luce.backend import layersplit
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.microbatch import split_microbatches
from luce.backend.placement import plan_shards
from luce.backend.serving_options import ServingOptions
from luce.engine.events import FinishReason
from luce.errors import BackendError, DeviceError, OutOfMemoryError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.models.spec import ModelSpec
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, CopyStream, Device, DeviceName, Event, Memory
from luce.runtime.host import HostCopyStream, HostDevice, HostEvent
from luce.shard.pipeline import Pipeline
from tests.support.drive import Driver
from tests.support.emulated import EmulatedDevice
from tests.support.reference import Reference

REFERENCE = Reference("gemma4-e-Q4_0")
PROMPT = REFERENCE.expected["prompt_long"]


@pytest.fixture
def file() -> Iterator[GGUFFile]:
    with open_gguf(REFERENCE.path) as opened:
        yield opened


@pytest.fixture
def spec() -> ModelSpec:
    return REFERENCE.spec


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """The pipelines of the test's backends, in the order of their construction."""
    made: list[Pipeline] = []

    class WatchedPipeline(Pipeline):
        def __init__(self, *, peer: bool) -> None:
            super().__init__(peer=peer)
            made.append(self)

    monkeypatch.setattr(layersplit, "Pipeline", WatchedPipeline)
    return made


class Small(EmulatedDevice):
    """A device that has room for so many arrays, and says that it has so much memory."""

    def __init__(self, arrays: int, free: int = 1 << 40) -> None:
        super().__init__()
        self.name = DeviceName("cuda", 7)
        self.arrays = arrays
        self.free = free

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        self._take()
        return super().empty(shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        self._take()
        return super().zeros(shape, dtype)

    def upload(self, array: NDArray[Any]) -> Array:
        self._take()
        return super().upload(array)

    def _take(self) -> None:
        self.arrays -= 1
        if self.arrays < 0:
            raise OutOfMemoryError(f"{self.name}: 123 bytes asked, 45 bytes free")

    def memory(self) -> Memory:
        return Memory(self.free, 1 << 40)


def allocated(device: Device) -> int:
    return int(device.describe()["allocated"])


@pytest.mark.parametrize("arrays", [0, 1, 10, 20])
def test_memory_that_runs_out_while_loading(file: GGUFFile, spec: ModelSpec, arrays: int) -> None:
    devices = [EmulatedDevice(), Small(arrays), EmulatedDevice()]
    shard = plan_shards(file, spec, devices, ServingOptions(layer_split=(3, 2, 3), context=256))[1]
    needs = f"it needs {shard.weights + shard.state + shard.buffers} bytes in all, {shard.state} of them for context"
    asked = r"^shard 1 \(cuda:7\): layers 3\.\.3: .* 123 bytes asked, 45 bytes free"
    with pytest.raises(OutOfMemoryError, match=f"{asked}; {needs}, which a smaller --max-ctx makes less$") as caught:
        LayerSplitBackend(file, spec, devices, ServingOptions(layer_split=(3, 2, 3), context=256))
    assert caught.value.exit_code == 3
    del caught
    gc.collect()  # an error's frames may hold on to each other
    assert [allocated(device) for device in devices] == [0, 0, 0]


def test_memory_that_is_too_small_is_refused_before_loading(file: GGUFFile, spec: ModelSpec) -> None:
    devices = [EmulatedDevice(), Small(4 * 10**6, free=3_400_000)]
    with pytest.raises(OutOfMemoryError) as refusal:
        LayerSplitBackend(file, spec, devices, ServingOptions(layer_split=(1, 1), context=2048))
    message = str(refusal.value)
    assert message.startswith("shard 1 (cuda:7): layers 4..7 need ")
    assert (
        "3196000 are free; --max-ctx " in message
        and message.endswith(" would fit")
        and refusal.value.param == "max_ctx"
    )
    fits = int(message.split("--max-ctx ")[1].split()[0])
    assert [allocated(device) for device in devices] == [0, 0]
    LayerSplitBackend(file, spec, devices, ServingOptions(layer_split=(1, 1), context=fits)).close()
    with pytest.raises(OutOfMemoryError):
        LayerSplitBackend(file, spec, devices, ServingOptions(layer_split=(1, 1), context=fits + 64))


def test_matrices_stay_unpacked_in_half_of_what_is_left(file: GGUFFile, spec: ModelSpec) -> None:
    unpacked = []
    for free in (1 << 40, 2_000_000, 1_000_000):
        backend = LayerSplitBackend(file, spec, [Small(10**6, free=free)], ServingOptions(context=256, unpack=True))
        (part,) = backend.devices
        assert 0 < part.unpacked <= (free * 0.94 - part.weights - part.state) / 2
        unpacked.append(part.unpacked)
        backend.close()
    matrices = [
        t for n, t in file.tensors.items() if n.startswith("blk.") and len(t.shape) == 2 and t.type.name != "F32"
    ]
    assert unpacked[0] == sum(2 * t.rows * t.cols for t in matrices) > unpacked[1] > unpacked[2]


def test_hosts_share_one_memory(file: GGUFFile, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each half fits alone, and the whole on one device, which has no mirror. Tables of a CPU count as they are stored.
    monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(3_480_000, 1 << 40))
    LayerSplitBackend(file, spec, [HostDevice()], ServingOptions(context=256)).close()
    with pytest.raises(OutOfMemoryError, match=r"^shard 1 \(cpu:1\): .* --max-ctx 128 would fit"):
        LayerSplitBackend(file, spec, [HostDevice(0), HostDevice(1)], ServingOptions(context=256, microbatch=16))


def test_close_leaves_nothing(file: GGUFFile, spec: ModelSpec) -> None:
    devices = [EmulatedDevice(), EmulatedDevice(64), EmulatedDevice()]
    backend = LayerSplitBackend(file, spec, devices, ServingOptions(context=256))
    step = Driver(backend).step((Driver(backend).start(), PROMPT[:3]))
    assert all(map(allocated, devices))
    shards = backend.shards
    backend.close()
    backend.close()
    # A shard that someone still holds has let go of everything as well.
    assert [allocated(device) for device in devices] == [0, 0, 0] and len(shards) == 3
    with pytest.raises(BackendError, match="closed"):
        backend.forward(step)


class Failing(HostDevice):
    """A host whose next allocation fails on request."""

    fail: Exception | None = None

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        return super().empty(shape, dtype)


@pytest.mark.parametrize("batch", [64, 512])
def test_a_failed_step_leaves_the_backend_usable(file: GGUFFile, spec: ModelSpec, batch: int) -> None:
    with ExitStack() as stack:
        devices = [Failing(0), Failing(1), Failing(2)]
        backend = LayerSplitBackend(file, spec, devices, ServingOptions(slots=8, context=256, microbatch=batch))
        stack.callback(backend.close)
        driver = Driver(backend)
        expected = driver.feed((driver.start(), PROMPT))[0]
        for device in devices:
            device.fail = DeviceError(f"{device.name}: lost its way")
            with pytest.raises(BackendError, match=f"^shard {device.name.index}: {device.name}: lost its way$"):
                driver.feed((driver.start(), PROMPT))
            assert (driver.feed((driver.start(), PROMPT))[0] == expected).all()


@pytest.mark.parametrize("asked", [True, False])
def test_a_step_that_fails_without_a_waiting_call(
    file: GGUFFile, spec: ModelSpec, pipelines: list[Pipeline], asked: bool
) -> None:
    with ExitStack() as stack:
        devices = [Failing(0), Failing(1), Failing(2)]
        backend = LayerSplitBackend(file, spec, devices, ServingOptions(slots=8, context=256, microbatch=64))
        stack.callback(backend.close)
        driver = Driver(backend)
        expected = driver.feed((driver.start(), PROMPT))[0]
        assert not backend.lost()
        devices[1].fail = DeviceError("lost its way")
        driver.feed((driver.start(), PROMPT[:20]), wanted=False)
        with pytest.raises(BackendError, match=r"^shard 1: lost its way$"):
            if asked:
                pipelines[-1].wait()
            else:
                driver.feed((driver.start(), PROMPT))
        assert [backend.lost(), backend.lost()] == ["a step before this one failed: shard 1: lost its way", ""]
        assert (driver.feed((driver.start(), PROMPT))[0] == expected).all()
        # The call that waits for a failing step raises its error; other sequences keep their states.
        devices[2].fail = DeviceError("lost its way")
        with pytest.raises(BackendError, match=r"^shard 2: lost its way$"):
            driver.feed((driver.start(), PROMPT))
        assert not backend.lost()


class Meeting(HostDevice):
    """A host on which the work on one step begins only when another device's on another step does."""

    def meet(self, barrier: threading.Barrier, step: int) -> Meeting:
        self._barrier, self._left = barrier, step
        return self

    def record(self, *, timing: bool = False) -> Event:
        # Once before a step's work and once after it.
        if self._left == 0:
            self._barrier.wait(30)
        self._left -= 1
        return super().record(timing=timing)


class CompiledMeeting(Meeting, CpuDevice):
    """The same with compiled kernels, whose threads all such devices share."""


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("plain", "kind"), [(HostDevice, Meeting), (CpuDevice, CompiledMeeting)])
def test_shards_work_side_by_side(
    file: GGUFFile, spec: ModelSpec, plain: type[HostDevice], kind: type[Meeting], step: int
) -> None:
    with ExitStack() as stack:
        alone = LayerSplitBackend(file, spec, [plain()], ServingOptions(context=256, microbatch=64))
        stack.callback(alone.close)
        barrier = threading.Barrier(2)
        devices = [kind(0).meet(barrier, 2 * step), kind(1).meet(barrier, 0)]
        backend = LayerSplitBackend(file, spec, devices, ServingOptions(context=256, microbatch=64))
        stack.callback(backend.close)
        one, two = Driver(alone), Driver(backend)
        prompt = np.tile(PROMPT, 2)[:250]
        batches = split_microbatches(one.step((one.start(), prompt)), 64)
        expected = np.concatenate([alone.forward(batch).logits for batch in batches])
        assert (two.feed((two.start(), prompt))[0] == expected).all()


def test_steps_of_a_prompt_go_side_by_side(file: GGUFFile, spec: ModelSpec) -> None:
    # The first host begins with the second step when the other one begins with the first step.
    with ExitStack() as stack:
        alone = LayerSplitBackend(file, spec, [HostDevice()], ServingOptions(context=256))
        stack.callback(alone.close)
        barrier = threading.Barrier(2)
        devices = [Meeting(0).meet(barrier, 2), Meeting(1).meet(barrier, 0)]
        backend = LayerSplitBackend(file, spec, devices, ServingOptions(context=256))
        stack.callback(backend.close)
        replies = []
        for driver in (Driver(alone), Driver(backend)):
            sequence = driver.start()
            for at in (0, 60):
                driver.feed((sequence, PROMPT[at : at + 60]), wanted=False)
            replies.append(driver.feed((sequence, PROMPT[120:]))[0])
        assert (replies[0] == replies[1]).all()


def test_close_ends_the_threads(file: GGUFFile, spec: ModelSpec) -> None:
    before = set(threading.enumerate())
    backend = LayerSplitBackend(file, spec, [HostDevice(i) for i in range(3)], ServingOptions(slots=3, context=256))
    driver = Driver(backend)
    for _ in range(3):
        driver.feed((driver.start(), PROMPT[:60]), wanted=False)
    own = set(threading.enumerate()) - before
    assert len(own) == 3
    backend.close()
    assert not any(thread.is_alive() for thread in own)


class Slow(HostDevice):
    """A host whose events happen only when someone waits for them."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.open: set[SlowEvent] = set()

    def record(self, *, timing: bool = False) -> Event:
        return SlowEvent(self)

    def wait_for(self, event: Event) -> None:
        pass

    def copy_stream(self) -> CopyStream:
        return SlowStream()


class SlowStream(HostCopyStream):
    def wait_for(self, event: Event) -> None:
        pass


class SlowEvent(HostEvent):
    def __init__(self, device: Slow) -> None:
        super().__init__()
        self._open = device.open
        self._open.add(self)

    def done(self) -> bool:
        return self not in self._open

    def wait(self) -> None:
        # What was recorded before it has happened as well.
        self._open -= {event for event in self._open if event.seconds_since(self) <= 0}


def test_the_host_runs_ahead_a_little_only(file: GGUFFile, spec: ModelSpec, pipelines: list[Pipeline]) -> None:
    devices = [Slow(0), Slow(1)]
    backend = LayerSplitBackend(file, spec, devices, ServingOptions(context=256))
    driver = Driver(backend)
    sequence = driver.start()
    ahead = []
    for at in range(0, 150, 10):
        driver.feed((sequence, PROMPT[at : at + 10]), wanted=False)
        pipelines[-1].wait()
        # Two events a step, before and after.
        ahead.append(len(devices[1].open) // 2)
    assert ahead == [1, 2, 3, 4] + [4] * 11
    driver.feed((sequence, PROMPT[:10]))
    work = backend.times()[1].work
    assert sum(work.counts) == 12 and work.total > 0
    backend.close()


def test_times_of_a_pipeline_that_grows(file: GGUFFile, spec: ModelSpec, pipelines: list[Pipeline]) -> None:
    # A server that moves its model tells its metrics meanwhile.
    found = []

    def on_progress(fraction: float) -> None:
        found.append([(one.device, one.copies is not None) for one in pipelines[-1].times()])

    devices = [HostDevice(i) for i in range(3)]
    LayerSplitBackend(file, spec, devices, ServingOptions(context=256), on_progress=on_progress).close()
    # Each shard is loaded behind the copies to the one before it.
    grown = [[], [("cpu:0", False)], [("cpu:0", True), ("cpu:1", False)]]
    assert [step for step, before in zip(found, [None, *found], strict=False) if step != before] == grown


def test_times(file: GGUFFile, spec: ModelSpec) -> None:
    backend = LayerSplitBackend(file, spec, [HostDevice(i) for i in range(3)], ServingOptions(slots=4, context=256))
    driver = Driver(backend)
    first = driver.start()
    for tokens in (PROMPT[:60], PROMPT[60:61], PROMPT[61:62]):
        driver.feed((first, tokens))
    times = backend.times()
    assert [time.device for time in times] == ["cpu:0", "cpu:1", "cpu:2"]
    assert [sum(time.work.counts) for time in times] == [3, 3, 3]
    assert [time.copies and sum(time.copies.counts) for time in times] == [3, 3, None]
    assert all(time.work.total > 0 for time in times)
    backend.close()
    assert backend.times() == times


def test_close_during_a_reply() -> None:
    model = luce.load(REFERENCE.path, target_devices="cpu:0,cpu:1,cpu:2", max_ctx=512)
    generation = model.generate(PROMPT.tolist(), max_tokens=300, temperature=0, ignore_eos=True)
    next(generation)
    threads = [threading.Thread(target=model.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    list(generation)
    assert generation.finish is not None and generation.finish.reason == FinishReason.SHUTDOWN
    model.close()


def test_progress_of_loading(file: GGUFFile, spec: ModelSpec) -> None:
    shares: list[float] = []
    devices = [HostDevice(0), HostDevice(1)]
    LayerSplitBackend(
        file, spec, devices, ServingOptions(layer_split=(1, 3), context=256), on_progress=shares.append
    ).close()
    layers = len(spec.layers)
    assert shares == [(layer + 1) / layers for layer in range(layers)]
