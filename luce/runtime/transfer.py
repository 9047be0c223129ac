"""Copies of arrays from one device to the next: directly where the devices reach each other, else by pinned memory.

Memory shared with another process is such pinned host memory: a device copies into it or out of it, and nothing else
is needed on the way.

Copies run on their own streams beside the devices' work, and only events wait for them. Memory that two streams use
needs an event in each direction: a copy waits for the work that writes its source, and work that writes the source or
the target again waits for the copy, or for the reader.

Two threads may drive the two ends of a link. An event cannot be waited for before it is recorded, so the sender blocks
until the receiver has released the arrays of the last transfer through the same memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from luce.errors import LuceError
from luce.runtime.device import Array, CopyStream, Device, Event

_log = logging.getLogger(__name__)

#: transfers of a link with memory of their own: one is copied while the other is read
DEPTH = 2


class Transfer:
    """One or several arrays on their way over a link, made by Link.send.

    The transfer after the next uses the same memory again. The receiver calls `receive` before and `release` after it
    queues the work that uses the arrays; until then that transfer blocks its sender.
    """

    def __init__(self, target: Device, memory: Array, staging: Array | None, unreleased: deque[Transfer]) -> None:
        self._target = target
        #: transfers of the link whose `released` the receiver's thread still has to wait for
        self._unreleased = unreleased
        self._free = threading.Event()
        self._free.set()
        #: float32 memory on the target; on a host, pinned for the source's copy stream
        self.memory = memory
        #: pinned float32 memory on the way, None if the source's copy stream writes to `memory`
        self.staging = staging
        #: the source's arrays, alive until `source_read`
        self.sent: Sequence[Array] = ()
        #: the arrays on the target
        self.arrays: Sequence[Array] = ()
        #: when the copy has read the source's arrays
        self.source_read: Event | None = None
        #: when the copy has read `staging`
        self.staging_read: Event | None = None
        #: when the arrays are complete on the target
        self.arrived: Event | None = None
        #: when the receiver's work has used the arrays
        self.released: Event | None = None

    def acquire(self) -> None:
        """For the sender: wait until the receiver has released the arrays sent before through this memory."""
        self._free.wait()
        self._free.clear()

    def receive(self) -> tuple[Array, ...]:
        """The arrays on the target, for work that is queued there from now on."""
        assert self.arrived is not None
        self._target.wait_for(self.arrived)
        return tuple(self.arrays)

    def release(self, event: Event | None) -> None:
        """The receiver's work has used the arrays once `event` is done; None if no work will use them."""
        self.released = event
        if not self._target.remote:
            self._free.set()
            return
        # Only the receiver's thread hears from the other process, and the sender blocks until it has heard.
        if event is not None:
            self._unreleased.append(self)
            if len(self._unreleased) == DEPTH:
                self._free_oldest()
            return
        self._free.set()
        # No release may follow this one, and the sender waits for the transfers before it.
        while self._unreleased:
            with contextlib.suppress(LuceError):
                self._free_oldest()

    def _free_oldest(self) -> None:
        first = self._unreleased.popleft()
        try:
            _wait(self._target, first.released)
        finally:
            first._free.set()

    def reset(self) -> Event | None:
        """Forget the last transfer, while no thread sends or receives. Returns its `arrived`."""
        arrived = self.arrived
        self.source_read = self.staging_read = self.arrived = self.released = None
        self._unreleased.clear()
        self._free.set()
        return arrived


