"""The positions whose features a drafter can read in its ring, and batches of positions still to be read."""

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
    """Consecutive positions of a slot: int32."""

    slot: int
    positions: Int32


class FeatureWindow:
    """The positions of each slot whose features are in the ring, without a gap up to the newest."""

    def __init__(self, ring: FeatureRing) -> None:
        self.ring = ring
        self._held = [range(0)] * ring.slots

    def observe(self, span: Span) -> None:
        """The rows of a span are in the ring."""
        held, stop = self._held[span.slot], span.position + span.rows
        # Positions before a gap cannot be read: rows in between were computed while nothing was captured.
        start = held.start if held.start <= span.position <= held.stop else span.position
        self._held[span.slot] = range(max(start, stop - self.ring.capacity), stop)

    def forget(self, slot: int) -> None:
        """Another sequence has the slot."""
        self._held[slot] = range(0)

    def positions(self, slot: int) -> range:
        """All positions in the window."""
        return self._held[slot]

    def first(self, slot: int) -> int:
        """The oldest position in the window."""
        return self._held[slot].start

    def has(self, slot: int, position: int) -> bool:
        """Whether a position is in the window."""
        return position in self._held[slot]

    def ring_rows(self, parts: Sequence[SlotPositions]) -> Int32:
        """The ring's rows that hold these positions, one part after another: int32 [sum of the parts' lengths]."""
        size = self.ring.capacity
        return np.concatenate([part.slot * size + part.positions % size for part in parts]).astype(np.int32)


def batches(ranges: Sequence[tuple[int, range]], max_rows: int) -> Iterator[list[SlotPositions]]:
    """Ranges of slots' positions in batches of up to `max_rows` rows, each with at most one part of a slot."""
    batch: list[SlotPositions] = []
    for slot, positions in ranges:
        for at in range(positions.start, positions.stop, max_rows):
            part = SlotPositions(slot, np.arange(at, min(at + max_rows, positions.stop), dtype=np.int32))
            rows = sum(len(one.positions) for one in batch)
            if batch and (batch[-1].slot == slot or rows + len(part.positions) > max_rows):
                yield batch
                batch = []
            batch.append(part)
    if batch:
        yield batch
