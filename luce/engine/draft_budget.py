"""What it is worth to verify guesses: how long steps take, how often guesses are right, and how many rows pay."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container
from collections.abc import Sequence as Many

import numpy as np

from luce.draft.drafter import Proposal

# What is believed of a guess without a probability, and how fast rates go back to that while nothing is verified.
_PRIOR, _FORGETTING = 0.5, 0.005
_BINS = 10
# Steps of a number of rows that build kernels and capture graphs: their times say nothing about later ones.
_WARMING = 2


class StepSeconds:
    """Measured seconds by number of rows; of other numbers by interpolation, 0 while nothing is known."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._seen: Counter[int] = Counter()

    def known(self, rows: int) -> bool:
        """Whether steps of so many rows were measured."""
        return self._seen[rows] > _WARMING

    def add(self, rows: int, seconds: float) -> None:
        """A step took so long. What holds up a single one counts less than what lets it be faster."""
        self._seen[rows] += 1
        if not self.known(rows):
            return
        at = bisect_left(self._rows, rows)
        if at == len(self._rows) or self._rows[at] != rows:
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)
            return
        known = self._seconds[at]
        self._seconds[at] += 0.5 * (seconds - known) if seconds < known else 0.1 * (min(seconds, 2 * known) - known)

    def __call__(self, rows: int) -> float:
        """The nearest measured numbers' beyond the ends, so that what was not tried looks worth trying."""
        return float(np.interp(rows, self._rows, self._seconds)) if self._rows else 0.0


def choose_rows(
    reaches: Many[Many[float]],
    room: int,
    plain: int,
    seconds: Callable[[int], float],
    drafting: float,
    sizes: Container[int],
) -> tuple[list[int], float]:
    """How many proposed rows of each sequence to verify, and how much faster that is than not to draft.

    reaches   per sequence, descending: the chance that row 1, 2, ... counts
    room      most of these rows
    plain     rows of the step without them, each of which gives a token
    seconds   of a step by number of rows
    drafting  seconds that the proposals take
    sizes     of the whole step, beside `plain` and that with all rows there is room for
    """
    rows = sorted(((-reach, index) for index, chances in enumerate(reaches) for reach in chances))[:room]
    counts, best = [0] * len(reaches), 0
    expected, most = float(plain), plain / (drafting + seconds(plain))
    for count, (reach, _) in enumerate(rows, 1):
        expected -= reach
        if count < len(rows) and plain + count not in sizes:
            continue
        rate = expected / (drafting + seconds(plain + count))
        if rate > most:
            most, best = rate, count
    for _, index in rows[:best]:
        counts[index] += 1
    return counts, most * seconds(plain) / plain


class Rates:
    """How often guesses were right where those before them were, by the drafter's own probability if it has one."""

    def __init__(self, like: Rates | None = None) -> None:
        self._rates: dict[int, float] = {} if like is None else dict(like._rates)

    def reaches(self, proposal: Proposal) -> list[float]:
        """The chance that row 1, 2, ... counts; no row's is above that of the one before it."""
        reaches: list[float] = []
        least = 1.0
        for index in range(len(proposal.tokens)):
            key, prior = _bin(proposal, index)
            parent = proposal.parents[index] if proposal.parents else index - 1
            least = min(least, (reaches[parent] if parent >= 0 else 1.0) * self._rates.get(key, prior))
            reaches.append(least)
        return reaches

    def learn(self, proposal: Proposal, outcomes: Many[tuple[int, bool]], newest: float) -> None:
        """Which guesses, of those whose parents were right, were right."""
        for index, right in outcomes:
            self._move(*_bin(proposal, index), float(right), newest)

    def forget(self, proposal: Proposal) -> None:
        """Nothing of a proposal was verified: in time it is again."""
        for key, prior in {_bin(proposal, index) for index in range(len(proposal.tokens))}:
            self._move(key, prior, prior, _FORGETTING)

    def _move(self, key: int, prior: float, to: float, weight: float) -> None:
        rate = self._rates.get(key, prior)
        self._rates[key] = rate + weight * (to - rate)


def _bin(proposal: Proposal, index: int) -> tuple[int, float]:
    """Where a guess is counted, and what is believed of it at first."""
    if not proposal.probabilities:
        return -1, _PRIOR
    chance = min(max(float(proposal.probabilities[index]), 0.0), 1.0)
    return min(int(chance * _BINS), _BINS - 1), chance
