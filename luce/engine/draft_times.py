"""Measured seconds of steps, by their rows and by how many sequences they are of. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np

#: the first steps of a shape build kernels and capture graphs: their times say nothing about later steps
FIRST_STEPS = 2


class StepTimes:
    """Seconds of steps by number of rows: measured, or interpolated; 0 until the first measurement.

    The first steps of each shape build kernels and capture graphs, and do not count.

    fixed  the share of the time of the fewest measured rows that still fewer rows are assumed to take
    first  steps of each shape that do not count
    """

    def __init__(self, *, fixed: float = 1.0, first: int = FIRST_STEPS) -> None:
        self._fixed, self._first = fixed, first
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._seen: Counter[Hashable] = Counter()

    @property
    def most(self) -> int:
        """The most rows that were measured; 0 before."""
        return self._rows[-1] if self._rows else 0

    def measured(self, rows: int) -> bool:
        """Whether steps of this number of rows were measured."""
        at = bisect_left(self._rows, rows)
        return at < len(self._rows) and self._rows[at] == rows

    def add(self, rows: int, seconds: float, shape: Hashable = None) -> bool:
        """Record a step of a shape, without one of its number of rows. Returns whether it counts.

        A step slower than the estimate weighs less than a faster one.
        """
        kind = rows if shape is None else shape
        self._seen[kind] += 1
        if self._seen[kind] <= self._first:
            return False
        at = bisect_left(self._rows, rows)
        if not self.measured(rows):
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)
            return True
        known = self._seconds[at]
        self._seconds[at] += 0.5 * (seconds - known) if seconds < known else 0.1 * (min(seconds, 2 * known) - known)
        return True

    def __call__(self, rows: int) -> float:
        """Seconds of a step. Above the measured range the nearest measurement holds, so that numbers of rows that were
        not tried yet look worth trying."""
        if not self._rows:
            return 0.0
        at = bisect_left(self._rows, rows)
        if at < len(self._rows) and self._rows[at] == rows:
            # Interpolating takes ten times as long, and is done several times between two steps.
            return self._seconds[at]
        return float(np.interp(rows, [0, *self._rows], [self._fixed * self._seconds[0], *self._seconds]))


class StepIntervals:
    """Seconds from the end of one step to the end of the next, so that the host's work between two steps counts too.

    A step without drafts may be queued while the one before it runs (luce.engine.overlap): then the devices do not wait
    for that work, as they do for a step with drafts.
    """

    def __init__(self) -> None:
        self._members: tuple[Hashable, ...] = ()
        self._ended = 0.0
        #: seconds of the proposals since the last step
        self.drafting = 0.0

    def end(self, members: tuple[Hashable, ...], now: float, seconds: float) -> float:
        """A step of these sequences ended `now`, which took the devices so many seconds. Returns the interval without
        the proposals; `seconds` behind a step of other sequences, as other work may come between."""
        if members == self._members:
            seconds = max(seconds, now - self._ended - self.drafting)
        self._members, self._ended, self.drafting = members, now, 0.0
        return seconds


class BatchTimes:
    """StepTimes for numbers of sequences, in classes from one power of two to the next.

    16 rows of two sequences take less than those of 16: each sequence has its own attention and its own work of the
    host, up to a fifth of a step on an H100.
    """

    def __init__(self) -> None:
        self._classes: defaultdict[int, StepTimes] = defaultdict(StepTimes)

    def measured(self, rows: int, sequences: int) -> bool:
        """Whether steps of so many rows of about so many sequences were measured."""
        return self._of(sequences).measured(rows)

    def add(self, rows: int, sequences: int, seconds: float, shape: Hashable = None) -> bool:
        """Record a step. See StepTimes.add."""
        return self._of(sequences).add(rows, seconds, shape)

    def __call__(self, rows: int, sequences: int) -> float:
        """Seconds of a step. More rows than were measured with about so many sequences take as much longer as they take
        with other numbers, as far as that is known."""
        own = self._of(sequences)
        last = own.most
        if rows <= last or not last:
            return own(rows)
        others = [times for times in self._classes.values() if times.most > last and times.measured(times.most)]
        more = [times(rows) - times(last) for times in others]
        return own(rows) + max(0.0, *more) if more else own(rows)

    def by_rows(self, sequences: int) -> Callable[[int], float]:
        """Seconds of a step of so many sequences by its rows."""
        return partial(self.__call__, sequences=sequences)

    def _of(self, sequences: int) -> StepTimes:
        return self._classes[(sequences - 1).bit_length()]
