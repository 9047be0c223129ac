"""The fastest placement: which devices, in which order, which layers on each, and which devices are left out.

A programme over labels (labels.py), which are extended by one shard at a time. It is exact: a label is dropped if
another one beats it, or if it cannot lead to a placement within the margin of the best one that is known.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.labels import Labels, concatenate, ranks, undominated
from luce.planner.layer_time import layer_times
from luce.planner.prediction import PlacedShard, Prediction, predict
from luce.planner.problem import Problem
from luce.planner.shard_tables import Floats, ShardTables, expert_place, passes, shard_tables

# Values within this share of each other are a tie: fewer offloaded layers win, then devices in the order listed, then
# more layers on the earlier ones.
_TIE = 1e-9
#: figures that are measured
_MEASURED = (
    "free",
    "read",
    "rates",
    "launch",
    "routing",
    "step",
    "way",
    "unpack",
    "bus",
    "expand",
    "state_read",
    "attention",
    "elementwise",
    "recurrence",
    "gather",
)
# Of more devices than this, those are interchangeable whose figures differ by less than 1 %, which is less than figures
# vary by from one measurement to the next. Of fewer devices, all orders are searched in no time.
_FEW, _SAME = 4, 0.01
#: labels of one length, beyond which they are compared coarsely
MOST_LABELS = 300_000
#: the same before they are compared, of which each takes about 100 bytes
MOST_COMPARED = 2_500_000


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    placement: tuple[PlacedShard, ...]
    prediction: Prediction
    #: labels were merged, so a slightly better placement may exist
    near: bool


@dataclass(frozen=True)
class _Candidate:
    value: float
    offloaded: int
    order: tuple[int, ...]
    #: the layer behind each shard, negative
    ends: tuple[int, ...]

    @property
    def tie(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self.offloaded, self.order, self.ends


class Merging(enum.Enum):
    """Which labels of a state a search drops."""

    NONE = enum.auto()
    #: those that are worse by less than figures vary by
    COARSE = enum.auto()
    #: all but the one that is the best one if it ends there
    ALL = enum.auto()


class _TooManyLabelsError(Exception):
    pass


def best_placement(problem: Problem) -> Found | None:
    """The placement with the least value; None if none fits.

    Of all numbers of shards, the smallest one wins whose best value is within the margin of the best of all.
    """
    for merging in Merging:
        try:
            chosen = _Search(problem, merging).best()
        except _TooManyLabelsError:
            continue
        if chosen is None:
            return None
        placement = _shards(problem, chosen)
        prediction = predict(problem, placement)
        assert prediction is not None, "the search and the prediction read the same tables"
        return Found(placement, prediction, near=merging is not Merging.NONE)
    raise AssertionError("a search that merges all has no limit of labels")


def _shards(problem: Problem, chosen: _Candidate) -> tuple[PlacedShard, ...]:
    devices = [problem.devices[index] for index in chosen.order]
    rows = problem.piece_rows(len(devices), with_cpu=any(device.host for device in devices))
    shards, start = [], 0
    for device, end in zip(devices, (-end for end in chosen.ends), strict=True):
        offloaded = int(shard_tables(problem, device, rows).offloaded[start, end])
        shards.append(PlacedShard(device.name, range(start, end), offloaded))
        start = end
    return tuple(shards)


class _Search:
    """A search, exact or with labels merged."""

    def __init__(self, problem: Problem, merging: Merging) -> None:
        self.problem = problem
        self.merging = merging
        self._devices = problem.devices
        self._best: dict[int, list[_Candidate]] = {}
        self._twins = [self._twin(index) for index in range(len(self._devices))]

    def best(self) -> _Candidate | None:
        most = min(len(self._devices), len(self.problem.model.layers))
        lengths: dict[int, int] = {}
        for shards, with_cpu in itertools.product(range(1, most + 1), (False, True)):
            rows = self.problem.piece_rows(shards, with_cpu=with_cpu)
            lengths[rows] = max(shards, lengths.get(rows, 0))
        # Few shards first: their values bound the search for more of them.
        for rows, length in sorted(lengths.items(), reverse=True):
            Programme(self, rows).run(length)
        if not self._best:
            return None
        least = {shards: min(candidate.value for candidate in found) for shards, found in self._best.items()}
        fewest = min(shards for shards, value in least.items() if value <= self.limit())
        tied = (c for c in self._best[fewest] if c.value <= least[fewest] * (1 + _TIE))
        return min(tied, key=lambda candidate: candidate.tie)

    def limit(self) -> float:
        """The most that a value may be to be chosen."""
        values = [candidate.value for found in self._best.values() for candidate in found]
        return min(values, default=np.inf) * (1 + self.problem.margin)

    def offer(self, shards: int, found: Sequence[_Candidate]) -> None:
        self._best.setdefault(shards, []).extend(found)

    def usable(self, index: int, used: int, last: int | None) -> bool:
        """Whether a device may follow: devices of one daemon stand side by side, and of devices that differ only in
        their names the one listed first comes first."""
        if self.problem.pinned:
            return index == used.bit_count()
        if used >> index & 1 or any(not used >> twin & 1 for twin in self._twins[index]):
            return False
        daemon = self._devices[index].daemon
        if last is None or not daemon or self._devices[last].daemon == daemon:
            return True
        return all(other.daemon != daemon for at, other in enumerate(self._devices) if used >> at & 1)

    def _twin(self, index: int) -> list[int]:
        return [other for other in range(index) if self._interchangeable(other, index)]

    def _interchangeable(self, first: int, second: int) -> bool:
        a, b = self._devices[first], self._devices[second]
        if not _same_figures(a, b, _SAME if len(self._devices) > _FEW else 0.0):
            return False
        links = self.problem.links
        others = [device.name for device in self._devices if device not in (a, b)]
        return links.get((a.name, b.name)) == links.get((b.name, a.name)) and all(
            links.get((a.name, other)) == links.get((b.name, other))
            and links.get((other, a.name)) == links.get((other, b.name))
            for other in others
        )


def _same_figures(a: DeviceFigures, b: DeviceFigures, share: float) -> bool:
    """Whether devices differ in their names, and in figures that are measured by at most a share."""
    return replace(b, **{name: getattr(a, name) for name in _MEASURED}, name=a.name) == a and all(
        _alike(getattr(a, name), getattr(b, name), share) for name in _MEASURED
    )


def _alike(a: Any, b: Any, share: float) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, LinkFigures):
        return _alike((a.latency, a.bandwidth), (b.latency, b.bandwidth), share)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_alike(x, y, share) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=share)


class Programme:
    """The chains of shards whose prompts come in pieces of the same number of rows."""

    def __init__(self, search: _Search, rows: int) -> None:
        problem = search.problem
        self._search, self._problem, self._rows = search, problem, rows
        self._count = len(problem.model.layers)
        self._tables = [shard_tables(problem, device, rows) for device in problem.devices]
        decoding, reading = problem.weights
        self._costs = [decoding * tables.decode + reading * tables.prompt for tables in self._tables]
        #: how much the slowest part counts
        self._repeat = reading * (problem.pieces(rows) - 1)
        self._rest = self._least_costs()
        layers = np.arange(self._count + 1) - np.arange(self._count)[:, None]
        #: most layers that each device holds
        self._most = [int(layers[tables.fits].max(initial=0)) for tables in self._tables]
        self._pools, self._busy = self._scarce()
        self._links: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._levels: list[Labels] = []
        #: of devices that must hold layers, as bits
        self._required = sum(1 << i for i, device in enumerate(problem.devices) if device.name == problem.required)

    def run(self, length: int) -> None:
        """Offer the candidates of up to `length` shards."""
        labels = self._begin()
        for shards in range(1, length + 1):
            self._levels.append(labels)
            whole = labels.done == self._count
            self._finish(shards, np.flatnonzero(whole))
            if shards == length or whole.all():
                return
            labels = self._extend(np.flatnonzero(~whole))

    def _least_costs(self) -> Floats:
        """[layers + 1]: a cost that the layers from one on have at least, on the best device for each."""
        problem = self._problem
        decoding, reading = problem.weights
        least = np.full(self._count, np.inf)
        for device in problem.devices:
            for place in {None, expert_place(problem, device)}:
                decode, prompt = (
                    np.array([seconds.total for seconds in layer_times(device, problem.model.layers, work, place)])
                    for work in passes(problem, self._rows)
                )
                least = np.minimum(least, decoding * decode + reading * prompt)
        return np.concatenate([np.cumsum(least[::-1])[::-1], [0.0]])

    def _scarce(self) -> tuple[list[str], list[str]]:
        """The machines whose memory or whose CPU several shards may share."""
        problem = self._problem
        moved = [machine for machine in problem.pools if self._shares(machine)]
        return moved, moved if self._repeat else []

    def _shares(self, machine: str) -> bool:
        own = [device for device in self._problem.devices if device.machine == machine]
        return sum(device.host or self._problem.expert_cpu(device) is not None for device in own) > 1

    def _begin(self) -> Labels:
        zero, nothing = np.zeros(1, np.int64), np.zeros(1)
        resources = np.zeros((1, len(self._pools) + len(self._busy)))
        # Drafting takes as long with all placements; what a device brings is a share of it all.
        cost = nothing + self._problem.weights[0] * self._problem.drafting_seconds
        empty = Labels(zero, zero, zero, cost, nothing, resources, zero, zero, zero, zero)
        devices = range(len(self._problem.devices))
        parts = [self._longer(empty, zero, i, first=True) for i in devices if self._search.usable(i, 0, None)]
        return self.kept(parts)

    def _extend(self, open_labels: np.ndarray) -> Labels:
        labels = self._levels[-1]
        parts, compared = list[Labels](), 0
        for used, last, members in _groups(labels, open_labels):
            followers = [i for i in range(len(self._problem.devices)) if self._search.usable(i, used, last)]
            longer = [self._longer(labels[members], members, index, first=False) for index in followers]
            compared += sum(map(len, longer))
            if compared > MOST_COMPARED and self._search.merging is not Merging.ALL:
                raise _TooManyLabelsError
            parts += longer
        return self.kept(parts)

    def kept(self, parts: list[Labels]) -> Labels:
        labels = concatenate(parts) if parts else self._levels[-1][np.zeros(0, np.int64)]
        if not len(labels):
            return labels
        rank = ranks(labels.order_rank, labels.last)
        ends = ranks(labels.ends_rank, -labels.done)
        labels = Labels(**{**vars(labels), "order_rank": rank, "ends_rank": ends})
        merging = self._search.merging
        labels = undominated(labels, coarse=merging is not Merging.NONE)
        if len(labels) > MOST_LABELS and merging is Merging.NONE:
            raise _TooManyLabelsError
        return self._merged(labels) if merging is Merging.ALL else labels

    def _merged(self, labels: Labels) -> Labels:
        """The label of each state that is the best one if it ends there."""
        state = (labels.used * 64 + labels.last) * (self._count + 1) + labels.done
        order = np.lexsort((labels.cost + self._repeat * labels.slowest, state))
        first = np.diff(state[order], prepend=-1) != 0
        return labels[np.sort(order[first])]

    def _longer(self, labels: Labels, members: np.ndarray, index: int, *, first: bool) -> Labels:
        """The labels with one more shard on a device, for every end of it that fits and may be worth it."""
        problem, device, tables = self._problem, self._problem.devices[index], self._tables[index]
        done = labels.done
        decoding, reading = problem.weights
        cost = labels.cost[:, None] + self._costs[index][done]
        slowest = np.maximum(labels.slowest[:, None], tables.prompt[done])
        if first:
            cost = cost + (decoding + reading) * device.way.latency
        else:
            one, piece = self._link(int(labels.last[0]), index)
            cost = cost + (decoding * one + reading * piece)[done, None]
            slowest = np.maximum(slowest, piece[done, None])
        bound = cost + self._rest[None, :] + self._repeat * slowest
        used = int(labels.used[0]) | 1 << index
        others = sum(most for other, most in enumerate(self._most) if not used >> other & 1)
        valid = tables.fits[done] & (bound <= self._search.limit() * (1 + _TIE))
        valid &= np.arange(self._count + 1) + others >= self._count
        at, end = np.nonzero(valid)
        start = done[at]
        resources = labels.resources[at] + self._used(index, tables, start, end)
        room = np.array([problem.pools[machine] for machine in self._pools])
        good = (resources[:, : len(room)] <= room).all(axis=1)
        at, end, start, resources = at[good], end[good], start[good], resources[good]
        return Labels(
            np.full(len(at), used, np.int64),
            np.full(len(at), index, np.int64),
            end,
            cost[at, end],
            slowest[at, end] if self._repeat else np.zeros(len(at)),
            resources,
            labels.offloaded[at] + tables.offloaded[start, end],
            labels.order_rank[at],
            labels.ends_rank[at],
            members[at],
        )

    def _link(self, last: int, index: int) -> tuple[Floats, Floats]:
        """[layers]: seconds of a decoding step and of a piece from one device to another one, by the layer behind."""
        if (last, index) not in self._links:
            problem, boundaries = self._problem, self._problem.model.boundaries
            before, behind = problem.devices[last], problem.devices[index]
            one, piece = (
                np.array([problem.link_seconds(before, behind, size * rows) for size in boundaries])
                for rows in (problem.load.rows, self._rows)
            )
            self._links[last, index] = one, piece
        return self._links[last, index]

    def _used(self, index: int, tables: ShardTables, start: np.ndarray, end: np.ndarray) -> Floats:
        """[n, resources] of the new shard."""
        machine = self._problem.devices[index].machine
        columns = [tables.pooled[start, end] * (name == machine) for name in self._pools]
        columns += [tables.busy[start, end] * (name == machine) for name in self._busy]
        return np.stack(columns, axis=1) if columns else np.zeros((len(start), 0))

    def _finish(self, shards: int, members: np.ndarray) -> None:
        """Offer whole placements that have pieces of this number of rows."""
        problem, labels = self._problem, self._levels[-1]
        if problem.pinned and shards < len(problem.devices):
            return
        members = members[labels.used[members] & self._required == self._required]
        if not len(members):
            return
        hosts = sum(1 << index for index, device in enumerate(problem.devices) if device.host)
        rows = [problem.piece_rows(shards, with_cpu=cpu) for cpu in (False, True)]
        members = members[np.where(labels.used[members] & hosts, rows[1], rows[0]) == self._rows]
        if not len(members):
            return
        decoding, reading = problem.weights
        ways = np.array([device.way.latency for device in problem.devices])
        busy = labels.resources[members, len(self._pools) :].max(axis=1, initial=0.0)
        values = labels.cost[members] + (decoding + reading) * ways[labels.last[members]]
        values = values + self._repeat * np.maximum(labels.slowest[members], busy)
        tied = values <= values.min() * (1 + _TIE)
        found = []
        for label, value in zip(members[tied].tolist(), values[tied].tolist(), strict=True):
            order, ends, at = [], [], label
            for level in reversed(self._levels):
                order.append(int(level.last[at]))
                ends.append(-int(level.done[at]))
                at = int(level.parent[at])
            found.append(_Candidate(value, int(labels.offloaded[label]), tuple(order[::-1]), tuple(ends[::-1])))
        self._search.offer(shards, found)


def _groups(labels: Labels, members: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """The labels by devices used and last device, which `undominated` has sorted."""
    states = labels.used[members] * 64 + labels.last[members]
    starts = np.flatnonzero(np.diff(states, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(members)], strict=True):
        group = members[start:end]
        yield int(labels.used[group[0]]), int(labels.last[group[0]]), group
