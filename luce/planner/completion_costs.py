"""The least cost with which chains of shards can be completed, for a limit of the slowest part.

Without that limit, and without memory that shards share, this is the textbook programme over (devices used, last one,
layers done). A prompt repeats the slowest part, so a placement is found by trying limits: for each of them the cheapest
placement, and for the limits between two of them a value that no placement is below.
"""

from __future__ import annotations

import heapq
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from luce.planner.chain_costs import ChainCosts, Path
from luce.planner.chains import Chains, Level
from luce.planner.prices import Prices
from luce.planner.shard_tables import Floats, Ints

#: values within this share of each other are a tie
TIE = 1e-9
# Limits within this share of each other are one: sums of the same numbers in another order differ by about 1e-16.
_EQUAL = 1e-12
#: numbers of a block of arrays, which the caches of a core hold
_BLOCK = 1 << 17


@dataclass(frozen=True)
class Span:
    """The placements whose slowest shard or link takes between `low` and `high` seconds."""

    low: float
    high: float
    #: a value that they have at least
    bound: float
    #: by length, [states, layers + 1]: what it costs at least to complete a chain
    rest: list[Floats]


@dataclass(frozen=True)
class Narrowed:
    """What limits have shown."""

    #: the least value of a placement that was found; infinite where none was found, or none as low as was asked for
    value: float
    #: where the placements of this value are, and where others may be that are better
    spans: list[Span]
    prices: Prices
    #: the placement with `value`
    path: Path | None
    #: resources, and the slowest shard or link, of the cheapest chain that may be best
    used: tuple[Floats, float] | None

    @property
    def bound(self) -> float:
        """A value that no placement is below."""
        return min((span.bound for span in self.spans), default=np.inf)


@dataclass(frozen=True)
class _Shards:
    """The shards of a device by their number of layers, less one, and their first layer: [most layers, layers]."""

    cost: Floats
    piece: Floats
    #: [resources, most layers, layers]
    shared: Floats

    def within(self, limit: float, prices: Prices) -> Floats:
        """Costs, infinite for shards that take longer, up to the longest one that does not."""
        cost = np.where(self.piece <= limit, self.cost, np.inf)
        if prices.weights.any():
            cost += np.tensordot(prices.weights, self.shared, 1)
        lengths = np.flatnonzero(np.isfinite(cost).any(axis=1))
        return cost[: lengths.max() + 1] if len(lengths) else cost[:0]


