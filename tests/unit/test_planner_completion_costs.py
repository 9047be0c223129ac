"""What completes chains at least: whatever prices, limits and lengths, no placement is below it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from luce.planner import chains
from luce.planner.chain_costs import ChainCosts, Path
from luce.planner.chains import Chains
from luce.planner.completion_costs import Completions
from luce.planner.prices import Prices
from luce.planner.problem import Problem
from tools.planner_cases import problem_of, random_case


def paths(problem: Problem, length: int) -> list[Path]:
    """All chains of so many shards that hold all layers."""
    count, found = len(problem.model.layers), list[Path]()
    for order in itertools.permutations(range(len(problem.devices)), length):
        for cuts in itertools.combinations(range(1, count), length - 1):
            bounds = (0, *cuts, count)
            found.append([(i, a, b) for i, a, b in zip(order, bounds, bounds[1:], strict=False)])
    return found


def least(costs: ChainCosts, problem: Problem, lengths: set[int]) -> float:
    allowed = Chains(problem)
    values = [np.inf]
    for path in (path for length in lengths for path in paths(problem, length)):
        used, last = 0, None
        good = all(costs.tables[index].fits[start, end] for index, start, end in path)
        for index, _, _ in path:
            good = good and allowed.usable(index, used, last)
            used, last = used | 1 << index, index
        if good:
            values.append(costs.value(path))
    return min(values)


@pytest.mark.parametrize("states", [None, 1])
@pytest.mark.parametrize("seed", range(30))
def test_no_placement_is_below_the_bound(seed: int, states: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if states is not None:
        monkeypatch.setattr(chains, "MOST_STATES", states)
    rng = random.Random(seed)
    case = random_case(rng)
    case["model"]["layers"] = case["model"]["layers"][:6]
    problem = problem_of(case)
    most = min(3, len(problem.devices), len(problem.model.layers))
    costs = ChainCosts(problem, 512)
    completions = Completions(Chains(problem), costs, most)
    for length in range(1, most + 1):
        best = least(costs, problem, {length})
        for _ in range(4):
            memory = np.array([rng.uniform(0, 0.1) for _ in costs.pools])
            shares = np.array([rng.uniform(0, 1 / len(costs.busy)) for _ in costs.busy])
            found = completions.narrow({length}, np.inf, Prices.of(costs, memory, shares), rng.choice((1, 4, 100)))
            assert found.bound <= best * (1 + 1e-9)
            assert found.value >= best * (1 - 1e-9)
            if found.path is not None:
                assert costs.value(found.path) == found.value
        if not costs.pools and states is None:
            free = Prices.of(costs, np.zeros(0), np.zeros(0))
            found = completions.narrow({length}, np.inf, free, 1)
            assert found.value == pytest.approx(best, rel=1e-12)
            assert found.bound == pytest.approx(best, rel=1e-9)
