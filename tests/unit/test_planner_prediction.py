"""Predictions of given placements: the brute force's values, shard by shard."""

from __future__ import annotations

import random

import pytest

from luce.planner.layer_time import Seconds
from luce.planner.prediction import PlacedShard, limit, predict
from tools.planner_cases import BruteForce, layers_of, problem_of, random_case


@pytest.mark.parametrize("seed", range(30))
def test_any_placement_has_the_value_of_the_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    case = random_case(rng)
    count, devices = len(layers_of(case)), case["devices"]
    order = tuple(rng.sample(range(len(devices)), rng.randint(1, min(len(devices), count))))
    cuts = tuple(sorted(rng.sample(range(1, count), len(order) - 1)))
    expected = BruteForce(case).value(order, cuts)
    edges = [0, *cuts, count]
    away = [0] * len(order) if expected is None else [stage[3] for stage in expected[1]]
    placement = [PlacedShard(devices[i]["name"], range(edges[k], edges[k + 1]), away[k]) for k, i in enumerate(order)]
    found = predict(problem_of(case), placement)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.value == pytest.approx(expected[0], rel=1e-9)
    assert len(found.links) == len(order) - 1


def test_the_limit_is_the_largest_part() -> None:
    assert limit(Seconds(launches=1, step=1.5, memory=2)) == "launches"
    assert limit(Seconds(launches=1, memory=2, arithmetic=3)) == "arithmetic"
    assert limit(Seconds(unpacking=1)) == "unpacking"
    assert limit(Seconds(bus=1)) == "link"
    assert limit(Seconds(cpu_experts=1)) == "CPU experts"
    assert limit(Seconds(memory=1)) == "memory read"
