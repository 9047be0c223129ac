"""The target's hidden states as a drafter reads them, on the drafter's device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luce.ops.features import put_rows
from luce.runtime.device import Array, Device
from luce.runtime.step import Step


class FeatureRing:
    """The features of the newest `capacity` positions of each slot.

    layers  the layers whose output is captured, ascending: the residual stream after the block's last addition
    rows    bfloat16 as uint16 [slots * capacity, len(layers) * hidden]: row slot * capacity + position % capacity has
            the layers' values side by side

    A row holds what ran last at its position, whether it counted or not: so rows of a tentative span take the places of
    the oldest positions. Rows of positions that did not run since the sequence began in the slot are another
    sequence's, or zeros.
    """

    def __init__(self, device: Device, layers: Sequence[int], hidden: int, *, slots: int, capacity: int) -> None:
        self.device = device
        self.layers = tuple(layers)
        self.hidden = hidden
        self.slots = slots
        self.capacity = capacity
        self.rows: Array = device.zeros((slots * capacity, len(self.layers) * hidden), np.uint16)

    def put(self, step: Step, outputs: Sequence[Array]) -> None:
        """Queue the storing of what a step's layers gave: uint16 [rows, hidden] each, on the ring's device."""
        dest = np.full(step.rows, -1, np.int32)
        for span in step.spans:
            # Of a long span, what later rows would overwrite is left out.
            kept = min(span.rows, self.capacity)
            own = slice(span.start + span.rows - kept, span.start + span.rows)
            dest[own] = span.slot * self.capacity + step.positions[own] % self.capacity
        places = self.device.upload(dest)
        for index, rows in enumerate(outputs):
            put_rows(self.device, rows, self.rows, index * self.hidden, places)

    def write(self, slot: int, position: int, rows: NDArray[np.uint16]) -> None:
        """Store rows that `read` gave, of positions from `position` on; the last ones if there are too many."""
        left = max(0, len(rows) - self.capacity)
        places = slot * self.capacity + np.arange(position + left, position + len(rows), dtype=np.int32) % self.capacity
        upload = self.device.upload
        put_rows(self.device, upload(np.ascontiguousarray(rows[left:])), self.rows, 0, upload(places.astype(np.int32)))

    def read(self, slot: int, positions: range) -> NDArray[np.uint16]:
        """The rows of consecutive positions, at most `capacity`: uint16 [n, layers * hidden], on the host."""
        begin, end = slot * self.capacity, (slot + 1) * self.capacity
        first = begin + positions.start % self.capacity
        last = first + len(positions)
        parts = [self.rows[first : min(last, end)], self.rows[begin : begin + max(0, last - end)]]
        return np.concatenate([self.device.download(part) for part in parts])
