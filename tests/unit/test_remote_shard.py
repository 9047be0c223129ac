"""What the server checks when a daemon has loaded layers, and what it closes when it cannot load its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from luce import __version__
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.errors import BackendError, DeviceError, ShardLostError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.ipc.arena import Arena, shared_arena
from luce.ipc.lifecycle import Open
from luce.ipc.supervisor import Supervisor, Timeouts
from luce.layers.build import LayerBuilder
from luce.remote import daemon_layers, daemon_shard, shard
from luce.remote.device import RemoteDevice, Transport
from luce.remote.messages import Announce, Forward, Loaded, LoadedLayers, Response
from luce.remote.service import Work
from luce.runtime.device import DeviceName
from luce.runtime.host import HostDevice
from luce.runtime.step import Step
from luce.shard.local import LocalShard
from luce.shard.shard import Activation, Pending
from luce.shard.timing import SequenceRows
from tests.support.drive import Driver
from tests.support.reference import Reference
from tests.support.threaded_daemon import ThreadedDaemon
from tests.support.told_shards import tell_shares_prompts

REFERENCE = Reference("qwen35-a-Q8_0")
SPEC = REFERENCE.spec
LAYERS, HALF = len(SPEC.layers), len(SPEC.layers) // 2
OPTIONS = ServingOptions(slots=1, context=64, layer_split=(1.0, 1.0))


@contextmanager
def placement() -> Iterator[tuple[GGUFFile, list[HostDevice]]]:
    """The model's file; a device here and one in a daemon."""
    opening = Open(__version__, ("cpu:1",), "error", 0, "float32")
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(REFERENCE.path))
        daemon = Supervisor("cpu:1", ThreadedDaemon, opening, Timeouts(60, 60), Response)
        stack.callback(daemon.close)
        yield file, [HostDevice(0), RemoteDevice(DeviceName("cpu", 1), daemon)]


def load() -> None:
    """Load the model on both devices, and close it."""
    with placement() as (file, devices):
        LayerSplitBackend(file, SPEC, devices, OPTIONS).close()


def part(**changes: object) -> Callable[[Loaded], Loaded]:
    """A lie about the layers of the daemon's device."""
    return lambda loaded: msgspec.structs.replace(loaded, parts=(msgspec.structs.replace(loaded.parts[0], **changes),))


def whole(**changes: object) -> Callable[[Loaded], Loaded]:
    """A lie about the model."""
    return lambda loaded: msgspec.structs.replace(loaded, **changes)


OTHER_LAYERS = "shard 1 (cpu:1): the daemon has loaded other layers than it was asked to"
WIDTHS = (SPEC.hidden,)


def dimensions(theirs: tuple[object, ...]) -> str:
    ours = WIDTHS, (), SPEC.vocab
    return f"shard 1 (cpu:1): the daemon sees a model of dimensions {theirs}, this process {ours}"


