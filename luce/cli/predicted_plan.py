"""The predicted speed of placements of a model, for `luce plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from luce.backend.fastest_placement import (
    Goal,
    fastest_placement,
    least_missing,
    nothing_fits,
    placement_problem,
    predicted_placement,
)
from luce.backend.layer_assignment import plan_layers
from luce.backend.measured_devices import MeasuredDevices, ModelOnDevices, measured
from luce.backend.prediction_facts import draft_facts, load_facts, prediction_facts, profile_facts
from luce.cli.what_if import StandIn, card_for, with_devices
from luce.errors import OutOfMemoryError, UsageError
from luce.planner.figures import DeviceFigures
from luce.planner.known_cards import CARDS
from luce.planner.layer_time import ExpertPlace, layer_time
from luce.planner.problem import Objective, Problem
from luce.planner.search import best_placement
from luce.planner.shard_tables import expert_place, passes

_GIB = 1 << 30
# Rates that change by a smaller share count as the same.
_NOTHING = 0.01
# Of more devices it takes too long to find out how many bytes are missing.
_FEW = 4
_SAME = "changes nothing"


@dataclass(frozen=True)
class Asked:
    """What `luce plan` is asked for."""

    goal: Goal
    #: seconds for devices that must be measured
    seconds: float = math.inf
    #: whether to measure devices that have a profile
    anew: bool = False
    #: whether to predict the placements of all goals
    compare: bool = False
    #: devices that are not there, as --what-if names them
    what_if: tuple[str, ...] = ()
    #: whether to plan with these devices alone
    alone: bool = False
    #: the layer whose terms are wanted
    layer: int | None = None


def predicted(
    model: ModelOnDevices, asked: Asked, on_figure: Callable[[str], None] = lambda figure: None
) -> dict[str, Any]:
    """The predictions for JSON. Times are in seconds, sizes in bytes.

    optimize   what is to be fast; load: sequences, context, prompt, reply; draft: see draft_facts
    placement  the placement by free memory, or by shares where they are given, None if it does not fit: see
               prediction_facts
    stages, links, value, decode_tok_s, prompt_tok_s, prompt_s, pieces, rows, slowest
               of the fastest placement of the devices, which may leave out some: see prediction_facts; near: it was
               searched coarsely
    left_out   the devices that it leaves out, with the share by which a placement with them is worse, None if none fits
    split      the value of --layer-split for it, None if a split by weights cannot say it
    without    decode_tok_s and prompt_tok_s of the fastest placement without each of its devices, None if nothing fits;
               lacks: bytes that one of the others lacks then, None where not known
    with       the same with one more device like each of them
    what_if    devices that are not there; data_sheets: those of them whose figures nobody has measured; alone: no
               others are planned with
    compare    with --compare, by goal the devices and layers of its placement, decode_tok_s and prompt_tok_s
    layer      with --explain-layer, by device and phase the seconds of each term
    profiles   by device: see profile_facts

    Raises DeviceError where a device cannot be measured, OutOfMemoryError if no placement fits, and UsageError for
    --kvflash, a layer that does not exist, and a device of --what-if that cannot be.
    """
    if model.options.kvflash is not None:
        raise UsageError("--kvflash: luce plan predicts contexts that the devices hold", param="kvflash")
    if asked.layer is not None and asked.layer >= len(model.spec.layers):
        last = len(model.spec.layers) - 1
        raise UsageError(f"--explain-layer {asked.layer}: the last layer is {last}", param="explain_layer")
    known, own, problem = _problems(model, asked, on_figure)
    if asked.what_if:
        found = best_placement(problem)
    else:
        fastest = fastest_placement(model, problem, known)
        found = None if fastest is None else fastest.found
    if found is None:
        raise OutOfMemoryError(nothing_fits(problem), param="max_ctx")
    current = None if asked.alone else predicted_placement(model, own)
    used = [shard.device for shard in found.placement]
    split = tuple(len(shard.layers) for shard in found.placement)
    says_it = plan_layers(model.spec, len(split), split) == tuple(shard.layers for shard in found.placement)
    return {
        "format": 3,
        "optimize": problem.objective,
        "load": load_facts(problem),
        "draft": draft_facts(problem),
        "placement": None if current is None else prediction_facts(current),
        **prediction_facts(found.prediction),
        "near": found.near,
        "left_out": [
            {"device": device.name, "worse_by": _worse_by(problem, device.name, found.prediction.value)}
            for device in problem.devices
            if device.name not in used
        ],
        "split": ",".join(map(str, split)) if says_it and not asked.what_if else None,
        "without": [_without(problem, name) for name in used],
        "with": [_with(problem, name) for name in used],
        "what_if": list(asked.what_if),
        "data_sheets": [text for text in asked.what_if if text.partition("@")[0] in CARDS],
        "alone": asked.alone,
        **({"compare": _compare(model, own, problem)} if asked.compare else {}),
        **({} if asked.layer is None else {"layer": _layer(problem, asked.layer)}),
        "profiles": profile_facts(known),
    }


def _problems(
    model: ModelOnDevices, asked: Asked, on_figure: Callable[[str], None]
) -> tuple[MeasuredDevices, Problem, Problem]:
    """Figures of the devices, the problem with these, and the one with those of --what-if too, or with those alone."""
    if asked.alone and not asked.what_if:
        raise UsageError("--what-if-only: requires --what-if", param="what_if_only")
    known = MeasuredDevices({})
    if asked.alone:
        model = replace(model, devices=(StandIn(),))
    else:
        known = measured(model, anew=asked.anew, seconds=asked.seconds, on_figure=on_figure)
    own = placement_problem(model, known, asked.goal)
    return known, own, with_devices(own, asked.what_if, card_for(model, own))


def _rates(problem: Problem, name: str) -> dict[str, Any]:
    found = best_placement(problem) if problem.devices else None
    rates = (None, None) if found is None else (found.prediction.decode_rate, found.prediction.prompt_rate)
    return {"device": name, "decode_tok_s": rates[0], "prompt_tok_s": rates[1]}


def _without(problem: Problem, name: str) -> dict[str, Any]:
    others = replace(problem, devices=tuple(d for d in problem.devices if d.name != name))
    rates = _rates(others, name)
    known = rates["decode_tok_s"] is None and 0 < len(others.devices) <= _FEW
    return {**rates, "lacks": least_missing(others)[0] << 20 if known else None}


def _with(problem: Problem, name: str) -> dict[str, Any]:
    (device,) = (device for device in problem.devices if device.name == name)
    return _rates(replace(problem, devices=(*problem.devices, replace(device, name=f"another {name}"))), name)


def _worse_by(problem: Problem, name: str, value: float) -> float | None:
    """The share by which the best placement that uses a device is worse than the one that leaves it out."""
    found = best_placement(replace(problem, required=name))
    return None if found is None else found.prediction.value / value - 1


def _compare(model: ModelOnDevices, own: Problem, problem: Problem) -> dict[str, Any]:
    """By goal: devices, layers, and rates; `shares` where they are given."""
    lines: dict[str, Any] = {}
    memory = replace(model, options=replace(model.options, layer_split=()))
    for name, current in (("memory", memory), ("shares", model)):
        if name == "memory" or model.options.layer_split:
            prediction = predicted_placement(current, own)
            lines[name] = None if prediction is None else prediction_facts(prediction)
    for objective in get_args(Objective):
        found = best_placement(replace(problem, objective=objective))
        lines[objective] = None if found is None else prediction_facts(found.prediction)
    return lines


def _layer(problem: Problem, number: int) -> dict[str, Any]:
    """By device, the terms of a layer in a decoding step and in a piece of a prompt in one shard."""
    rows = problem.piece_rows(1, with_cpu=False)
    layer = problem.model.layers[number]
    places: dict[str, tuple[DeviceFigures, ExpertPlace | None]] = {
        device.name: (device, None) for device in problem.devices
    }
    for device in problem.devices if layer.experts is not None else ():
        if (away := expert_place(problem, device)) is not None:
            places[f"{device.name}, experts on {away.cpu.name}"] = device, away
    return {
        name: {work.phase: asdict(layer_time(device, layer, work, away)) for work in passes(problem, rows)}
        for name, (device, away) in places.items()
    }


def show(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the predictions as tables."""
    load, placement = facts["load"], facts["placement"]
    basis = ", ".join(map(_basis, facts["profiles"].items()))
    console.print(
        f"{load['sequences']} sequence{'s' if load['sequences'] > 1 else ''} of {load['context']:,} tokens; "
        f"prompt {load['prompt']:,}, reply {load['reply']:,}"
        + (f"; figures: {basis}" if basis else "")
        + "".join(f"; {_absent(text, facts)}" for text in facts["what_if"])
    )
    if facts["draft"] is not None:
        console.print(draft_text(facts["draft"]))
    if placement is None and not facts["alone"]:
        console.print("the placement by free memory does not fit")
    elif placement is not None:
        _show(console, "the placement by free memory", placement)
    near = ", nearly" if facts["near"] else ""
    if placement is not None and placement["stages"] == facts["stages"]:
        console.print(f"it is the fastest one for {facts['optimize']}{near}")
    else:
        _show(console, f"the fastest one for {facts['optimize']}{near}", facts)
        names = ",".join(stage["device"] for stage in facts["stages"])
        if facts["split"] is not None:
            split = f" --layer-split {facts['split']}" if len(facts["stages"]) > 1 else ""
            console.print(f"luce serve has it with --optimize {facts['optimize']}, or with --devices {names}{split}")
    if facts["left_out"]:
        console.print(f"left out: {', '.join(map(_left_out, facts['left_out']))}")
    changes = Table("device", "without it", "with one more like it")
    idle = []
    for less, more in zip(facts["without"], facts["with"], strict=True):
        both = _change(less, facts), _change(more, facts)
        if set(both) == {_SAME}:
            idle.append(less["device"])
        else:
            changes.add_row(less["device"], *both)
    if changes.rows:
        console.print(changes)
    if idle:
        console.print(f"without it, or with one more like it, nothing changes: {', '.join(idle)}")
    if "compare" in facts:
        _show_comparison(console, facts["compare"])
    if "layer" in facts:
        _show_layer(console, facts["layer"])


