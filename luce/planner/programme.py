"""The placements that are as good as a value: a programme over labels (labels.py), which a shard at a time extends.

It is exact: a label is dropped if another one beats it, or if what completes it (completion_costs.py) makes it worse.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np

from luce.planner.chain_costs import ChainCosts
from luce.planner.chains import Chains
from luce.planner.completion_costs import TIE, Completions, Narrowed
from luce.planner.labels import Labels, concatenate, ranks, undominated
from luce.planner.shard_tables import Floats, Ints

#: labels of one length, beyond which they are compared coarsely; in a comparison each takes about 500 bytes
MOST_LABELS = 40_000
#: the same before they are compared
MOST_COMPARED = 120_000
#: labels of one length that stay where all of a state are merged, those whose placements may be the best ones
_MOST_MERGED = 4000


@dataclass(frozen=True)
class Candidate:
    """A placement, and what decides between equal values."""

    value: float
    offloaded: int
    order: tuple[int, ...]
    #: the layer behind each shard, negative
    ends: tuple[int, ...]

    @property
    def tie(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Fewer offloaded layers win, then devices in the order listed, then more layers on the earlier ones."""
        return self.offloaded, self.order, self.ends


class Merging(enum.Enum):
    """Which labels of a state are dropped."""

    NONE = enum.auto()
    #: those that are worse by less than figures vary by
    COARSE = enum.auto()
    #: all but the one that is the best one if it ends there, and of all states those that may become the best ones
    ALL = enum.auto()


class TooManyLabelsError(Exception):
    """There are more labels than fit the memory of a plan."""


