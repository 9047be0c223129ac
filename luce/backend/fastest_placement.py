"""The fastest placement of a model's layers on its devices, by figures that are measured or known.

The search (luce.planner) is pure. Here it gets a file's layers and the devices' figures, and what it finds is held
against the memory plan with which layers are loaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from luce.backend.device_figures import device_figures, weight_types
from luce.backend.model_work import model_work, weight_tensors
from luce.backend.placement import RESERVE, plan_shards
from luce.backend.prediction_facts import PredictedPlan
from luce.backend.serving_options import ServingOptions
from luce.config.settings import Config
from luce.errors import DeviceError, OutOfMemoryError
from luce.gguf.reader import GGUFFile
from luce.layers.tensors import tensor_bytes
from luce.models.spec import ModelSpec
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import PlacedShard, Prediction, predict
from luce.planner.problem import Load, Objective, Offload, Problem
from luce.planner.search import Found, best_placement
from luce.profiles.measuring import peer_link
from luce.profiles.profile import DeviceProfile
from luce.profiles.profile_cache import default_measuring, profile_of, stored_profile
from luce.runtime.device import Device
from luce.runtime.step import PAGE

# The memory plan counts mirrors and pinned memory, which the search does not: a device that lacks bytes gets so many
# less in the next search.
_SEARCHES = 4


@dataclass(frozen=True)
class Goal:
    """What a placement is to make fast."""

    objective: Objective
    #: tokens of a prompt and of a reply; a prompt is no longer than the context
    prompt: int = 2048
    reply: int = 256
    #: all devices hold layers, in their order
    pinned: bool = False

    @classmethod
    def of(cls, config: Config) -> Goal | None:
        """The goal of the settings; None if layers go by shares or by free memory."""
        if config.target_layer_split or config.kvflash != "off" or "-" in config.experts_on:
            return None
        objective = config.optimize
        if objective == "auto":
            objective = "balanced" if config.target_devices == ("auto",) else "memory"
        if objective == "memory":
            return None
        return cls(cast(Objective, objective), config.optimize_prompt, config.optimize_reply, config.pin_devices)

    @classmethod
    def default(cls, config: Config) -> Goal:
        """What a placement by other rules is predicted for."""
        return cls("balanced", config.optimize_prompt, config.optimize_reply)


@dataclass(frozen=True)
class ModelOnDevices:
    """A file on devices."""

    file: GGUFFile
    spec: ModelSpec
    devices: Sequence[Device]
    options: ServingOptions


@dataclass(frozen=True)
class Fastest:
    """The fastest placement that fits."""

    problem: Problem
    found: Found
    profiles: Mapping[str, DeviceProfile]

    @property
    def plan(self) -> PredictedPlan:
        """Its prediction."""
        return PredictedPlan(self.problem, self.found.prediction, self.profiles, self.found.near)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that hold layers, in order."""
        return tuple(shard.device for shard in self.found.placement)

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each of these devices."""
        return tuple(shard.layers for shard in self.found.placement)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """The layers that leave their routed experts to the CPU."""
        found: list[int] = []
        for shard in self.found.placement:
            present = [i for i in shard.layers if self.problem.model.layers[i].experts is not None]
            found += present[len(present) - shard.offloaded :]
        return tuple(found)


def measured(
    model: ModelOnDevices,
    *,
    anew: bool = False,
    seconds: float = math.inf,
    on_figure: Callable[[str], None] = lambda figure: None,
) -> dict[str, DeviceProfile]:
    """The profile of each device for the model's types of weights: the stored one, or a measurement.

    `seconds`: for the devices that must be measured. Raises DeviceError that names the
    device whose figures are missing and why: the time was over before its turn, it failed, or it belongs to a daemon.
    """
    types, began = weight_types(weight_tensors(model.file, model.spec)), time.monotonic()
    experts = any(model.spec.mixture(layer) is not None for layer in range(len(model.spec.layers)))
    found = {}
    for device in _measurable(model):
        name = str(device.name)
        if device.remote:
            raise DeviceError(f"{name}: a daemon's device, which is not measured")
        known = None if anew else stored_profile(device, types, experts=experts)
        if known is None:
            left = seconds - (time.monotonic() - began)
            if left <= 0:
                raise DeviceError(f"{name}: not measured within {seconds:g} s (--measure-budget)")
            how = replace(default_measuring(device), experts=experts, end=time.monotonic() + left, on_figure=on_figure)
            known = profile_of(device, types, anew=anew, how=how)
        found[name] = known
    return found


def known_profiles(model: ModelOnDevices) -> dict[str, DeviceProfile] | None:
    """The stored profiles of all devices; None if one is missing. Measures nothing."""
    types = weight_types(weight_tensors(model.file, model.spec))
    experts = any(model.spec.mixture(layer) is not None for layer in range(len(model.spec.layers)))
    found = {}
    for device in _measurable(model):
        profile = None if device.remote else stored_profile(device, types, experts=experts)
        if profile is None:
            return None
        found[str(device.name)] = profile
    return found


def _measurable(model: ModelOnDevices) -> list[Device]:
    """The devices whose figures a plan needs: those of the layers, and a CPU for experts where they have none."""
    experts = model.options.experts
    cpu = [] if experts is None or any(device.host for device in model.devices) else [experts.device]
    return [*model.devices, *cpu]


def _offload(model: ModelOnDevices) -> Offload:
    experts = model.options.experts
    return "off" if experts is None else "auto" if experts.auto else len(experts.layers)


def placement_problem(model: ModelOnDevices, profiles: Mapping[str, DeviceProfile], goal: Goal) -> Problem:
    """The input of the search. Links between GPUs of this process that reach each other are measured now, in
    milliseconds."""
    file, spec, devices, options = model.file, model.spec, model.devices, model.options
    layers, first = range(len(spec.layers)), devices[0]
    types = weight_types(weight_tensors(file, spec))
    size = tensor_bytes(file, spec, layers, first, layers_only=True)
    hosts = sum(device.host for device in devices)
    figures = []
    for device in _measurable(model):
        # Devices of the host share its memory, and a claim on one is a claim on all.
        claims = (c for c in options.claims if (c.device.host if device.host else c.device.name == device.name))
        free = max(0, device.memory().free - sum(claim.bytes for claim in claims)) // (
            max(1, hosts) if device.host else 1
        )
        expand = tensor_bytes(file, spec, layers, device, layers_only=True) / size
        own = device_figures(device, profiles[str(device.name)], types, free=free, expand=expand)
        figures.append(replace(own, margin=device.margin))
    load = Load(options.slots, options.context, min(goal.prompt, options.context), goal.reply, chunk=options.chunk)
    work = model_work(file, spec, first, options)
    links = _peer_links(devices) if options.peer else {}
    return Problem(
        work,
        load,
        tuple(figures[: len(devices)]),
        links,
        goal.objective,
        _offload(model),
        reserve=RESERVE,
        pinned=goal.pinned,
        expert_cpus=tuple(figures[len(devices) :]),
    )


def _peer_links(devices: Sequence[Device]) -> dict[tuple[str, str], LinkFigures]:
    found = {}
    for before in devices:
        for behind in devices:
            link = None if before is behind or before.remote or behind.remote else peer_link(before, behind)
            if link is not None:
                found[str(before.name), str(behind.name)] = LinkFigures(link.latency, link.bandwidth)
    return found


def fastest_placement(model: ModelOnDevices, problem: Problem, profiles: Mapping[str, DeviceProfile]) -> Fastest | None:
    """The fastest placement that also fits by the plan with which layers are loaded (plan_shards); None if none
    does."""
    by_name = {str(device.name): device for device in model.devices}
    for _ in range(_SEARCHES):
        found = best_placement(problem)
        if found is None:
            return None
        fastest = Fastest(problem, found, profiles)
        used = [by_name[name] for name in fastest.devices]
        options = replace(model.options, layer_split=(), layers=fastest.layers)
        if options.experts is not None:
            experts = replace(options.experts, layers=frozenset(fastest.offloaded), auto=False)
            options = replace(options, experts=experts)
        shards = plan_shards(model.file, model.spec, used, options)
        if all(shard.fits for shard in shards):
            return fastest
        lacking = {shard.device: max(0, shard.needed - shard.free) for shard in shards}
        on_host = max(0, *(shard.offloaded_bytes - shard.offload_free for shard in shards))

        def less(own: DeviceFigures, lacking: Mapping[str, int] = lacking, on_host: int = on_host) -> DeviceFigures:
            missing = lacking.get(own.name, 0) + (on_host if own.host else 0)
            return replace(own, free=max(0, own.free - 2 * missing))

        devices, cpus = tuple(map(less, problem.devices)), tuple(map(less, problem.expert_cpus))
        problem = replace(problem, devices=devices, expert_cpus=cpus)
    return None


def predicted_placement(model: ModelOnDevices, problem: Problem) -> Prediction | None:
    """The prediction of the placement that the options say (plan_shards); None if it does not fit.

    Layers that leave their experts to the CPU count as the last ones of their shards.
    """
    shards = plan_shards(model.file, model.spec, model.devices, model.options)
    if not all(shard.fits for shard in shards):
        return None
    if problem.offload != "off":
        problem = replace(problem, offload="given")
    # Experts of a CPU's layers are on a CPU in any case.
    away = (0 if device.host else len(s.offloaded) for device, s in zip(model.devices, shards, strict=True))
    placed = [PlacedShard(s.device, s.layers, count) for s, count in zip(shards, away, strict=True)]
    return predict(problem, placed)


def known_plan(model: ModelOnDevices, goal: Goal) -> PredictedPlan | None:
    """The prediction of the placement that the options say; None where a device has no figures, or with KVFlash, whose
    steps are not predicted. Measures nothing."""
    profiles = None if model.options.kvflash is not None else known_profiles(model)
    if profiles is None:
        return None
    problem = placement_problem(model, profiles, goal)
    prediction = predicted_placement(model, problem)
    return None if prediction is None else PredictedPlan(problem, prediction, profiles)


def choose(model: ModelOnDevices, goal: Goal, seconds: float, on_figure: Callable[[str], None]) -> Fastest:
    """The fastest placement, after a measurement of `seconds` at most of devices without figures.

    Raises DeviceError where devices cannot be measured, and OutOfMemoryError where no placement fits.
    """
    profiles = measured(model, seconds=seconds, on_figure=on_figure)
    problem = placement_problem(model, profiles, goal)
    fastest = fastest_placement(model, problem, profiles)
    if fastest is None:
        raise OutOfMemoryError(nothing_fits(problem), param="max_ctx")
    return fastest


def nothing_fits(problem: Problem) -> str:
    """Why no placement fits: the bytes that one device lacks, where it lacks the least, and the longest context with
    which one would fit."""
    free = ", ".join(f"{device.free} on {device.name}" for device in problem.devices)
    text = f"no placement fits: {free} are free"
    most = 2 * sum(device.free for device in problem.devices) + _bytes(problem)
    lacking = []
    for device in problem.devices:

        def fits(mebibytes: int, device: DeviceFigures = device) -> bool:
            larger = replace(device, free=device.free + (mebibytes << 20))
            devices = tuple(larger if own is device else own for own in problem.devices)
            return best_placement(replace(problem, devices=devices)) is not None

        lacking.append((_least(fits, (most >> 20) + 1), device.name))
    size, name = min(lacking)
    text += f"; with {size} MiB more on {name} one would fit"
    if problem.offload == "off" and best_placement(replace(problem, offload="auto")) is not None:
        text += "; --experts-on auto would fit"
    load = problem.load
    pages = _least(lambda less: _fits_context(problem, load.context - less * PAGE), load.context // PAGE)
    context = load.context - pages * PAGE
    return text + (f"; --max-ctx {context} would fit" if context > 0 else "; not even one page of context would fit")


def _fits_context(problem: Problem, context: int) -> bool:
    load = replace(problem.load, context=context, prompt=max(1, min(problem.load.prompt, context)))
    return context > 0 and best_placement(replace(problem, load=load)) is not None


def _least(holds: Callable[[int], bool], most: int) -> int:
    """The least number up to `most` for which something holds that holds for all larger ones; `most` if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _bytes(problem: Problem) -> int:
    model, load = problem.model, problem.load
    layers = sum(layer.bytes + (0 if layer.experts is None else layer.experts.bytes) for layer in model.layers)
    state = sum(layer.kv * load.context + layer.slot for layer in model.layers) * load.sequences
    return layers + state + 2 * model.embedding + model.head.bytes
