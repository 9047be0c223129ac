"""Rows from one device to the next through memory of the host, and kernels/handover.cu: no host stands between them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import DeviceError
from luce.ipc.arena import Arena, shared_arena
from luce.ops.handover import MOST_BYTES, can_hand_over, hand_over, take_over
from luce.runtime.device import Device, Flag
from luce.runtime.found import found
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from tests.support.devices import emulated_only, on_devices
from tests.support.emulated import EmulatedDevice

#: bytes behind the arena's first page
ROOM = 2 * MOST_BYTES


class Floor:
    """Memory that devices share, with some rows in it. `shapes`: of the rows, one array behind the other."""

    def __init__(self, arena: Arena, shapes: Sequence[tuple[int, ...]], begin: int = 4096) -> None:
        self.arena = arena
        self.flag = arena.input_flag
        self.places = []
        self.begin = begin
        for shape in shapes:
            place = arena.floats(begin, 1, [int(np.prod(shape))])[0].reshape(shape)
            begin += place.nbytes
            self.places.append(place)
        self.end = begin

    def fill(self, value: int) -> None:
        """Write one byte everywhere behind the flags."""
        self.arena.memory[4096:] = value

    def untouched(self, value: int) -> bool:
        """Whether nothing but the rows has been written."""
        memory = self.arena.memory
        return bool((memory[4096 : self.begin] == value).all() and (memory[self.end :] == value).all())


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Shared memory that the first GPU, if there is one, has pinned."""
    made = shared_arena(4096 + ROOM)
    yield made
    made.close()


def bits(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    """Floats of any bits, NaN among them."""
    values = np.random.default_rng(seed).integers(0, 1 << 32, shape, np.uint32)
    return values.view(np.float32)


def same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """Whether two arrays have the same bits."""
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())


