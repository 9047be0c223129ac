"""What another placement would bring is said by the same figures for both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from luce.backend.placement_gains import KnownFigures, present_prediction
from luce.backend.prediction_facts import PredictedPlan
from luce.planner.problem import Load, Problem
from luce.planner.search import best_placement
from tests.support.plain_placements import gpu, model


def problem(*devices: Any) -> Problem:
    return Problem(model(), Load(1, 8192, 2048), devices, {}, "decode")


def planned(found: Problem) -> PredictedPlan:
    best = best_placement(found)
    assert best is not None
    known: Any = None
    return PredictedPlan(found, best.prediction, known)


def test_a_member_that_was_there_before_has_its_gain() -> None:
    slow, fast = gpu("cuda:0", 0.5), gpu("member://box/cuda:0", 2.0)
    both, alone = planned(problem(slow, fast)), planned(problem(slow))
    known = KnownFigures().beside(both.problem)
    idle = {"box": ("member://box/cuda:0",), "den": ("member://den/cuda:0",)}
    gains = known.gains(alone, idle)
    # Of the other one no figures are known.
    assert set(gains) == {"box"} and known.lacks(idle) == {"den"}
    assert known.lacks({"box": ("member://box/cuda:0", "member://box/cuda:1")}) == {"box"}
    expected = both.prediction.decode_rate / alone.prediction.decode_rate - 1
    assert gains["box"].decode == expected > 0.15
    assert gains["box"].prompt == both.prediction.prompt_rate / alone.prediction.prompt_rate - 1
    # One that the planner leaves out brings nothing.
    assert known.gains(planned(problem(fast)), {"box": ("cuda:0",)})["box"].decode == 0.0


def test_the_present_placement_is_predicted_anew() -> None:
    plan = planned(problem(gpu("cuda:0")))
    slower = present_prediction(plan, problem(gpu("cuda:0", 0.5), gpu("cuda:1")))
    assert slower.decode_rate < 0.7 * plan.prediction.decode_rate
    assert [shard.shard for shard in slower.shards] == [shard.shard for shard in plan.prediction.shards]
    # Without a device of it, or without its memory, there is nothing but what was predicted then.
    assert present_prediction(plan, problem(gpu("cuda:1"))) is plan.prediction
    tiny = replace(gpu("cuda:0"), free=1)
    assert present_prediction(plan, problem(tiny, gpu("cuda:1"))) is plan.prediction
