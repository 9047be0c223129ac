"""Times of the shards' work and of the copies between them, measured with events of the devices.

The clock polls events and never waits for them, so measuring delays no work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from luce.runtime.device import Event

#: upper bounds of the buckets in seconds; one more bucket holds the longer times
BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Durations:
    """A histogram of times."""

    #: values in each bucket of BOUNDS, and above all bounds
    counts: tuple[int, ...]
    #: sum of all values in seconds
    total: float


@dataclass(frozen=True)
class SequenceRows:
    """A step's rows, where all are of one sequence and at most one of them has an output."""

    #: of the first row
    position: int
    rows: int
    outputs: int


@dataclass(frozen=True)
class ShardTimes:
    """Times of a shard."""

    device: str
    #: work on steps or microbatches
    work: Durations
    #: copies to the next shard; None for the last one
    copies: Durations | None


class Histogram:
    """Collects times. One thread adds them, any thread may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        #: seconds of all times
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def durations(self) -> Durations:
        """All counted times."""
        return Durations(tuple(self._counts), self.total)


class Clock:
    """Collects times of one device. One thread adds intervals, one thread counts them, any thread may read."""

    def __init__(self) -> None:
        self._open: deque[tuple[Event, Event, SequenceRows | None]] = deque()
        self._counted = Histogram()
        #: gets the rows and the seconds of each counted interval that has rows
        self.on_rows: Callable[[SequenceRows, float], None] | None = None

    @property
    def total(self) -> float:
        """Seconds of all counted intervals."""
        return self._counted.total

    def add(self, start: Event, end: Event, rows: SequenceRows | None = None) -> None:
        """Add the interval between two events with timing, which may be pending. Intervals come in the order of their
        ends. `rows`: of the step, if they are of one sequence (luce.shard.pipeline.sequence_rows)."""
        self._open.append((start, end, rows))

    def count(self) -> None:
        """Count the finished intervals. Raises DeviceError if the work before an event failed."""
        while self._open and self._open[0][1].done():
            start, end, rows = self._open.popleft()
            seconds = end.seconds_since(start)
            self._counted.add(seconds)
            if rows is not None and self.on_rows is not None:
                self.on_rows(rows, seconds)

    def forget(self) -> None:
        """Drop the intervals that are not counted yet: their work failed."""
        self._open.clear()

    def durations(self) -> Durations:
        """The times of all counted intervals."""
        return self._counted.durations()