SHAPES = [[(1, 1)], [(1, 5120)], [(3, 2731)], [(1, 8192), (1, 7)], [(2, 5), (2, 3), (2, 1)], [(1, MOST_BYTES // 4)]]


@on_devices("shapes", SHAPES, gpu=[*SHAPES, [(16, 8192)], [(17, 2047), (17, 1024)]])
@pytest.mark.parametrize("begin", [4096, 4100])
def test_rows_arrive(device: Device, shapes: list[tuple[int, ...]], begin: int, arena: Arena) -> None:
    assert not arena.pin([device])
    floor = Floor(arena, shapes, begin)
    floor.fill(0xA5)
    sent = [bits(shape, number) for number, shape in enumerate(shapes)]
    hand_over(device, [device.upload(rows) for rows in sent], floor.places, Flag(floor.flag, 7))
    device.synchronize()
    assert floor.flag[0] == 7 and floor.untouched(0xA5)
    assert all(same(place, rows) for place, rows in zip(floor.places, sent, strict=True))
    # With a word on each side that stays as it is.
    around = [device.zeros(rows.size + 2) for rows in sent]
    taken = [memory[1:-1].reshape(rows.shape) for memory, rows in zip(around, sent, strict=True)]
    take_over(device, Flag(floor.flag, 7), floor.places, taken)
    for memory, rows in zip(around, sent, strict=True):
        result = device.download(memory)
        assert same(result[1:-1], rows.ravel()) and result[0] == result[-1] == 0


@on_devices("before, value", [(6, 7), (0xFFFFFFFF, 0), (0xFFFFFFFE, 0xFFFFFFFF), (0x7FFFFFFF, 0x80000000)])
def test_counters_wrap(device: Device, before: int, value: int, arena: Arena) -> None:
    assert not arena.pin([device])
    floor = Floor(arena, [(1, 3)])
    floor.flag[0] = before
    sent = bits((1, 3))
    hand_over(device, [device.upload(sent)], floor.places, Flag(floor.flag, value))
    device.synchronize()
    assert floor.flag[0] == value
    rows = device.zeros((1, 3))
    # An earlier step's rows, this one's, and those that were given up for later ones.
    for seen in (before, value, value - 5):
        take_over(device, Flag(floor.flag, seen), floor.places, [rows])
        assert same(device.download(rows), sent)


@emulated_only
def test_the_flag_comes_last(device: Device, monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    floor = Floor(arena, [(1, 8), (1, 9)])
    seen = []
    launch = device.launch

    def noted(*arguments: Any, **options: Any) -> None:
        launch(*arguments, **options)
        seen.append(int(floor.flag[0]))

    monkeypatch.setattr(device, "launch", noted)
    hand_over(device, [device.upload(bits((1, 8))), device.upload(bits((1, 9)))], floor.places, Flag(floor.flag, 3))
    assert seen == [0, 3]


@on_devices("raised", [5, 1004], gpu=[5, 1004])
def test_a_device_waits_for_rows(device: Device, raised: int, arena: Arena) -> None:
    assert not arena.pin([device])
    floor = Floor(arena, [(1, 9000)])
    floor.fill(0)
    # Steps before this one, the last of them long ago.
    floor.flag[0] = 4
    rows, sent = device.zeros((1, 9000)), bits((1, 9000))
    # Compiled before the clock counts.
    take_over(device, Flag(floor.flag, 4), floor.places, [rows])
    device.synchronize()
    ended = threading.Event()

    def wait() -> None:
        take_over(device, Flag(floor.flag, 5), floor.places, [rows])
        device.synchronize()
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not ended.wait(0.2)
    floor.places[0][...] = sent
    # Also by whoever gives a step up, for a later one.
    Flag(floor.flag, raised).set()
    waiting.join(60)
    assert ended.is_set() and same(device.download(rows), sent)


def test_what_is_handed_over() -> None:
    device, most = EmulatedDevice(), MOST_BYTES // 4
    assert can_hand_over(device, [device.empty((1, most))])
    assert can_hand_over(device, [device.empty((1, most - 8)), device.empty(8)])
    assert not can_hand_over(device, [device.empty((1, most)), device.empty(1)])
    assert not can_hand_over(device, [device.empty((2, 8))[:, :4]])
    # HIP, and drivers whose kernels have other addresses for the host's memory.
    assert not can_hand_over(HostDevice(), [np.zeros(4, np.float32)])
    with pytest.raises(DeviceError, match="cpu:0 does not map pinned memory"):
        HostDevice().mapped(np.zeros(4, np.float32))


STEPS = 200


def relay(sender: GpuDevice, receiver: GpuDevice, floor: Floor) -> list[bool]:
    """Hand over rows of many steps, each of which the receiver waits for before they are made; whether they arrived."""
    width = floor.places[0].size
    sent = [bits((1, width), step) for step in range(STEPS)]
    uploaded = [sender.upload(rows) for rows in sent]
    taken = [receiver.zeros((1, width)) for _ in range(STEPS)]
    sender.synchronize()
    receiver.synchronize()
    for step in range(STEPS):
        flag = Flag(floor.flag, step + 1)
        take_over(receiver, flag, floor.places, [taken[step]])
        hand_over(sender, [uploaded[step]], floor.places, flag)
        # The place is used again.
        receiver.synchronize()
    return [same(receiver.download(rows), expected) for rows, expected in zip(taken, sent, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [5120, 8 * 5120])
def test_between_streams_of_a_gpu(gpu: GpuDevice, width: int, arena: Arena) -> None:
    if not gpu.maps_pinned:
        pytest.skip(f"{gpu.name} does not map pinned memory")
    beside = GpuDevice(gpu.name.kind, gpu.name.index)  # type: ignore[arg-type]
    try:
        assert not arena.pin([gpu])
        assert all(relay(gpu, beside, Floor(arena, [(1, width)])))
    finally:
        beside.close()


@pytest.mark.gpu
def test_between_two_gpus(gpu: GpuDevice, arena: Arena) -> None:
    gpus = [each.name for each in found() if each.name.kind == gpu.name.kind]
    if len(gpus) < 2 or not gpu.maps_pinned:
        pytest.skip("needs two GPUs that map pinned memory")
    other = GpuDevice(gpu.name.kind, gpus[1].index)  # type: ignore[arg-type]
    try:
        assert not arena.pin([gpu, other])
        assert all(relay(gpu, other, Floor(arena, [(1, 5120)])))
        floor = Floor(arena, [(1, 5120)])
        floor.flag[0] = 0
        assert all(relay(other, gpu, floor))
    finally:
        other.close()


def receive(index: int, path: str, size: int, width: int, pipe: Connection) -> None:
    """Another process: let its GPU take over the rows of each step, and answer with them."""
    device = GpuDevice("cuda", index)
    with open(path, "r+b") as file:
        arena = Arena(size, file.fileno())
    assert not arena.pin([device])
    floor = Floor(arena, [(1, width)])
    rows = device.zeros((1, width))
    take_over(device, Flag(floor.flag, 0), floor.places, [rows])
    device.synchronize()
    while (step := pipe.recv()) is not None:
        take_over(device, Flag(floor.flag, step), floor.places, [rows])
        pipe.send("waits")
        pipe.send(device.download(rows))
    arena.close()
    device.close()


@pytest.mark.gpu
def test_between_processes(gpu: GpuDevice, arena: Arena) -> None:
    if not gpu.maps_pinned:
        pytest.skip(f"{gpu.name} does not map pinned memory")
    assert not arena.pin([gpu])
    floor, width = Floor(arena, [(1, 5120)]), 5120
    last = [each.name.index for each in found() if each.name.kind == gpu.name.kind][-1]
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    path = f"/proc/{os.getpid()}/fd/{arena.fd}"
    process = spawn.Process(target=receive, args=(last, path, len(arena.memory), width, theirs))
    process.start()
    try:
        for step in range(1, 20):
            sent = bits((1, width), step)
            rows = gpu.upload(sent)
            ours.send(step)
            assert ours.poll(60) and ours.recv() == "waits"
            hand_over(gpu, [rows], floor.places, Flag(floor.flag, step))
            gpu.synchronize()
            assert ours.poll(60) and same(ours.recv(), sent)
    finally:
        # It waits no longer, whatever has failed.
        Flag(floor.flag, 1000).set()
        ours.send(None)
        process.join(60)
