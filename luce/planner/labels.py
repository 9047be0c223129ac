"""Partial placements as labels, and which of them no other one beats.

A label is a chain of shards that holds the first layers of a model. Labels of one state, with the same devices, the
same last one and as many layers, have the same continuations. So one that is nowhere worse beats another one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from luce.planner.shard_tables import Floats, Ints

# Sums of the same numbers in another order differ by about 1e-16 of them. Costs that differ by less than this share of
# the largest one count as equal.
_EQUAL = 1e-12
#: in a coarse comparison, slowest parts and resources whose logarithms differ by less count as equal
_COARSE = 0.002
#: labels that are compared with all earlier ones at a time
_BLOCK = 256


@dataclass(frozen=True)
class Labels:
    """Labels as arrays over them."""

    #: devices used, as bits
    used: Ints
    #: the last device
    last: Ints
    #: layers that have a device
    done: Ints
    #: weighted seconds of shards and links
    cost: Floats
    #: seconds of the slowest shard or link for a piece of a prompt; 0 where prompts do not count
    slowest: Floats
    #: [n, resources]: bytes of the pools and seconds of the CPUs that may run short
    resources: Floats
    #: layers that leave their experts to the CPU
    offloaded: Ints
    #: ranks of the devices in their order, and of the ends of shards; a lower rank wins a tie
    order_rank: Ints
    ends_rank: Ints
    #: the label of one shard less
    parent: Ints
    #: a value that placements which begin so have at least
    bound: Floats

    def __len__(self) -> int:
        return len(self.used)

    def __getitem__(self, index: Ints | NDArray[np.bool_]) -> Labels:
        return Labels(*(getattr(self, field.name)[index] for field in fields(self)))


def concatenate(parts: list[Labels]) -> Labels:
    """All labels of a list that is not empty."""
    return Labels(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Labels)))


def ranks(*columns: Ints) -> Ints:
    """Dense ranks of rows by their columns, the first one counting most."""
    order = np.lexsort(columns[::-1])
    step = np.zeros(len(order), np.int64)
    for column in columns:
        step[1:] |= column[order][1:] != column[order][:-1]
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(step)
    return found


def undominated(labels: Labels, *, coarse: bool = False) -> Labels:
    """The labels that no other one beats: none of the same state has a lower cost and is nowhere worse, or the same
    cost, is nowhere worse and wins the tie. `coarse`: slowest parts, and resources, count as equal within 0.2 %."""
    if not len(labels):
        return labels
    cost = _whole(labels.cost)
    tie = labels.offloaded, labels.order_rank, labels.ends_rank
    labels = labels[np.lexsort((*reversed(tie), cost, labels.done, labels.last, labels.used))]
    columns = [(_logarithms if coarse else _whole)(column) for column in (labels.slowest, *labels.resources.T)]
    state = np.zeros(len(labels), np.bool_)
    for column in (labels.used, labels.last, labels.done):
        state[1:] |= column[1:] != column[:-1]
    segment = np.cumsum(state, dtype=np.int64)
    if len(columns) == 1:
        return labels[_lowest_so_far(segment, columns[0])]
    return labels[_nowhere_worse(segment, np.stack(columns, axis=1))]


def _whole(values: Floats) -> Ints:
    top = float(values.max())
    return np.zeros(len(values), np.int64) if top <= 0 else np.rint(values / (top * _EQUAL)).astype(np.int64)


def _logarithms(values: Floats) -> Ints:
    return np.floor(np.log(np.maximum(values, 1e-12)) / _COARSE).astype(np.int64)


def _lowest_so_far(segment: Ints, values: Ints) -> NDArray[np.bool_]:
    """Where a value is lower than all earlier ones of its segment. Segments count up from 0 or 1."""
    ordered = np.unique(values, return_inverse=True)[1]
    # A later segment is below all earlier ones, so that one running minimum does for all.
    shifted = ordered - segment * (int(ordered.max()) + 1)
    lowest = np.minimum.accumulate(shifted)
    return np.concatenate([[True], shifted[1:] < lowest[:-1]])


def _nowhere_worse(segment: Ints, columns: Ints) -> NDArray[np.bool_]:
    """Where no earlier row of the segment is at most as high in all columns."""
    kept = np.ones(len(segment), np.bool_)
    starts = np.flatnonzero(np.concatenate([[True], segment[1:] != segment[:-1]]))
    for start, end in zip(starts, [*starts[1:], len(segment)], strict=True):
        own = columns[start:end]
        for block in range(0, len(own), _BLOCK):
            rows = own[block : block + _BLOCK]
            below = (own[None, : block + len(rows)] <= rows[:, None]).all(axis=2)
            earlier = np.arange(block + len(rows))[None, :] < np.arange(block, block + len(rows))[:, None]
            kept[start + block : start + block + len(rows)] = ~(below & earlier).any(axis=1)
    return kept
