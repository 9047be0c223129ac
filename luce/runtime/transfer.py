"""From one device to the next: directly where the devices reach each other, else through pinned host memory.

Memory that is shared with another process is such host memory: a device copies into it or out of it, and nothing else
is needed on the way.

Copies run on streams of their own beside the devices' work, and nobody waits for them but by events. Memory that two
streams use needs an event in each direction: a copy waits for the work that writes its source, and whoever writes the
source or the target again waits for the copy, or for the reader, before.

The two ends of a link may be driven by two threads: an event cannot be waited for before it is recorded, so the sender
blocks until the receiver has let go of what was sent from the same memory before.
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

#: Sends whose memory is apart: one is copied while the other is read.
DEPTH = 2


class Passage:
    """One array, or several, on the way: made by Link.send, in memory that the next send but one uses again.

    The receiver calls `receive` before and `release` after it queues the work that uses the arrays. Until it has called
    `release`, the next send but one blocks.
    """

    def __init__(self, target: Device, landing: Array, staging: Array | None, held: deque[Passage]) -> None:
        self._target = target
        #: passages of the link whose `released` the receiver's thread still has to wait for
        self._held = held
        self._free = threading.Event()
        self._free.set()
        #: float32 memory on the target; if that is a host, pinned for the source's copy stream
        self.landing = landing
        #: pinned float32 memory on the way, None if the source's copy stream writes to `landing`
        self.staging = staging
        #: the source's arrays, alive until `taken`
        self.sent: Sequence[Array] = ()
        self.arrays: Sequence[Array] = ()
        #: when nothing reads what was sent, nothing reads `staging`, the arrays are there, nothing uses the arrays
        self.taken: Event | None = None
        self.cleared: Event | None = None
        self.landed: Event | None = None
        self.released: Event | None = None

    def take(self) -> None:
        """For the sender: wait until the receiver has let go of what was sent before."""
        self._free.wait()
        self._free.clear()

    def receive(self) -> tuple[Array, ...]:
        """The arrays on the target, for work that is queued there from now on."""
        assert self.landed is not None
        self._target.wait_for(self.landed)
        return tuple(self.arrays)

    def release(self, event: Event | None) -> None:
        """Nothing uses the arrays once `event` has happened; None: nobody will use them."""
        self.released = event
        if not self._target.shared:
            self._free.set()
            return
        # Only the receiver's thread can hear from its process, and the sender blocks until it has.
        if event is not None:
            self._held.append(self)
            if len(self._held) == DEPTH:
                self._let_go()
            return
        self._free.set()
        # Nothing may be released after this one, and the sender waits for those before it.
        while self._held:
            with contextlib.suppress(LuceError):
                self._let_go()

    def _let_go(self) -> None:
        first = self._held.popleft()
        try:
            _wait(self._target, first.released)
        finally:
            first._free.set()

    def forget(self) -> Event | None:
        """Nobody sends or receives now; when the copy that was sent last is there."""
        landed = self.landed
        self.taken = self.cleared = self.landed = self.released = None
        self._held.clear()
        self._free.set()
        return landed


class Link:
    """A way from `source` to `target` for float32 arrays of together at most `size` values.

    All memory is taken here; `send` takes none. `peer` False keeps to pinned host memory. `watch` gets the events at
    the start and at the end of each copy. Raises OutOfMemoryError.
    """

    def __init__(
        self, source: Device, target: Device, size: int, *, peer: bool, watch: Callable[[Event, Event], None]
    ) -> None:
        self._source = source
        self._target = target
        self._watch = watch
        #: whether copies go from device to device without host memory in between
        self.direct = peer and source.reaches(target)
        staged = not (self.direct or source.host or target.host or source.shared or target.shared)
        if peer and staged:
            _log.info("%s and %s do not reach each other: copies go through host memory", source.name, target.name)
        self._off = source.copy_stream()
        self._on = target.copy_stream()
        #: the stream of copies that need no memory on the way
        self._once = self._on if source.shared and not target.shared else self._off
        held: deque[Passage] = deque()
        self._passages = [self._passage(size, held) for _ in range(DEPTH)]
        self._sends = 0

    def _passage(self, size: int, held: deque[Passage]) -> Passage:
        source, target = self._source, self._target
        if target.shared:
            return Passage(target, target.zeros(size), None, held)
        if target.host:
            return Passage(target, source.pinned(4 * size).view(np.float32), None, held)
        staging = None
        if not (self.direct or source.shared):
            staging = (target if source.host else source).pinned(4 * size).view(np.float32)
        return Passage(target, target.zeros(size), staging, held)

    def send(self, arrays: Sequence[Array], ready: Event) -> Passage:
        """Queue the copies of float32 arrays [rows, ...] of contiguous rows, which are written when `ready` happens.

        Nothing may write to them until the passage's `taken`; the memory of arrays that are dropped after this call is
        not used again by then.
        """
        passage = self._passages[self._sends % DEPTH]
        self._sends += 1
        passage.take()
        # The arrays sent from here before are dropped now: their memory is free for the source's next work, and that
        # must come after the copy.
        _wait(self._source, passage.taken)
        passage.sent = arrays
        passage.arrays = _views(passage.landing, arrays)
        if passage.staging is None:
            self._once.wait_for(ready)
            _wait(self._once, passage.released)
            passage.taken = passage.landed = self._copy(self._once, passage.arrays, arrays)
            return passage
        self._off.wait_for(ready)
        staged = _views(passage.staging, arrays)
        _wait(self._off, passage.cleared)
        passage.taken = self._copy(self._off, staged, arrays)
        self._on.wait_for(passage.taken)
        _wait(self._on, passage.released)
        passage.cleared = passage.landed = self._copy(self._on, passage.arrays, staged)
        return passage

    def settle(self) -> None:
        """Wait until no copy runs, and forget those that were: nothing else may run. Raises LuceError if one failed."""
        for landed in [passage.forget() for passage in self._passages]:
            if landed is not None:
                landed.wait()

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
