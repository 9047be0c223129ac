"""The features of the last positions before a checkpoint, saved with it, so that a resumed sequence is drafted for at
once. Without them drafting begins with an empty context, and replies are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.draft.feature_window import FeatureWindow
from luce.layers.features import FeatureRing
from luce.runtime.step import Span

#: most bytes of one window of a tail
_WINDOW = 4 << 20


class FeatureTail:
    """Features of the positions before some length: bfloat16 as uint16 [n, len(layers) * hidden], oldest first.

    `wait` returns them as soon as the device has copied them to the host.
    """

    def __init__(self, layers: tuple[int, ...], nbytes: int, wait: Callable[[], NDArray[np.uint16]]) -> None:
        self.layers = layers
        #: bytes of host memory
        self.nbytes = nbytes
        self._wait = wait

    @classmethod
    def of(cls, layers: tuple[int, ...], rows: NDArray[np.uint16]) -> FeatureTail:
        """A tail of features on the host."""
        return cls(layers, rows.nbytes, lambda: rows)

    @property
    def rows(self) -> NDArray[np.uint16]:
        """The features. Waits for the copy to the host."""
        return self._wait()

    def windows(self) -> Iterator[FeatureTail]:
        """The tail in consecutive windows of bounded size."""
        rows = self.rows
        count = max(1, _WINDOW // max(1, rows[:1].nbytes))
        for at in range(0, len(rows), count):
            yield FeatureTail.of(self.layers, rows[at : at + count])


class FeatureTails:
    """Saves tails of at most `max_positions` positions of a ring, and restores them."""

    def __init__(self, ring: FeatureRing, max_positions: int) -> None:
        self._ring = ring
        self._window = FeatureWindow(ring)
        self._max_positions = max_positions

    @property
    def most_bytes(self) -> int:
        """The most bytes of a tail that `restore` can use."""
        return max(self._max_positions, self._ring.capacity) * len(self._ring.layers) * self._ring.hidden * 2

    def observe(self, spans: Sequence[Span]) -> None:
        """These rows are in the ring."""
        for span in spans:
            self._window.observe(span)

    def forget(self, slot: int) -> None:
        """Another sequence has the slot."""
        self._window.forget(slot)

    def save(self, slot: int, end: int) -> FeatureTail | None:
        """The tail of the first `end` positions of a slot; None if the last of them is not in the ring."""
        if not self._max_positions or not self._window.has(slot, end - 1):
            return None
        first = max(self._window.first(slot), end - self._max_positions)
        nbytes = (end - first) * self._ring.rows[:1].nbytes
        return FeatureTail(self._ring.layers, nbytes, self._ring.read(slot, range(first, end)))

    def restore(self, slot: int, end: int, tail: FeatureTail) -> Span | None:
        """Write the tail of `end` positions to a slot's ring: the span of the rows written, None if the tail does not
        fit the ring."""
        rows, shape = tail.rows, (min(len(tail.rows), end), self._ring.rows.shape[1])
        if tail.layers != self._ring.layers or rows.shape != shape or rows.dtype != np.uint16 or not len(rows):
            return None
        rows = rows[-self._ring.capacity :]
        span = Span(slot, 0, len(rows), end - len(rows))
        self._ring.write(slot, span.position, rows)
        self.observe([span])
        return span
