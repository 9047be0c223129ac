"""How long the shards work and the copies between them take, measured by the devices' own events.

An event is asked whether it has happened and never waited for: measuring stops nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from luce.runtime.device import Event

#: upper bounds of the buckets in seconds; one more bucket holds what is above
BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Durations:
    """Counts of each bucket of BOUNDS and of what is above, and the sum of all values in seconds."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True)
class ShardTimes:
    """A shard's work on parts of steps, and the copies to the next shard (None for the last one)."""

    device: str
    work: Durations
    copies: Durations | None


class Clock:
    """Collects spans of time of one device. One thread adds them, one counts, any may read."""

    def __init__(self) -> None:
        self._open: deque[tuple[Event, Event]] = deque()
        self._counts = [0] * (len(BOUNDS) + 1)
        #: seconds of all spans that have been counted
        self.total = 0.0

    def add(self, start: Event, end: Event) -> None:
        """A span between two events with timing, which need not have happened yet; in the order of their ends."""
        self._open.append((start, end))

    def count(self) -> None:
        """Count the spans that are over. Raises DeviceError if the work before an event failed."""
        while self._open and self._open[0][1].done():
            start, end = self._open.popleft()
            seconds = end.seconds_since(start)
            self._counts[bisect_left(BOUNDS, seconds)] += 1
            self.total += seconds

    def forget(self) -> None:
        """Drop the spans that are not counted yet: their work failed."""
        self._open.clear()

    def durations(self) -> Durations:
        """What has been counted so far."""
        return Durations(tuple(self._counts), self.total)
