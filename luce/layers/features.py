"""The target's hidden states as a drafter reads them, on the drafter's device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.ops.features import put_rows, take_bf16_rows
from luce.runtime.device import Array, Device, Event
from luce.runtime.step import Step


class FeatureRing:
    """The features of the newest `capacity` positions of each slot.

    layers  the layers whose output is captured, ascending: the residual stream after the block's last addition
    rows    bfloat16 as uint16 [slots * capacity, len(layers) * hidden]: row slot * capacity + position % capacity has
            the layers' values side by side

    A row holds what ran last at its position, whether it counted or not: so rows of a speculative span take the places
    of the oldest positions. Rows of a tree take those of as many positions as it has rows, one behind another, until
    `move` puts those that count to where they belong. Rows of positions that did not run since the sequence began in
    the slot are another sequence's, or zeros.
    """

    def __init__(self, device: Device, layers: Sequence[int], hidden: int, *, slots: int, capacity: int) -> None:
        self.device = device
        self.layers = tuple(layers)
        self.hidden = hidden
        self.slots = slots
        self.capacity = capacity
        self._out = device.copy_stream()
        #: host memory that copies still write
        self._copied: deque[tuple[Event, object]] = deque()
        self.rows: Array = device.zeros((slots * capacity, len(self.layers) * hidden), np.uint16)

    def put(self, step: Step, outputs: Sequence[Array]) -> None:
        """Queue the storing of what a step's layers gave: uint16 [rows, hidden] each, on the ring's device."""
        dest = np.full(step.rows, -1, np.int32)
        for span in step.spans:
            # Of a long span, what later rows would overwrite is left out.
            kept = min(span.rows, self.capacity)
            own = slice(span.start + span.rows - kept, span.start + span.rows)
            places = step.positions[own]
            if span.ancestors:
                # Behind the rows of the step that the tree has before the branch, not behind those of its path.
                places = places + np.int32(span.start - span.ancestors[0] - len(span.ancestors))
            dest[own] = span.slot * self.capacity + places % self.capacity
        to = self.device.upload(dest)
        for index, rows in enumerate(outputs):
            put_rows(self.device, rows, self.rows, index * self.hidden, to)

    def move(self, slot: int, position: int, path: Sequence[int]) -> None:
        """Queue the moving of the rows `path` of a tree, whose root was run at `position`, to the positions from there
        on."""
        places = np.array([path, range(len(path))], np.int32) + np.int32(position)
        source, target = self.device.upload(slot * self.capacity + places % self.capacity)
        # Whole rows are read before one is written: some are both.
        rows = take_bf16_rows(self.device, self.rows, source)
        put_rows(self.device, rows, self.rows, 0, target)

    def write(self, slot: int, position: int, rows: NDArray[np.uint16]) -> None:
        """Store rows that `read` gave, of positions from `position` on; the last ones if there are too many."""
        end, rows = position + len(rows), rows[-self.capacity :]
        for here, there in self._runs(slot, range(end - len(rows), end)):
            self.device.write(self.rows[here], rows[there])

    def read(self, slot: int, positions: range) -> Callable[[], NDArray[np.uint16]]:
        """Queue the copy of the rows of consecutive positions, at most `capacity`: what is returned waits for it.

        uint16 [n, layers * hidden], on the host.
        """
        shape = (len(positions), self.rows.shape[1])
        rows = self.device.staging_buffer(2 * shape[0] * shape[1]).view(np.uint16).reshape(shape)
        self._out.wait_for(self.device.record())
        for here, there in self._runs(slot, positions):
            self._out.copy(rows[there], self.rows[here])
        copied = self._out.record()
        # What runs from now on may overwrite the rows; and their memory here must not go before the copy is done.
        self.device.wait_for(copied)
        self._copied.append((copied, rows))
        while self._copied[0][0].done() and len(self._copied) > 1:
            self._copied.popleft()

        def wait() -> NDArray[np.uint16]:
            copied.wait()
            return rows

        return wait

    def _runs(self, slot: int, positions: range) -> Iterator[tuple[slice, slice]]:
        """(rows of the ring, rows of what is copied) of positions that lie side by side."""
        first, count = positions.start % self.capacity, len(positions)
        begin, before = slot * self.capacity, min(count, self.capacity - first)
        yield slice(begin + first, begin + first + before), slice(0, before)
        if before < count:
            yield slice(begin, begin + count - before), slice(before, count)