class Completions:
    """Completions of the chains whose prompts come in pieces of the same number of rows."""

    def __init__(self, chains: Chains, costs: ChainCosts, length: int) -> None:
        self._costs, self._levels = costs, chains.levels(length)
        self._count = costs.layers
        self._shards = [self._by_length(index) for index in range(len(costs.tables))]
        #: by length, of each (devices used, last one); where chains are told apart by the last one alone, with 0
        self._states = [
            {state: at for at, state in enumerate(zip(level.used.tolist(), level.last.tolist(), strict=True))}
            for level in self._levels
        ]
        self._hops = [
            self._between(level, behind) for level, behind in zip(self._levels, self._levels[1:], strict=False)
        ]
        #: by length, whether a state's devices may hold the model
        self._whole = [costs.whole(level.used, at + 1) | (level.used == 0) for at, level in enumerate(self._levels)]
        self._limits = self._distinct_limits()

    def state(self, shards: int, used: int, last: int) -> int:
        """The row of `Span.rest` of chains of so many shards."""
        states = self._states[shards - 1]
        return states[used, last] if (used, last) in states else states[0, last]

    def narrow(self, lengths: Set[int], upper: float, prices: Prices, tries: int) -> Narrowed:
        """The placements with one of these numbers of shards, and with a value of at most `upper`. Where
        cheapest chains are no placements, about so many limits are tried."""
        limits, repeat = (self._limits, prices.repeat) if prices.repeat > 0 else (self._limits[-1:], 0.0)
        best, tried, exact = np.inf, 0, True
        used: tuple[Floats, float] | None = None
        placement: Path | None = None
        spans = list[Span]()
        # Ranges of limits: a value that their placements have at least, what these cost at least, first and last limit.
        waiting = [(-np.inf, 0.0, 0, len(limits) - 1)]
        while waiting and waiting[0][0] <= min(best, upper) * (1 + TIE):
            closing = tried >= tries and not exact
            if closing:
                waiting = [(waiting[0][0], 0.0, min(one[2] for one in waiting), max(one[3] for one in waiting))]
            bound, cost, first, last = heapq.heappop(waiting)
            at = last if not tried or closing else (first + last) // 2
            found = self._cheapest(lengths, float(limits[at]), prices)
            tried += 1
            if at < last:
                heapq.heappush(waiting, (cost + repeat * float(limits[at + 1]), cost, at + 1, last))
            if found is None:
                continue
            least, path, rest = found
            slowest, value = self._costs.slowest(path), self._costs.value(path)
            if value < best:
                best, placement = value, path
            if closing:
                spans.append(Span(float(limits[first]) if repeat else 0.0, float(limits[at]), bound, rest))
                break
            exact = exact and value <= (least + repeat * slowest) * (1 + TIE)
            if not spans or least + repeat * slowest < min(span.bound for span in spans):
                used = self._costs.resources(path), slowest
            spans.append(Span(slowest, float(limits[at]), least + repeat * slowest, rest))
            below = int(np.searchsorted(limits, slowest)) - 1
            if below >= first and repeat:
                heapq.heappush(waiting, (least + repeat * float(limits[first]), least, first, below))
            spans = [span for span in spans if span.bound <= min(best, upper) * (1 + TIE)]
        if best > upper * (1 + TIE):
            best, placement = np.inf, None
        return Narrowed(best, spans, prices, placement, used)

    def _cheapest(self, lengths: Set[int], limit: float, prices: Prices) -> tuple[float, Path, list[Floats]] | None:
        """The cost and the path of the cheapest chain without a part that is slower, and what completes all chains."""
        shards = [shards.within(limit, prices) for shards in self._shards]
        rest: list[Floats] = [np.empty(0)] * len(self._levels)
        begun = np.empty((0, self._count))
        for at in range(min(max(lengths), len(self._levels)) - 1, -1, -1):
            level = self._levels[at]
            completed = np.full((len(level.last), self._count + 1), np.inf)
            if at + 1 in lengths:
                completed[:, -1] = np.where(self._whole[at], self._costs.ends[level.last], np.inf)
            if len(begun) and len(level.source):
                cost, piece = self._hops[at]
                ways = begun[level.target] + np.where(piece <= limit, cost, np.inf)
                starts = np.flatnonzero(np.diff(level.source, prepend=-1))
                completed[level.source[starts], :-1] = np.minimum.reduceat(ways, starts, axis=0)
            rest[at] = completed
            begun = self._begun(level.last, completed, shards)
        first = self._costs.ends[self._levels[0].last] + begun[:, 0]
        if not np.isfinite(first).any():
            return None
        state = int(first.argmin())
        return self._costs.always - prices.refund + float(first[state]), self._path(state, shards, rest, limit), rest

    def _begun(self, last: Ints, completed: Floats, shards: list[Floats]) -> Floats:
        """[states, layers]: what completes chains whose last device starts at a layer, with that device's cost."""
        begun = np.full((len(last), self._count), np.inf)
        for index, cost in enumerate(shards):
            states, most = np.flatnonzero(last == index), len(cost)
            if not most:
                continue
            step = max(1, _BLOCK // cost.size)
            for block in (states[at : at + step] for at in range(0, len(states), step)):
                ends = np.full((len(block), self._count + most), np.inf)
                ends[:, : self._count] = completed[block, 1:]
                begun[block] = (sliding_window_view(ends, self._count, axis=1)[:, :most] + cost).min(axis=1)
        return begun

    def _path(self, state: int, shards: list[Floats], rest: list[Floats], limit: float) -> Path:
        """The cheapest chain from a state of one shard on."""
        path, start, at = list[tuple[int, int, int]](), 0, 0
        while True:
            level = self._levels[at]
            index = int(level.last[state])
            cost = shards[index][: self._count - start, start]
            end = start + 1 + int((cost + rest[at][state, start + 1 : start + 1 + len(cost)]).argmin())
            path.append((index, start, end))
            if end == self._count:
                return path
            ways = np.flatnonzero(level.source == state)
            hop, piece = (values[ways, end] for values in self._hops[at])
            behind = level.target[ways]
            onward = np.array([self._onward(at + 1, int(next_state), end, shards, rest) for next_state in behind])
            state = int(behind[int((onward + np.where(piece <= limit, hop, np.inf)).argmin())])
            start, at = end, at + 1

    def _onward(self, at: int, state: int, start: int, shards: list[Floats], rest: list[Floats]) -> float:
        cost = shards[int(self._levels[at].last[state])][: self._count - start, start]
        return float((cost + rest[at][state, start + 1 : start + 1 + len(cost)]).min(initial=np.inf))

    def _by_length(self, index: int) -> _Shards:
        tables, count = self._costs.tables[index], self._count
        layers = np.arange(count + 1) - np.arange(count)[:, None]
        most = int(layers[tables.fits].max(initial=0))
        start = np.arange(count)
        cost, piece = np.full((most, count), np.inf), np.zeros((most, count))
        shared = np.zeros((len(self._costs.pools) + len(self._costs.busy), most, count))
        for number in range(most):
            starts = start[: count - number]
            ends = starts + number + 1
            cost[number, starts] = np.where(tables.fits[starts, ends], self._costs.shards[index][starts, ends], np.inf)
            piece[number, starts] = tables.prompt[starts, ends]
            shared[:, number, starts] = self._costs.shared(index, starts, ends).T
        return _Shards(cost, piece, shared)

    def _between(self, level: Level, behind: Level) -> tuple[Floats, Floats]:
        """[edges, layers]: costs and seconds of links by the layer behind them."""
        before, after = level.last[level.source], behind.last[level.target]
        pairs = [self._costs.link(a, b) for a, b in zip(before.tolist(), after.tolist(), strict=True)]
        empty = np.empty((0, self._count))
        return np.array([cost for cost, _ in pairs] or empty), np.array([piece for _, piece in pairs] or empty)

    def _distinct_limits(self) -> Floats:
        """Seconds of all shards and links, rising."""
        if not self._costs.repeat:
            return np.array([np.inf])
        values = [shards.piece[np.isfinite(shards.cost)] for shards in self._shards]
        values += [piece[:, 1:].ravel() for _, piece in self._hops]
        ordered = np.unique(np.concatenate(values))
        return ordered[np.append(np.diff(ordered) > ordered[1:] * _EQUAL, True)] if len(ordered) else np.array([np.inf])
