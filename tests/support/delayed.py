"""Devices whose work is only queued: a run picks which stream goes on next, so that a missing wait shows.

Streams of two devices hold closures, and events order them as on GPUs. `run` takes the next closure of a stream that
does not wait, until all are done: every order that the events allow may occur, and some streams lag far behind.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from luce.runtime.device import Array, CopyStream, Event
from luce.runtime.host import HostDevice

# How often another stream goes first.
_CHANGE = 0.1


class World:
    """All streams."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[deque[Callable[[], None] | DelayedEvent | tuple[str, DelayedEvent]]] = []

    def stream(self) -> deque[Any]:
        """A new stream."""
        self._streams.append(deque())
        return self._streams[-1]

    def run(self, until: DelayedEvent | None = None) -> None:
        """Work until an event has happened, or until nothing is left."""
        order = self._random.sample(self._streams, len(self._streams))
        while until is None or not until.finished:
            if self._random.random() < _CHANGE:
                self._random.shuffle(order)
            ready = (s for s in order if s and not (isinstance(s[0], tuple) and not s[0][1].finished))
            if (stream := next(ready, None)) is None:
                assert not any(self._streams) and until is None, "streams wait for each other"
                return
            item = stream.popleft()
            if isinstance(item, DelayedEvent):
                item.finished = True
            elif not isinstance(item, tuple):
                item()


class DelayedEvent(Event):
    """An entry in a stream."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.finished = False

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self._world.run(self)

    def seconds_since(self, start: Event) -> float:
        return 0.0


class DelayedStream(CopyStream):
    """A stream of closures, events and waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.queue = world.stream()

    def wait_for(self, event: Event) -> None:
        if isinstance(event, DelayedEvent):
            self.queue.append(("wait", event))
        else:
            event.wait()

    def copy(self, target: Array, source: Array) -> None:
        # In two halves, so that another stream may come between.
        middle = len(target) // 2
        self.queue.append(lambda: np.copyto(target[:middle], source[:middle]))
        self.queue.append(lambda: np.copyto(target[middle:], source[middle:]))

    def record(self, *, timing: bool = False) -> Event:
        event = DelayedEvent(self._world)
        self.queue.append(event)
        return event


class DelayedDevice(HostDevice):
    """A device in a World, in which `queue` takes the place of launches. `siblings` reach each other."""

    host = False
    packed = True

    def __init__(self, world: World, index: int, siblings: Sequence[int] = ()) -> None:
        super().__init__(index)
        self._world = world
        self._siblings = siblings
        self._stream = DelayedStream(world)

    def queue(self, work: Callable[[], None]) -> None:
        """Do something in this device's order."""
        self._stream.queue.append(work)

    def record(self, *, timing: bool = False) -> Event:
        return self._stream.record()

    def wait_for(self, event: Event) -> None:
        self._stream.wait_for(event)

    def copy_stream(self) -> CopyStream:
        return DelayedStream(self._world)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        return np.zeros(shape, dtype)

    def reaches(self, other: object) -> bool:
        return isinstance(other, DelayedDevice) and other.name.index in self._siblings

    def synchronize(self) -> None:
        self.record().wait()
