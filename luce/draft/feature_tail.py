"""What a drafter reads of the last positions before a point at which sequences can be resumed: kept with the point, so
that a resumed sequence is drafted for at once. Without it drafting begins with an empty context, and replies are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.draft.feature_window import FeatureWindow
from luce.layers.features import FeatureRing
from luce.runtime.step import Span

#: bytes of a piece
_WINDOW = 4 << 20


class FeatureTail:
    """Features of the positions before some length: bfloat16 as uint16 [n, len(layers) * hidden], oldest first.

    `wait` gives them, once they are there.
    """

    def __init__(self, layers: tuple[int, ...], nbytes: int, wait: Callable[[], NDArray[np.uint16]]) -> None:
        self.layers = layers
        #: bytes of host memory
        self.nbytes = nbytes
        self._wait = wait

    @classmethod
    def of(cls, layers: tuple[int, ...], rows: NDArray[np.uint16]) -> FeatureTail:
        """Features that are there."""
        return cls(layers, rows.nbytes, lambda: rows)

    @property
    def rows(self) -> NDArray[np.uint16]:
        """Waits for them."""
        return self._wait()

    def windows(self) -> Iterator[FeatureTail]:
        """A bounded piece of it after the other."""
        rows = self.rows
        count = max(1, _WINDOW // max(1, rows[:1].nbytes))
        for at in range(0, len(rows), count):
            yield FeatureTail.of(self.layers, rows[at : at + count])


class FeatureTails:
    """Takes tails of at most `most` positions out of a ring, and puts them back."""

    def __init__(self, ring: FeatureRing, most: int) -> None:
        self._ring = ring
        self._window = FeatureWindow(ring)
        self._most = most

    def observe(self, spans: Sequence[Span]) -> None:
        """These rows are in the ring."""
        for span in spans:
            self._window.observe(span)

    def forget(self, slot: int) -> None:
        """Another sequence has the slot."""
        self._window.forget(slot)

    def take(self, slot: int, end: int) -> FeatureTail | None:
        """The tail of the first `end` positions of a slot; None if the last of them is not in the ring."""
        if not self._most or not self._window.has(slot, end - 1):
            return None
        first = max(self._window.first(slot), end - self._most)
        nbytes = (end - first) * self._ring.rows[:1].nbytes
        return FeatureTail(self._ring.layers, nbytes, self._ring.read(slot, range(first, end)))

    def put(self, slot: int, end: int, tail: FeatureTail) -> Span | None:
        """Put the tail of `end` positions into a slot's ring; the rows that are there now, None if it does not fit."""
        rows, shape = tail.rows, (min(len(tail.rows), end), self._ring.rows.shape[1])
        if tail.layers != self._ring.layers or rows.shape != shape or rows.dtype != np.uint16 or not len(rows):
            return None
        rows = rows[-self._ring.capacity :]
        span = Span(slot, 0, len(rows), end - len(rows))
        self._ring.write(slot, span.position, rows)
        self.observe([span])
        return span
