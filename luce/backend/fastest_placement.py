"""The fastest placement of a model's layers on its devices, by figures that are measured or known.

The search (luce.planner) is pure. Here it gets a file's layers and the devices' figures, and what it finds is held
against the memory plan with which layers are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from luce.backend.device_figures import device_figures, machine, nearest_types
from luce.backend.measured_devices import MeasuredDevices, ModelOnDevices, known_figures, measured
from luce.backend.model_work import model_work, state_expand
from luce.backend.placement import RESERVE, free_bytes, plan_shards
from luce.backend.prediction_facts import PredictedPlan
from luce.config.settings import Config
from luce.errors import OutOfMemoryError
from luce.layers.tensors import tensor_bytes
from luce.planner.draft_time import draft_time
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import PlacedShard, Prediction, predict
from luce.planner.problem import Drafting, Load, Objective, Offload, Problem
from luce.planner.search import Found, best_placement
from luce.remote.device import MEMBER
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
            # Those of a cluster's members come behind those that are named.
            own = tuple(device for device in config.target_devices if not device.startswith(MEMBER))
            objective = "balanced" if own == ("auto",) else "memory"
        if objective == "memory":
            return None
        return cls(cast(Objective, objective), config.optimize_prompt, config.optimize_reply, config.pin_devices)

    @classmethod
    def default(cls, config: Config) -> Goal:
        """What a placement by other rules is predicted for."""
        return cls("balanced", config.optimize_prompt, config.optimize_reply)


@dataclass(frozen=True)
class Fastest:
    """The fastest placement that fits."""

    problem: Problem
    found: Found
    known: MeasuredDevices

    @property
    def plan(self) -> PredictedPlan:
        """Its prediction."""
        return PredictedPlan(self.problem, self.found.prediction, self.known, self.found.near)

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


def _offload(model: ModelOnDevices) -> Offload:
    experts = model.options.experts
    return "off" if experts is None else "auto" if experts.auto else len(experts.layers)


def placement_problem(model: ModelOnDevices, known: MeasuredDevices, goal: Goal) -> Problem:
    """The input of the search, with the devices that have figures."""
    file, spec, devices, options = model.file, model.spec, model.devices, model.options
    layers, first = range(len(spec.layers)), devices[0]
    size = tensor_bytes(file, spec, layers, first, layers_only=True)
    figures = []
    for device in (*devices, *model.expert_cpus):
        name = str(device.name)
        if name not in known.profiles:
            continue
        # Devices that share a machine's memory get equal parts of it, and a claim on one is a claim on all.
        sharing = max(1, sum(_share(device, other) for other in devices))
        claims = sum(claim.bytes for claim in options.claims if _share(device, claim.device))
        free = max(0, free_bytes(device, options.weights) - claims) // sharing
        expand = tensor_bytes(file, spec, layers, device, layers_only=True) / size
        own = device_figures(
            device,
            known.profiles[name],
            model.types,
            free=free,
            expand=expand,
            way=known.ways.get(name),
            int8=known.int8,
        )
        kv = state_expand(spec, device, first, options)
        figures.append(replace(own, margin=device.margin, state_expand=kv))
    load = Load(options.slots, options.context, min(goal.prompt, options.context), goal.reply, chunk=options.chunk)
    if model.draft is not None:
        load = replace(load, rows=model.draft.rows)
    work = model_work(file, spec, first, options)
    links = {pair: LinkFigures(link.latency, link.bandwidth) for pair, link in known.links.items()}
    names = {str(device.name) for device in devices}
    return Problem(
        work,
        load,
        tuple(own for own in figures if own.name in names),
        links,
        goal.objective,
        _offload(model),
        reserve=RESERVE,
        pinned=goal.pinned,
        expert_cpus=tuple(own for own in figures if own.name not in names),
        drafting=_drafting(model, known, load.prompt),
    )


def _drafting(model: ModelOnDevices, known: MeasuredDevices, depth: int) -> Drafting | None:
    """How tokens are drafted at a position; None if they are not."""
    draft = model.draft
    if draft is None:
        return None
    made = Drafting(measured=draft.tokens is not None, tokens=draft.tokens or 1.0)
    if draft.on is None:
        return made
    name, seconds = str(draft.on.device.name), None
    if (profile := known.profiles.get(name)) is not None:
        types = nearest_types(draft.on.tensors, model.types)
        figures = device_figures(draft.on.device, profile, types, free=0, expand=1.0)
        seconds = draft_time(figures, draft.on.work, depth).total
    return replace(made, device=name, bytes=draft.on.bytes, seconds=seconds)


def _share(one: Device, other: Device) -> bool:
    """Whether two devices have the same memory."""
    return one.name == other.name or (one.host and other.host and machine(one) == machine(other))


def fastest_placement(model: ModelOnDevices, problem: Problem, known: MeasuredDevices) -> Fastest | None:
    """The fastest placement that also fits by the plan with which layers are loaded (plan_shards); None if none
    does."""
    by_name = {str(device.name): device for device in model.devices}
    for _ in range(_SEARCHES):
        found = best_placement(problem)
        if found is None:
            return None
        fastest = Fastest(problem, found, known)
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
            return replace(own, uncounted=own.uncounted + 2 * missing)

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
    if model.options.kvflash is not None:
        return None
    # Without figures of a drafter's own device, its time is not counted.
    known = known_figures(model) or known_figures(replace(model, draft=None))
    if known is None:
        return None
    problem = placement_problem(model, known, goal)
    prediction = predicted_placement(model, problem)
    return None if prediction is None else PredictedPlan(problem, prediction, known)


def choose(model: ModelOnDevices, goal: Goal, seconds: float, on_figure: Callable[[str], None]) -> Fastest:
    """The fastest placement, after a measurement of `seconds` at most of devices without figures.

    Raises DeviceError where devices cannot be measured, and OutOfMemoryError where no placement fits.
    """
    known = measured(model, seconds=seconds, on_figure=on_figure)
    problem = placement_problem(model, known, goal)
    fastest = fastest_placement(model, problem, known)
    if fastest is None:
        raise OutOfMemoryError(nothing_fits(problem), param="max_ctx")
    return fastest


def nothing_fits(problem: Problem) -> str:
    """Why no placement fits: the bytes that one device lacks, where it lacks the least, and the longest context with
    which one would fit."""
    free = ", ".join(f"{device.free} on {device.name}" for device in problem.devices)
    text = f"no placement fits: {free} are free"
    size, name = least_missing(problem)
    text += f"; with {size} MiB more on {name} one would fit"
    if problem.offload == "off" and best_placement(replace(problem, offload="auto")) is not None:
        text += "; --experts-on auto would fit"
    load = problem.load
    pages = _least(lambda less: _fits_context(problem, load.context - less * PAGE), load.context // PAGE)
    context = load.context - pages * PAGE
    return text + (f"; --max-ctx {context} would fit" if context > 0 else "; not even one page of context would fit")


def least_missing(problem: Problem) -> tuple[int, str]:
    """The fewest mebibytes that one of the devices lacks for a placement, and which one."""
    # Which placements fit does not depend on the goal, and decoding is searched the fastest.
    problem = replace(problem, objective="decode")
    most = 2 * sum(device.free for device in problem.devices) + _bytes(problem)
    lacking = []
    for device in problem.devices:

        def fits(mebibytes: int, device: DeviceFigures = device) -> bool:
            larger = replace(device, free=device.free + (mebibytes << 20))
            devices = tuple(larger if own is device else own for own in problem.devices)
            return best_placement(replace(problem, devices=devices)) is not None

        lacking.append((_least(fits, (most >> 20) + 1), device.name))
    return min(lacking)


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
