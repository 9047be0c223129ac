"""The fastest placement: which devices, in which order, which layers on each, and which devices are left out.

Of all numbers of shards, the smallest one wins whose best value is within a margin of the best of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from luce.planner.chain_costs import ChainCosts, Path
from luce.planner.chains import Chains
from luce.planner.completion_costs import TIE, Completions, Narrowed
from luce.planner.figures import DeviceFigures
from luce.planner.prediction import PlacedShard, Prediction, predict
from luce.planner.problem import Problem
from luce.planner.programme import Candidate, Merging, Programme, TooManyLabelsError
from luce.planner.relaxation import relaxations, settled
from luce.planner.shard_tables import shard_tables

# A CPU device whose weights are read so many times as fast is not the same one with other noise.
_FASTER = 1.25


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    placement: tuple[PlacedShard, ...]
    prediction: Prediction
    #: labels were merged, so a slightly better placement may exist
    near: bool


def best_placement(problem: Problem) -> Found | None:
    """The placement with the least value; None if none fits.

    Of each machine's CPU devices one is a candidate, unless all devices are pinned: they share cores and memory.
    """
    problem = _with_one_cpu(problem)
    search = _Search(problem)
    chosen = search.best()
    if chosen is None:
        return None
    placement = _shards(problem, chosen)
    prediction = predict(problem, placement)
    assert prediction is not None, "the search and the prediction read the same tables"
    return Found(placement, prediction, search.near)


def _with_one_cpu(problem: Problem) -> Problem:
    if problem.pinned:
        return problem
    cpus: dict[str, list[DeviceFigures]] = {}
    for device in problem.devices:
        if device.host:
            cpus.setdefault(device.machine, []).append(device)
    candidates = {own.name: own for own in (_together(own, problem.required) for own in cpus.values())}
    devices = (candidates.get(device.name) if device.host else device for device in problem.devices)
    return replace(problem, devices=tuple(device for device in devices if device is not None))


def _together(cpus: Sequence[DeviceFigures], required: str) -> DeviceFigures:
    """The first one of a machine's CPU devices, or one that is required or clearly faster, with the memory of all."""
    fastest = max(cpus, key=lambda cpu: cpu.read)
    chosen = fastest if fastest.read > _FASTER * cpus[0].read else cpus[0]
    chosen = next((cpu for cpu in cpus if cpu.name == required), chosen)
    margins = [cpu.margin for cpu in cpus if cpu.margin is not None]
    margin = sum(margins) if len(margins) == len(cpus) else chosen.margin
    free, uncounted = (sum(getattr(cpu, name) for cpu in cpus) for name in ("free", "uncounted"))
    return replace(chosen, free=free, uncounted=uncounted, margin=margin)


def _shards(problem: Problem, chosen: Candidate) -> tuple[PlacedShard, ...]:
    devices = [problem.devices[index] for index in chosen.order]
    rows = problem.piece_rows(len(devices), with_cpu=any(device.host for device in devices))
    shards, start = [], 0
    for device, end in zip(devices, (-end for end in chosen.ends), strict=True):
        offloaded = int(shard_tables(problem, device, rows).offloaded[start, end])
        shards.append(PlacedShard(device.name, range(start, end), offloaded))
        start = end
    return tuple(shards)


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.near = False
        chains = Chains(problem)
        most = min(len(problem.devices), len(problem.model.layers))
        lengths: dict[int, set[int]] = {}
        for shards, with_cpu in itertools.product(range(1, most + 1), (False, True)):
            lengths.setdefault(problem.piece_rows(shards, with_cpu=with_cpu), set()).add(shards)
        # Few shards first: their values bound the search for more of them.
        self._parts = [
            _Part(chains, ChainCosts(problem, rows), of) for rows, of in sorted(lengths.items(), reverse=True)
        ]
        self._margin = problem.margin

    def best(self) -> Candidate | None:
        least = np.inf
        for part in self._parts:
            least = min(least, part.least(part.lengths, least))
        if not np.isfinite(least):
            return None
        limit = least * (1 + self._margin)
        for shards in sorted(set[int]().union(*(part.lengths for part in self._parts))):
            upper = limit
            found = list[Candidate]()
            for part in (part for part in self._parts if shards in part.lengths):
                found += part.best(shards, upper)
                upper = min([upper, *(candidate.value for candidate in found)])
            tied = [candidate for candidate in found if candidate.value <= upper * (1 + TIE)]
            if tied:
                self.near = any(part.merging is not Merging.NONE for part in self._parts)
                return min(tied, key=lambda candidate: candidate.tie)
        raise AssertionError("one of the numbers of shards has the least value")


class _Part:
    """The placements whose prompts come in pieces of the same number of rows."""

    def __init__(self, chains: Chains, costs: ChainCosts, lengths: Set[int]) -> None:
        self.lengths = lengths
        self._chains, self._costs = chains, costs
        self._completions = Completions(chains, costs, max(lengths))
        # Bounds that take devices twice leave too many labels.
        self.merging = Merging.ALL if chains.by_length else Merging.NONE

    def least(self, lengths: Set[int], upper: float) -> float:
        """The least value of placements of these numbers of shards; infinite where it is more than `upper`."""
        relaxed = relaxations(self._costs, self._completions, lengths, upper)
        known = min(upper, *(one.value for one in relaxed))
        if any(settled(one, known) for one in relaxed):
            return known
        found = self._programme(lengths, relaxed, known)
        return min([known, *(candidate.value for candidate in found)])

    def best(self, shards: int, upper: float) -> list[Candidate]:
        """Placements of a number of shards with the least value, of at most `upper`."""
        relaxed = relaxations(self._costs, self._completions, {shards}, upper)
        known = min(upper, *(one.value for one in relaxed))
        if not all(one.spans for one in relaxed):
            return []
        found = self._programme({shards}, relaxed, known)
        # Where labels were merged, a placement that the relaxations have found may be better.
        paths = [(one.value, one.path) for one in relaxed if one.path is not None]
        return found + [self._candidate(value, path) for value, path in paths]

    def _candidate(self, value: float, path: Path) -> Candidate:
        offloaded = sum(int(self._costs.tables[index].offloaded[start, end]) for index, start, end in path)
        return Candidate(value, offloaded, tuple(index for index, _, _ in path), tuple(-end for _, _, end in path))

    def _programme(self, lengths: Set[int], relaxed: list[Narrowed], upper: float) -> list[Candidate]:
        while True:
            try:
                return Programme(self._chains, self._costs, self._completions, self.merging).best(
                    lengths, relaxed, upper
                )
            except TooManyLabelsError:
                self.merging = Merging(self.merging.value + 1)
