"""What another placement would bring: the present one and the other one by the same figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from luce.backend.prediction_facts import PredictedPlan
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import Prediction, predict
from luce.planner.problem import Problem
from luce.planner.search import best_placement


@dataclass(frozen=True)
class Gain:
    """How much faster another placement is, each 0.15 for 15 %."""

    decode: float
    prompt: float


def present_prediction(plan: PredictedPlan, problem: Problem) -> Prediction:
    """How fast the placement of a plan is by the figures of another problem; as it was predicted, where these do not
    have all of its devices, or less memory of them."""
    placed = [shard.shard for shard in plan.prediction.shards]
    if not {shard.device for shard in placed} <= {device.name for device in problem.devices}:
        return plan.prediction
    given = problem if problem.offload == "off" else replace(problem, offload="given")
    return predict(given, placed) or plan.prediction


@dataclass(frozen=True)
class KnownFigures:
    """The figures of all devices that a model's placements have considered, also of those that are not there now."""

    devices: Mapping[str, DeviceFigures] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkFigures] = field(default_factory=dict)

    def beside(self, problem: Problem) -> KnownFigures:
        """These figures, and those of a placement's problem."""
        devices = {device.name: device for device in problem.devices}
        return KnownFigures({**self.devices, **devices}, {**self.links, **problem.links})

    def lacks(self, idle: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
        """Those of `idle`, names with their devices, of which no figures are known."""
        return frozenset(name for name, devices in idle.items() if not self.devices.keys() >= set(devices))

    def gains(self, plan: PredictedPlan, idle: Mapping[str, tuple[str, ...]]) -> dict[str, Gain]:
        """What the devices of each of `idle` would bring beside those of a plan; without those of which no figures are
        known."""
        found, lacking = {}, self.lacks(idle)
        there = {device.name for device in plan.problem.devices}
        for name, devices in idle.items():
            if name in lacking:
                continue
            more = tuple(self.devices[device] for device in devices if device not in there)
            with_it = replace(plan.problem, devices=(*plan.problem.devices, *more), links=self.links)
            best, present = best_placement(with_it), present_prediction(plan, with_it)
            if best is not None:
                rates = (
                    best.prediction.decode_rate / present.decode_rate,
                    best.prediction.prompt_rate / present.prompt_rate,
                )
                found[name] = Gain(rates[0] - 1, rates[1] - 1)
        return found
