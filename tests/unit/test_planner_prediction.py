"""Predictions of given placements: the brute force's values, shard by shard."""

from __future__ import annotations

import random
from typing import Any

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


def test_a_prompt_waits_for_the_slowest_part() -> None:
    link = {"latency": 1e-3, "bandwidth": 1e9}
    layer = {"bytes": 10**8, "macs": 10**8, "launches": 10, "kv": 0, "attn": 0, "repeat": 4}
    device = {"host": "here", "kind": "cuda", "free": 10**12, "read": 1e11, "launch": 1e-6, "step": 1e-5, "way": link}
    device |= {"rates": {"1": 2e11, "512": 1e13}}
    case: dict[str, Any] = {"model": {"hidden": 8, "boundary": 32, "embedding": 0, "layers": [layer]}, "pairs": {}}
    case["model"]["head"] = {"bytes": 0, "macs": 0, "launches": 0}
    case |= {"load": {"sequences": 1, "context": 4096, "prompt": 4096}, "offload": False, "optimize": "prompt"}
    case["devices"] = [device | {"name": "a"}, device | {"name": "b"}, device | {"name": "c", "kind": "cpu"}]

    def slowest(*shards: tuple[str, int, int], boundary: int = 32) -> str:
        problem = problem_of(case | {"model": case["model"] | {"boundary": boundary}})
        found = predict(problem, [PlacedShard(name, range(first, end)) for name, first, end in shards])
        assert found is not None
        return found.slowest

    assert slowest(("a", 0, 1), ("b", 1, 4)) == "b"
    assert slowest(("a", 0, 3), ("b", 3, 4)) == "a"
    assert slowest(("a", 0, 2), ("b", 2, 4), boundary=10**6) == "a > b"
    # A CPU with one shard is its device; two shards on it have it in turn.
    assert slowest(("a", 0, 1), ("c", 1, 4)) == "c"
    case["devices"].append(device | {"name": "d", "kind": "cpu"})
    assert slowest(("c", 0, 2), ("d", 2, 4)) == "the CPU"
