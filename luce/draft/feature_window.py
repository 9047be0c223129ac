"""What a drafter knows of its ring: which positions it has features of, and where; and what is still to be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from luce.layers.features import FeatureRing
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array
from luce.runtime.step import Int32, Span


def as_table(rows: Array) -> Weight:
    """Captured rows, uint16 (bfloat16) or float32 [n, width], as a table that rows are looked up in."""
    n, width = rows.shape
    if rows.dtype == np.float32:
        return Weight(n, width, (WeightPart(rows, GGMLQuantizationType.F32, 0, n),))
    return Weight(n, width, (WeightPart(rows.view(np.uint8), GGMLQuantizationType.BF16, 0, n),))


@dataclass(frozen=True)
class SlotPositions:
    """Some of a slot's positions in a row."""

    slot: int
    positions: Int32


class FeatureWindow:
    """The positions of each slot whose features are in the ring, without a gap up to the newest."""

    def __init__(self, ring: FeatureRing) -> None:
        self._ring = ring
        self._window = [range(0)] * ring.slots

    def observe(self, span: Span) -> None:
        """The rows of a span are in the ring."""
        known, stop = self._window[span.slot], span.position + span.rows
        # After rows that nobody captured, what lies before them is of no use.
        start = known.start if known.start <= span.position <= known.stop else span.position
        self._window[span.slot] = range(max(start, stop - self._ring.capacity), stop)

    def forget(self, slot: int) -> None:
        """Another sequence has the slot."""
        self._window[slot] = range(0)

    def positions(self, slot: int) -> range:
        """All that are known."""
        return self._window[slot]

    def first(self, slot: int) -> int:
        """The oldest position that is known."""
        return self._window[slot].start

    def has(self, slot: int, position: int) -> bool:
        """Whether a position is known."""
        return position in self._window[slot]

    def places(self, parts: Sequence[SlotPositions]) -> Int32:
        """Where the ring has the rows of parts, one after another."""
        size = self._ring.capacity
        return np.concatenate([part.slot * size + part.positions % size for part in parts]).astype(np.int32)


def batches(owed: Sequence[tuple[int, range]], most: int) -> Iterator[list[SlotPositions]]:
    """Ranges of slots in batches of up to `most` rows, each with at most one part of a slot."""
    batch: list[SlotPositions] = []
    for slot, positions in owed:
        for at in range(positions.start, positions.stop, most):
            part = SlotPositions(slot, np.arange(at, min(at + most, positions.stop), dtype=np.int32))
            rows = sum(len(one.positions) for one in batch)
            if batch and (batch[-1].slot == slot or rows + len(part.positions) > most):
                yield batch
                batch = []
            batch.append(part)
    if batch:
        yield batch