def draft_text(draft: Mapping[str, Any]) -> str:
    tokens = f"{draft['tokens_per_step']:.2f} tokens a step, as measured"
    if not draft["measured"]:
        tokens = "counted as 1 token a step until a server has measured it"
    where = ""
    if draft["device"] is not None:
        seconds = draft["decode_s"]
        time = "its time is not counted" if seconds is None else f"{seconds * 1e3:,.2f} ms a step"
        where = f" on {draft['device']}: {draft['bytes'] / _GIB:,.2f} GiB, {time}"
    return f"draft{where}; verifies {draft['rows']} rows, {tokens}"


def _absent(text: str, facts: Mapping[str, Any]) -> str:
    """A device of --what-if, and what its figures rest on."""
    return f"{text} is not there" + (", not measured" if text in facts["data_sheets"] else "")


def _left_out(device: Mapping[str, Any]) -> str:
    worse = device["worse_by"]
    if worse is None:
        return f"{device['device']} (does not fit)"
    # A device must bring more than figures vary by.
    text = f"would take {worse:.0%} longer" if worse >= 0 else f"would bring {-worse:.1%}, too little"
    return f"{device['device']} ({text})"


def _show_comparison(console: Console, lines: Mapping[str, Any]) -> None:
    shown = Table("goal", "placement", "decode", "prompts", title="goals", title_justify="left")
    for name, facts in lines.items():
        if facts is None:
            shown.add_row(name, "does not fit", "", "")
            continue
        stages = (f"{stage['device']} {stage['layers'][0]}..{stage['layers'][1]}" for stage in facts["stages"])
        rates = f"{facts['decode_tok_s']:,.1f} tok/s", f"{facts['prompt_tok_s']:,.0f} tok/s"
        shown.add_row(name, ", ".join(stages), *rates)
    console.print(shown)