class Programme:
    """The placements of some numbers of shards, whose prompts come in pieces of the same number of rows."""

    def __init__(
        self, chains: Chains, costs: ChainCosts, completions: Completions, merging: Merging = Merging.NONE
    ) -> None:
        self._chains, self._costs, self._completions = chains, costs, completions
        self._merging = merging
        self._levels: list[Labels] = []
        self._relaxed: list[Narrowed] = []
        self._found: list[Candidate] = []
        self._upper = np.inf

    def best(self, lengths: Set[int], relaxed: list[Narrowed], upper: float) -> list[Candidate]:
        """The placements of the least value, of at most `upper`, where relaxations leave room for them."""
        self._levels, self._relaxed, self._found, self._upper = [], relaxed, [], upper
        labels = self._begin()
        for shards in range(1, max(lengths) + 1):
            self._levels.append(labels)
            whole = labels.done == self._costs.layers
            if shards in lengths:
                self._finish(shards, np.flatnonzero(whole))
            if shards == max(lengths) or whole.all():
                break
            labels = self._extend(np.flatnonzero(~whole))
        return self._found

    def _begin(self) -> Labels:
        zero, nothing = np.zeros(1, np.int64), np.zeros(1)
        resources = np.zeros((1, len(self._costs.pools) + len(self._costs.busy)))
        empty = Labels(
            zero, zero, zero, nothing + self._costs.always, nothing, resources, zero, zero, zero, zero, nothing
        )
        devices = [i for i in range(len(self._costs.tables)) if self._chains.usable(i, 0, None)]
        return self._kept([self._longer(empty, zero, index, shards=1) for index in devices])

    def _extend(self, members: np.ndarray) -> Labels:
        labels, shards = self._levels[-1], len(self._levels) + 1
        parts, compared = list[Labels](), 0
        for used, last, group in _groups(labels, members):
            for index in range(len(self._costs.tables)):
                if not self._chains.usable(index, used, last):
                    continue
                longer = self._longer(labels[group], group, index, shards=shards)
                parts.append(self._best_of_state(longer) if self._merging is Merging.ALL else longer)
                compared += len(parts[-1])
                if compared > MOST_COMPARED and self._merging is not Merging.ALL:
                    raise TooManyLabelsError
        return self._kept(parts)

    def _kept(self, parts: list[Labels]) -> Labels:
        if not parts:
            return self._levels[-1][np.zeros(0, np.int64)]
        labels = concatenate(parts)
        if not len(labels):
            return labels
        rank = ranks(labels.order_rank, labels.last)
        ends = ranks(labels.ends_rank, -labels.done)
        labels = Labels(**{**vars(labels), "order_rank": rank, "ends_rank": ends})
        if self._merging is Merging.ALL:
            best = self._best_of_state(labels)
            labels = best[np.sort(np.argsort(best.bound, kind="stable")[:_MOST_MERGED])]
        labels = undominated(labels, coarse=self._merging is not Merging.NONE)
        if len(labels) > MOST_LABELS and self._merging is not Merging.ALL:
            raise TooManyLabelsError
        return labels

    def _best_of_state(self, labels: Labels) -> Labels:
        """The label of each state that is the best one if it ends there."""
        state = (labels.used * 64 + labels.last) * (self._costs.layers + 1) + labels.done
        order = np.lexsort((labels.cost + self._costs.repeat * labels.slowest, state))
        return labels[np.sort(order[np.diff(state[order], prepend=-1) != 0])]

    def _longer(self, labels: Labels, members: np.ndarray, index: int, *, shards: int) -> Labels:
        """The labels with one more shard on a device, for every end of it that fits and may be worth it."""
        costs, tables = self._costs, self._costs.tables[index]
        done, used = labels.done, int(labels.used[0]) | 1 << index
        cost = labels.cost[:, None] + costs.shards[index][done]
        slowest = np.maximum(labels.slowest[:, None], tables.prompt[done])
        if shards == 1:
            cost = cost + costs.ends[index]
        else:
            hop, piece = costs.link(int(labels.last[0]), index)
            cost, slowest = cost + hop[done, None], np.maximum(slowest, piece[done, None])
        at, end = np.nonzero(tables.fits[done])
        start = done[at]
        resources = labels.resources[at] + costs.shared(index, start, end)
        cost, slowest = cost[at, end], slowest[at, end]
        bound = self._bound(cost, slowest, resources, end, (shards, used, index))
        good = bound <= self._upper * (1 + TIE)
        good &= (resources[:, : len(costs.room)] <= costs.room).all(axis=1)
        at, end, start, resources = at[good], end[good], start[good], resources[good]
        return Labels(
            np.full(len(at), used, np.int64),
            np.full(len(at), index, np.int64),
            end,
            cost[good],
            slowest[good] if costs.repeat else np.zeros(len(at)),
            resources,
            labels.offloaded[at] + tables.offloaded[start, end],
            labels.order_rank[at],
            labels.ends_rank[at],
            members[at],
            bound[good],
        )

    def _bound(
        self, cost: Floats, slowest: Floats, resources: Floats, done: Ints, state: tuple[int, int, int]
    ) -> Floats:
        """A value that placements which begin with labels of a state (shards, devices used, last one) have at least."""
        row = self._completions.state(*state)
        bound = np.full(len(cost), -np.inf)
        for relaxed in self._relaxed:
            prices = relaxed.prices
            paid = cost + resources @ prices.weights - prices.refund
            least = np.full(len(cost), np.inf)
            for span in relaxed.spans:
                value = paid + span.rest[state[0] - 1][row, done] + prices.repeat * np.maximum(slowest, span.low)
                least = np.where(slowest <= span.high * (1 + TIE), np.minimum(least, value), least)
            bound = np.maximum(bound, least)
        return bound

    def _finish(self, shards: int, members: np.ndarray) -> None:
        """Find the best whole placements, and look for better ones from there on."""
        costs, labels = self._costs, self._levels[-1]
        members = members[costs.whole(labels.used[members], shards)]
        if not len(members):
            return
        busy = labels.resources[members, len(costs.pools) :].max(axis=1, initial=0.0)
        values = labels.cost[members] + costs.ends[labels.last[members]]
        values = values + costs.repeat * np.maximum(labels.slowest[members], busy)
        self._upper = min(self._upper, float(values.min()))
        tied = values <= self._upper * (1 + TIE)
        for label, value in zip(members[tied].tolist(), values[tied].tolist(), strict=True):
            order, ends, at = [], [], label
            for level in reversed(self._levels):
                order.append(int(level.last[at]))
                ends.append(-int(level.done[at]))
                at = int(level.parent[at])
            path = tuple(order[::-1]), tuple(ends[::-1])
            self._found.append(Candidate(value, int(labels.offloaded[label]), *path))


def _groups(labels: Labels, members: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """The labels by devices used and last device, which `undominated` has sorted."""
    states = labels.used[members] * 64 + labels.last[members]
    starts = np.flatnonzero(np.diff(states, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(members)], strict=True):
        group = members[start:end]
        yield int(labels.used[group[0]]), int(labels.last[group[0]]), group
