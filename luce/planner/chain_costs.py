"""What shards, links and ends of a chain cost, in the weighted seconds that the search makes small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from luce.planner.problem import Problem
from luce.planner.shard_tables import Floats, shard_tables

#: devices, first layers and the layers behind the last ones, shard by shard
Path = Sequence[tuple[int, int, int]]


class ChainCosts:
    """Costs of the chains whose prompts come in pieces of `rows` rows.

    A placement's value is the sum of its costs, plus `repeat` times the seconds of its slowest part.
    """

    def __init__(self, problem: Problem, rows: int) -> None:
        self.problem, self.rows = problem, rows
        self.layers = len(problem.model.layers)
        self.tables = [shard_tables(problem, device, rows) for device in problem.devices]
        self._decoding, self._reading = problem.weights
        #: of each device's shards, [layers, layers + 1]
        self.shards = [self._decoding * tables.decode + self._reading * tables.prompt for tables in self.tables]
        self.repeat = self._reading * (problem.pieces(rows) - 1)
        #: of the way to the first device or from the last one, for each device
        self.ends = np.array([(self._decoding + self._reading) * device.way.latency for device in problem.devices])
        # Drafting takes as long with all placements; what a device brings is a share of it all.
        self.always = self._decoding * problem.drafting_seconds
        #: machines whose memory several shards may share, and of these the ones whose CPU they may share in prompts
        self.pools = [machine for machine in problem.pools if self._shared(machine)]
        self.busy = self.pools if self.repeat else []
        self.room = np.array([problem.pools[machine] for machine in self.pools])
        self._links: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def _shared(self, machine: str) -> bool:
        own = [device for device in self.problem.devices if device.machine == machine]
        return sum(device.host or self.problem.expert_cpu(device) is not None for device in own) > 1

    def link(self, last: int, index: int) -> tuple[Floats, Floats]:
        """[layers]: the cost of a link from one device to another one, and its seconds for a piece of a prompt, by the
        layer behind it."""
        if (last, index) not in self._links:
            problem, boundaries = self.problem, self.problem.model.boundaries
            before, behind = problem.devices[last], problem.devices[index]
            one, piece = (
                np.array([problem.link_seconds(before, behind, size * rows) for size in boundaries])
                for rows in (problem.load.rows, self.rows)
            )
            self._links[last, index] = self._decoding * one + self._reading * piece, piece
        return self._links[last, index]

    def shared(self, index: int, start: np.ndarray, end: np.ndarray) -> Floats:
        """[n, pools + busy]: bytes in the memory of machines, and seconds of their CPUs, of a device's shards."""
        machine, tables = self.problem.devices[index].machine, self.tables[index]
        columns = [tables.pooled[start, end] * (name == machine) for name in self.pools]
        columns += [tables.busy[start, end] * (name == machine) for name in self.busy]
        return np.stack(columns, axis=1) if columns else np.zeros((len(start), 0))

    @cached_property
    def _hosts(self) -> int:
        return sum(1 << index for index, device in enumerate(self.problem.devices) if device.host)

    @cached_property
    def _required(self) -> int:
        return sum(1 << i for i, device in enumerate(self.problem.devices) if device.name == self.problem.required)

    def whole(self, used: np.ndarray, shards: int) -> np.ndarray:
        """Whether sets of devices, as bits, may hold the model in pieces of this number of rows."""
        problem = self.problem
        rows = [problem.piece_rows(shards, with_cpu=cpu) for cpu in (False, True)]
        good: np.ndarray = np.where(used & self._hosts, rows[1], rows[0]) == self.rows
        good &= used & self._required == self._required
        return good & (not problem.pinned or shards == len(problem.devices))

    def slowest(self, path: Path) -> float:
        """Seconds that the slowest shard or link takes for a piece of a prompt."""
        shards = [float(self.tables[index].prompt[start, end]) for index, start, end in path]
        pairs = itertools.pairwise(path)
        return max(shards + [float(self.link(before[0], index)[1][start]) for before, (index, start, _) in pairs])

    def value(self, path: Path) -> float:
        """The value of a chain; infinite if it is no placement, or does not fit."""
        used = sum({1 << index for index, _, _ in path})
        if used.bit_count() < len(path) or not self.whole(np.array([used]), len(path))[0]:
            return math.inf
        cost = self.always + float(self.ends[path[0][0]] + self.ends[path[-1][0]])
        cost += sum(float(self.shards[index][start, end]) for index, start, end in path)
        pairs = itertools.pairwise(path)
        cost += sum(float(self.link(before[0], index)[0][start]) for before, (index, start, _) in pairs)
        pooled, busy = np.split(self.resources(path), [len(self.pools)])
        if (pooled > self.room).any():
            return math.inf
        return float(cost + self.repeat * max(self.slowest(path), *busy.tolist(), 0.0))

    def resources(self, path: Path) -> Floats:
        """[pools + busy]: of all shards of a chain."""
        shared = [self.shared(index, np.array([start]), np.array([end]))[0] for index, start, end in path]
        return np.asarray(np.sum(shared, axis=0))