class Link:
    """A connection from `source` to `target` for float32 arrays of together at most `size` values.

    The constructor allocates all memory; `send` allocates none. With `peer` False, all copies go through pinned host
    memory. `watch` gets the events at the start and at the end of each copy. Raises OutOfMemoryError.
    """

    def __init__(
        self, source: Device, target: Device, size: int, *, peer: bool, watch: Callable[[Event, Event], None]
    ) -> None:
        self._source = source
        self._target = target
        self._watch = watch
        #: whether copies go from device to device without host memory in between
        self.direct = peer and source.reaches(target)
        staged = not (self.direct or source.host or target.host or source.remote or target.remote)
        if peer and staged:
            _log.info("%s and %s do not reach each other: copies go through host memory", source.name, target.name)
        self._from = source.copy_stream()
        self._to = target.copy_stream()
        #: the stream of copies that need no staging
        self._direct = self._to if source.remote and not target.remote else self._from
        unreleased: deque[Transfer] = deque()
        #: the transfers whose memory `send` uses in turn
        self.transfers = [self._transfer(size, unreleased) for _ in range(DEPTH)]
        self._sends = 0

    def _transfer(self, size: int, unreleased: deque[Transfer]) -> Transfer:
        source, target = self._source, self._target
        if target.remote:
            return Transfer(target, target.zeros(size), None, unreleased)
        if target.host:
            return Transfer(target, source.pinned(4 * size).view(np.float32), None, unreleased)
        staging = None
        if not (self.direct or source.remote):
            staging = (target if source.host else source).pinned(4 * size).view(np.float32)
        return Transfer(target, target.zeros(size), staging, unreleased)

    @property
    def next_memory(self) -> Array:
        """Where the arrays of the next transfer will lie, one behind the other."""
        return self.transfers[self._sends % DEPTH].memory

    def send(self, arrays: Sequence[Array], ready: Event) -> Transfer:
        """Queue the copies of float32 arrays [rows, ...] of contiguous rows, which are complete when `ready` is done.

        No work may write to them until the transfer's `source_read`. Their memory is not used again before that, even
        if the caller drops the arrays after this call.
        """
        transfer = self._next(arrays)
        if transfer.staging is None:
            self._direct.wait_for(ready)
            _wait(self._direct, transfer.released)
            transfer.source_read = transfer.arrived = self._copy(self._direct, transfer.arrays, arrays)
            return transfer
        self._from.wait_for(ready)
        staged = _views(transfer.staging, arrays)
        _wait(self._from, transfer.staging_read)
        transfer.source_read = self._copy(self._from, staged, arrays)
        self._to.wait_for(transfer.source_read)
        _wait(self._to, transfer.released)
        transfer.staging_read = transfer.arrived = self._copy(self._to, transfer.arrays, staged)
        return transfer

    def send_on(
        self, device: Device, arrays: Sequence[Array], ready: Event, copy: Callable[[Sequence[Array]], None]
    ) -> Transfer:
        """As `send`, where copy(targets) queues the copies among the work of `device`, one of the link's ends.

        It has recorded `ready`, with timing; the arrays are complete there. Not on a link that stages.
        """
        transfer = self._next(arrays)
        assert transfer.staging is None
        _wait(device, transfer.released)
        copy(transfer.arrays)
        transfer.source_read = transfer.arrived = end = device.record(timing=True)
        self._watch(ready, end)
        return transfer

    def _next(self, arrays: Sequence[Array]) -> Transfer:
        """The transfer of these arrays, whose memory is free but for `released`."""
        transfer = self.transfers[self._sends % DEPTH]
        self._sends += 1
        transfer.acquire()
        # This drops the arrays sent through this memory before. Their memory becomes free for the source's next work,
        # which must come after the copy.
        _wait(self._source, transfer.source_read)
        transfer.sent = arrays
        transfer.arrays = _views(transfer.memory, arrays)
        return transfer

    def settle(self) -> None:
        """Wait until no copy runs, and reset all transfers. No other thread may use the link.

        Raises LuceError if a copy failed.
        """
        for arrived in [transfer.reset() for transfer in self.transfers]:
            if arrived is not None:
                arrived.wait()

    def _copy(self, stream: CopyStream, targets: Sequence[Array], sources: Sequence[Array]) -> Event:
        start = stream.record(timing=True)
        for target, source in zip(targets, sources, strict=True):
            stream.copy(target, source)
        end = stream.record(timing=True)
        self._watch(start, end)
        return end


def _wait(waiting: Device | CopyStream, event: Event | None) -> None:
    if event is not None:
        waiting.wait_for(event)


def _views(memory: Array, like: Sequence[Array]) -> list[Array]:
    """Arrays of the given shapes side by side in flat memory."""
    views, at = [], 0
    for array in like:
        views.append(memory[at : at + array.size].reshape(array.shape))
        at += array.size
    return views
