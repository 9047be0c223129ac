"""Links between devices whose streams run in every order that the events allow."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.runtime.device import Device, Event
from luce.runtime.host import HostDevice, HostEvent
from luce.runtime.transfer import Link, Transfer
from tests.support.delayed import DelayedDevice, World

Floats = NDArray[np.float32]
SENDS = 7


class Shard:
    """Adds 1 to what is handed over, in place and in two halves; the first one makes it, the last one keeps a copy."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: The pool of a device: memory that was dropped is given out again at once, the newest first.
        self.pool: list[Floats] = []
        self.kept: list[list[Floats]] = []

    def do(self, work: Sequence[object]) -> None:
        for part in work:
            if isinstance(self.device, DelayedDevice):
                self.device.queue(part)
            else:
                part()

    def make(self, number: int) -> list[Floats]:
        # 6 rows of 4 values of a wider array, as keys and values are, and 6 rows of 3.
        wide, narrow = np.empty((6, 9), np.float32), self.pool.pop() if self.pool else np.empty((6, 3), np.float32)
        self.do([lambda: wide.fill(number), lambda: narrow[:3].fill(-number), lambda: narrow[3:].fill(-number)])
        return [wide[:, 2:6], narrow]

    def add(self, arrays: Sequence[Floats]) -> None:
        def half(rows: slice) -> None:
            for array in arrays:
                array[rows] += 1

        self.do([lambda: half(slice(0, 3)), lambda: half(slice(3, 6))])

    def keep(self, arrays: Sequence[Floats]) -> None:
        self.do([lambda: self.kept.append([np.array(array) for array in arrays])])


def send_all(devices: Sequence[Device], *, peer: bool, own: bool = False) -> list[list[Floats]]:
    """Send SENDS activations through a shard on each device, in rounds as the backend does; what the last one kept.

    `own`: the copies are among the work of the first device of each link, or of the second where the first is remote.
    """
    shards = [Shard(device) for device in devices]
    watched: list[tuple[Event, Event]] = []
    links = [
        Link(a.device, b.device, 6 * 7, peer=peer, watch=lambda start, end: watched.append((start, end)))
        for a, b in itertools.pairwise(shards)
    ]
    handed: list[Transfer | None] = [None] * SENDS
    for number in range(SENDS + len(shards) - 1):
        for index, shard in enumerate(shards):
            send, last = number - index, index == len(shards) - 1
            if not 0 <= send < SENDS:
                continue
            before = handed[send]
            arrays = shard.make(send) if before is None else before.receive()
            shard.add(arrays)
            if last:
                shard.keep(arrays)
            done = shard.device.record()
            if not last:
                dropped = links[index].transfers[send % 2].sent
                if own:
                    end = shards[index + shard.device.remote]
                    handed[send] = after = links[index].send_on(end.device, arrays, done, copier(end, arrays))
                else:
                    handed[send] = after = links[index].send(arrays, done)
                done = after.source_read
                if before is None and dropped:
                    shard.pool.append(dropped[1])
            if before is not None:
                before.release(done)
    for shard in shards:
        shard.device.synchronize()
    for link in links:
        link.settle()
    assert len(watched) >= SENDS * len(links) and all(start.done() and end.done() for start, end in watched)
    return shards[-1].kept


def copier(end: Shard, arrays: Sequence[Floats]) -> Callable[[Sequence[Floats]], None]:
    """What queues copies of arrays among a shard's work, in two halves."""

    def copy(targets: Sequence[Floats]) -> None:
        for rows in (slice(0, 3), slice(3, 6)):
            for target, array in zip(targets, arrays, strict=True):
                end.do([partial(np.copyto, target[rows], array[rows])])

    return copy


def check(devices: Sequence[Device], *, peer: bool = True, own: bool = False) -> None:
    kept = send_all(devices, peer=peer, own=own)
    assert len(kept) == SENDS
    for send, (wide, narrow) in enumerate(kept):
        np.testing.assert_array_equal(wide, np.full((6, 4), send + len(devices), np.float32))
        np.testing.assert_array_equal(narrow, np.full((6, 3), len(devices) - send, np.float32))


@pytest.mark.parametrize("peer", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_between_gpus(count: int, peer: bool) -> None:
    for seed in range(60):
        world = World(seed)
        check([DelayedDevice(world, index, range(count)) for index in range(count)], peer=peer)


@pytest.mark.parametrize("kinds", ["gh", "hg", "ghg", "hgh", "gghhgg"])
def test_between_gpus_and_hosts(kinds: str) -> None:
    for seed in range(60):
        world = World(seed)
        check([HostDevice(i) if kind == "h" else DelayedDevice(world, i) for i, kind in enumerate(kinds)])


class Shared(HostDevice):
    """Memory of another process."""

    remote = True


@pytest.mark.parametrize("kinds", ["gg", "sg", "gggg"])
def test_copies_among_the_work_of_a_device(kinds: str) -> None:
    for seed in range(60):
        world, count = World(seed), range(len(kinds))
        check([Shared(i) if kinds[i] == "s" else DelayedDevice(world, i, count) for i in count], own=True)


def test_between_hosts() -> None:
    check([HostDevice(0), HostDevice(1), HostDevice(2)])


def test_the_sender_waits_for_the_receiver() -> None:
    link = Link(HostDevice(0), HostDevice(1), 4, peer=True, watch=lambda start, end: None)
    transfers: list[Transfer] = []

    def send_three() -> None:
        transfers.extend(link.send([np.full(4, number, np.float32)], HostEvent()) for number in range(3))

    sender = threading.Thread(target=send_three)
    sender.start()
    sender.join(0.2)
    # The third has no memory yet.
    (first,) = link.transfers[0].receive()
    assert sender.is_alive() and (first == 0).all()
    link.transfers[0].release(HostEvent())
    sender.join()
    assert (first == 2).all() and (transfers[1].receive()[0] == 1).all()


def test_direct_only_where_devices_reach_each_other() -> None:
    world = World(0)
    near, far = (DelayedDevice(world, 0, range(2)), DelayedDevice(world, 1, range(2))), DelayedDevice(world, 2)
    assert Link(*near, 4, peer=True, watch=print).direct
    assert not Link(*near, 4, peer=False, watch=print).direct
    assert not Link(near[0], far, 4, peer=True, watch=print).direct


def test_a_dropped_transfer_frees_those_before_it() -> None:
    link = Link(HostDevice(0), Shared(1), 8, peer=False, watch=lambda start, end: None)
    array = np.zeros((2, 4), np.float32)
    for event in (HostEvent(), None, HostEvent(), None):
        # Blocks for ever if what was sent from the same memory is still held.
        link.send([array], HostEvent()).release(event)