def _show_layer(console: Console, devices: Mapping[str, Any]) -> None:
    terms = [name for name in next(iter(next(iter(devices.values())).values())) if name != "step"]
    shown = Table("device", "phase", *(name.replace("_", " ") for name in terms), title="the layer, in microseconds")
    shown.title_justify = "left"
    for device, phases in devices.items():
        for phase, seconds in phases.items():
            shown.add_row(device, phase, *(f"{seconds[name] * 1e6:,.1f}" for name in terms))
    console.print(shown)


def _basis(item: tuple[str, Mapping[str, Any]]) -> str:
    name, profile = item
    if name.startswith("sim:"):
        return f"{name} simulated"
    days = int(profile["age_s"] // 86400)
    age = "today" if not days else f"{days} day{'s' if days > 1 else ''} ago"
    ratios = {"decoding": profile["observed"], "prompts": profile["observed_prompts"]}
    told = [f"{ratio:.2f} for {phase}" for phase, ratio in ratios.items() if ratio is not None]
    observed = f", times {' and '.join(told)} as observed" if told else ""
    noisy = " (noisy)" if profile["noisy"] else ""
    fp16 = ", prompts predicted in fp16 as it has no figures of int8" if profile["without_int8"] else ""
    return f"{name} measured {age}{observed}{noisy}{fp16}{_way(profile['way'])}"


def _way(way: Mapping[str, Any] | None) -> str:
    if way is None:
        return ""
    slow = ", a slow link" if way["slow"] else ""
    return f" ({way['latency_s'] * 1e3:,.3g} ms, {way['bytes_per_second'] / 1e6:,.4g} MB/s to it{slow})"


def _show(console: Console, title: str, facts: Mapping[str, Any]) -> None:
    away = any(stage["offloaded"] for stage in facts["stages"])
    columns = "device", "layers", *(["experts on CPU"] if away else []), "weights", "context", "free"
    shown = Table(*columns, "decode", "limited by", "piece", "limited by")
    shown.title, shown.title_justify = title, "left"
    for stage in facts["stages"]:
        first, last = stage["layers"]
        times = f"{stage['decode_s'] * 1e3:,.2f} ms", f"{stage['piece_s'] * 1e3:,.1f} ms"
        # Activations are the rest of a shard's bytes, and little.
        memory = [f"{stage[name] / _GIB:,.2f} GiB" for name in ("weights", "state", "free")]
        experts = [f"of {stage['offloaded']} layers" if stage["offloaded"] else ""] if away else []
        limits = times[0], stage["limit"], times[1], stage["piece_limit"]
        shown.add_row(stage["device"], f"{first}..{last}", *experts, *memory, *limits)
    console.print(shown)
    for link in facts["links"]:
        console.print(
            f"{link['from']} > {link['to']}: {link['bytes_per_token']:,} B a token, {link['decode_s'] * 1e6:,.0f} us, "
            f"{link['piece_s'] * 1e3:,.2f} ms a piece"
        )
    waits = f", which wait for {facts['slowest']}" if facts["pieces"] > 1 else ""
    console.print(
        f"decode {facts['decode_tok_s']:,.1f} tok/s, prompts {facts['prompt_tok_s']:,.0f} tok/s "
        f"({facts['pieces']} of {facts['rows']:,} rows{waits}), first token after {facts['prompt_s']:,.2f} s"
    )


def _change(rates: Mapping[str, Any], fastest: Mapping[str, Any]) -> str:
    if rates["decode_tok_s"] is None:
        lacks = rates.get("lacks")
        if not lacks:
            return "does not fit"
        return "does not fit by " + (f"{lacks / _GIB:,.2f} GiB" if lacks >= _GIB else f"{lacks >> 20} MiB")
    decode, prompt = (rates[name] / fastest[name] - 1 for name in ("decode_tok_s", "prompt_tok_s"))
    if max(abs(decode), abs(prompt)) < _NOTHING:
        return _SAME
    return f"decode {decode:+.0%}, prompts {prompt:+.0%}"