LIES = {
    "device": (part(device="cpu:0"), OTHER_LAYERS),
    "first layer": (part(layers=(HALF - 1, LAYERS)), OTHER_LAYERS),
    "last layer": (part(layers=(HALF, LAYERS - 1)), OTHER_LAYERS),
    "no layers": (whole(parts=()), OTHER_LAYERS),
    "more layers": (
        lambda loaded: whole(parts=(*loaded.parts, LoadedLayers("cpu:2", (0, 1), 0, 0, 0)))(loaded),
        OTHER_LAYERS,
    ),
    "input": (whole(input_widths=(SPEC.hidden + 1,)), dimensions(((SPEC.hidden + 1,), (), SPEC.vocab))),
    "output": (whole(output_widths=(7,)), dimensions((WIDTHS, (7,), SPEC.vocab))),
    "vocabulary": (whole(vocab=SPEC.vocab - 1), dimensions((WIDTHS, (), SPEC.vocab - 1))),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_daemon_that_has_loaded_something_else(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, why = LIES[lie]
    loaded = daemon_shard.ServedModel.loaded
    monkeypatch.setattr(daemon_shard.ServedModel, "loaded", lambda self: change(loaded(self)))
    with pytest.raises(BackendError) as caught:
        load()
    assert str(caught.value) == why


def test_a_daemon_that_has_loaded_what_it_was_asked_to() -> None:
    load()


@pytest.mark.parametrize("shares", [False, True])
def test_a_daemon_says_whether_short_prompts_may_share_a_step(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_shares_prompts(monkeypatch, shares=shares)
    with placement() as (file, devices), closing(LayerSplitBackend(file, SPEC, devices, OPTIONS)) as backend:
        assert [shard.info.shares_prompts for shard in backend.shards] == [shares, shares]


@pytest.mark.parametrize("seconds", [(), (1.0, 1.0), (-1.0,), (float("nan"),), (float("inf"),)])
def test_a_daemon_whose_devices_worked_no_time_is_lost(
    seconds: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_shard.ServedModel, "seconds", lambda self: seconds)
    with placement() as (file, devices):
        backend = LayerSplitBackend(file, SPEC, devices, OPTIONS)
        with closing(backend):
            driver = Driver(backend)
            with pytest.raises(ShardLostError, match=r"as the seconds of 1 devices"):
                driver.feed((driver.start(), np.array([1, 2, 3], np.int32)))


def test_each_device_of_a_daemon_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_shard.ServedModel, "seconds", lambda self: (0.25, 0.5))
    opening = Open(__version__, ("cpu:1", "cpu:2"), "error", 0, "float32")
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(REFERENCE.path))
        daemon = Supervisor("cpu:1", ThreadedDaemon, opening, Timeouts(60, 60), Response)
        stack.callback(daemon.close)
        devices = [RemoteDevice(DeviceName("cpu", 1 + number), daemon, number) for number in range(2)]
        backend = stack.enter_context(closing(LayerSplitBackend(file, SPEC, devices, OPTIONS)))
        seen: list[tuple[str, SequenceRows, float]] = []
        backend.watch_rows("cpu:1", lambda rows, seconds: seen.append(("cpu:1", rows, seconds)))
        backend.watch_rows("cpu:2", lambda rows, seconds: seen.append(("cpu:2", rows, seconds)))
        driver = Driver(backend)
        sequence = driver.start()
        driver.feed((sequence, np.array([1, 2, 3], np.int32)))
        driver.feed((sequence, np.array([4], np.int32)))
    row = SequenceRows(3, 1, 1)
    assert seen[-2:] == [("cpu:1", row, 0.25), ("cpu:2", row, 0.5)]


def test_a_cpu_in_a_daemon_computes_a_piece_while_the_next_one_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, overlapped, ran = threading.Semaphore(0), list[bool](), daemon_shard.ServedModel.run

    class Waiting(LocalShard):
        """Computes the first piece once the second one is there."""

        def forward(self, step: Step, activation: Activation | None) -> Activation | Pending:
            if not overlapped:
                overlapped.append(arrived.acquire(timeout=5) and arrived.acquire(timeout=5))
            return super().forward(step, activation)

    def run(self: daemon_shard.ServedModel, message: Forward) -> Work:
        arrived.release()
        return ran(self, message)

    def logits(transport: Transport) -> NDArray[np.float32]:
        opening = Open(__version__, ("cpu:1",), "error", 0, "float32")
        with ExitStack() as stack:
            file = stack.enter_context(open_gguf(REFERENCE.path))
            daemon = Supervisor("cpu:1", ThreadedDaemon, opening, Timeouts(60, 60), Response)
            stack.callback(daemon.close)
            devices = [HostDevice(0), RemoteDevice(DeviceName("cpu", 1), daemon, transport=transport)]
            options = replace(OPTIONS, context=512, microbatch=64)
            driver = Driver(stack.enter_context(closing(LayerSplitBackend(file, SPEC, devices, options))))
            sequence, tokens = driver.start(), np.arange(200, dtype=np.int32)
            driver.feed((sequence, tokens), wanted=False)
            return driver.feed((sequence, tokens[:1]))[0]

    expected = logits(Transport(shared=True))
    monkeypatch.setattr(daemon_layers, "LocalShard", Waiting)
    monkeypatch.setattr(daemon_shard.ServedModel, "run", run)
    assert np.array_equal(logits(Transport(shared=False)), expected)
    assert overlapped == [True]


def test_shards_in_daemons_are_closed_when_a_layer_here_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[Arena] = []

    def recorded(size: int) -> Arena:
        arenas.append(shared_arena(size))
        return arenas[-1]

    def fail(*args: object, **options: object) -> None:
        # The daemon has been told what to load: there is memory to give back.
        assert [arena.fd is not None for arena in arenas] == [True]
        raise DeviceError("cpu:0: lost its way")

    monkeypatch.setattr(shard, "shared_arena", recorded)
    with placement() as (file, devices):
        monkeypatch.setattr(LayerBuilder, "layer", fail)
        with pytest.raises(DeviceError, match="lost its way") as caught:
            LayerSplitBackend(file, SPEC, devices, OPTIONS)
        # The daemon still lives, and so does the error, whose frames refer to the shards.
        assert caught.value and [arena.fd for arena in arenas] == [None]


def test_a_daemon_reads_a_step_while_the_cpu_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Step] = []
    arrived, forward, announce = threading.Event(), LocalShard.forward, daemon_shard.ServedModel.announce

    def compute(self: LocalShard, step: Step, activation: Activation | None) -> Activation | Pending:
        if activation is None:
            assert arrived.wait(30)
            arrived.clear()
        return forward(self, step, activation)

    def hear(self: daemon_shard.ServedModel, message: Announce) -> None:
        announce(self, message)
        heard.append(message.step)
        arrived.set()

    monkeypatch.setattr(LocalShard, "forward", compute)
    monkeypatch.setattr(daemon_shard.ServedModel, "announce", hear)
    with placement() as (file, devices):
        backend = LayerSplitBackend(file, SPEC, devices, OPTIONS)
        with closing(backend):
            driver = Driver(backend)
            sequence = driver.start()
            for token in (1, 2, 3):
                driver.feed((sequence, np.array([token], np.int32)))
    # Each of them once.
    assert [step.positions.tolist() for step in heard] == [[0], [1], [2]]
