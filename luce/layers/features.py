"""The target's hidden states, in a ring on the drafter's device."""

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

    `layers`: the layers whose output is captured, ascending: the residual stream after the layer's last addition.

    A row of the ring holds the features of the last row computed at its position, accepted or not: rows of a
    speculative span overwrite the oldest positions. The rows of a tree take consecutive positions, until `move` copies
    the accepted ones to theirs. Rows of positions that were not computed since the sequence began in the slot belong to
    another sequence, or are zeros.
    """

    def __init__(self, device: Device, layers: Sequence[int], hidden: int, *, slots: int, capacity: int) -> None:
        self.device = device
        self.layers = tuple(layers)
        self.hidden = hidden
        self.slots = slots
        self.capacity = capacity
        self._out = device.copy_stream()
        #: host memory that unfinished copies write
        self._copied: deque[tuple[Event, object]] = deque()
        #: bfloat16 as uint16 [slots * capacity, len(layers) * hidden]: row slot * capacity + position % capacity holds
        #: the layers' values side by side
        self.rows: Array = device.zeros((slots * capacity, len(self.layers) * hidden), np.uint16)

    def put(self, step: Step, outputs: Sequence[Array]) -> None:
        """Queue the writing of a step's captured outputs: uint16 [rows, hidden] of each layer, on the ring's device."""
        dest = np.full(step.rows, -1, np.int32)
        for span in step.spans:
            # Rows of a long span that its later rows would overwrite are left out.
            count = min(span.rows, self.capacity)
            own = slice(span.start + span.rows - count, span.start + span.rows)
            places = step.positions[own]
            if span.ancestors:
                # Behind all rows that the tree has before the branch, not only behind those of its path.
                places = places + np.int32(span.start - span.ancestors[0] - len(span.ancestors))
            dest[own] = span.slot * self.capacity + places % self.capacity
        to = self.device.upload(dest)
        for index, rows in enumerate(outputs):
            put_rows(self.device, rows, self.rows, index * self.hidden, to)

    def move(self, slot: int, position: int, path: Sequence[int]) -> None:
        """Queue the copy of the rows `path` of a tree, whose root was computed at `position`, to consecutive positions
        from there on."""
        places = np.array([path, range(len(path))], np.int32) + np.int32(position)
        source, target = self.device.upload(slot * self.capacity + places % self.capacity)
        # All rows are read before the first is written, since some are both source and target.
        rows = take_bf16_rows(self.device, self.rows, source)
        put_rows(self.device, rows, self.rows, 0, target)

    def write(self, slot: int, position: int, rows: NDArray[np.uint16]) -> None:
        """Write rows that `read` returned, at positions from `position` on; only the last ones if they exceed the
        ring."""
        end, rows = position + len(rows), rows[-self.capacity :]
        for here, there in self._runs(slot, range(end - len(rows), end)):
            self.device.write(self.rows[here], rows[there])

    def read(self, slot: int, positions: range) -> Callable[[], NDArray[np.uint16]]:
        """Queue the copy to the host of the rows of consecutive positions, at most `capacity`. The result waits for it:

        uint16 [n, layers * hidden], on the host.
        """
        shape = (len(positions), self.rows.shape[1])
        rows = self.device.staging_buffer(2 * shape[0] * shape[1]).view(np.uint16).reshape(shape)
        self._out.wait_for(self.device.record())
        for here, there in self._runs(slot, positions):
            self._out.copy(rows[there], self.rows[here])
        copied = self._out.record()
        # Later work may overwrite the rows, so it waits; and the host memory must stay until the copy is done.
        self.device.wait_for(copied)
        self._copied.append((copied, rows))
        while self._copied[0][0].done() and len(self._copied) > 1:
            self._copied.popleft()

        def wait() -> NDArray[np.uint16]:
            copied.wait()
            return rows

        return wait

    def _runs(self, slot: int, positions: range) -> Iterator[tuple[slice, slice]]:
        """(rows of the ring, rows of the copy) for each run of positions that lie side by side in the ring."""
        first, count = positions.start % self.capacity, len(positions)
        begin, before = slot * self.capacity, min(count, self.capacity - first)
        yield slice(begin + first, begin + first + before), slice(0, before)
        if before < count:
            yield slice(begin, begin + count - before), slice(before, count)
