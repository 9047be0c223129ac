"""The predicted speed of placements of a model, for `luce plan`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from luce.backend.device_figures import device_figures, weight_types
from luce.backend.layer_assignment import plan_layers
from luce.backend.model_work import model_work, weight_tensors
from luce.backend.placement import plan_shards
from luce.backend.serving_options import ServingOptions
from luce.errors import DeviceError, OutOfMemoryError, UsageError
from luce.gguf.reader import GGUFFile
from luce.layers.tensors import tensor_bytes
from luce.models.spec import ModelSpec
from luce.planner.prediction import PlacedShard, Prediction, limit, predict
from luce.planner.problem import Load, Objective, Problem
from luce.planner.search import best_placement
from luce.profiles.profile import DeviceProfile
from luce.profiles.profile_cache import profile_of
from luce.runtime.device import Device

_GIB = 1 << 30


@dataclass(frozen=True)
class Asked:
    """What `luce plan` is asked for."""

    objective: Objective
    #: tokens of a prompt and of a reply
    prompt: int
    reply: int
    #: whether to measure devices that have a profile
    anew: bool


def predicted(
    file: GGUFFile, spec: ModelSpec, devices: Sequence[Device], options: ServingOptions, asked: Asked
) -> dict[str, Any]:
    """The predictions for JSON. Times are in seconds, sizes in bytes.

    optimize   what is to be fast; load: sequences, context, prompt, reply
    placement  the placement of `luce serve`, None if it does not fit: stages with device, layers (first, last), bytes,
               decode_s of a decoding step, piece_s of a piece of a prompt, and what limits each (limit, piece_limit);
               links between them with bytes per token, decode_s and piece_s; decode_tok_s, prompt_tok_s, and the pieces
               of a prompt with their rows
    fastest    the fastest placement of the devices, which may leave out some; near: it was searched coarsely
    left_out   the devices that it leaves out
    split      the value of --layer-split for it, None if a split by weights cannot say it
    without    decode_tok_s and prompt_tok_s of the fastest placement without each of its devices, None if nothing fits
    with       the same with one more device like each of them
    profiles   by device: seconds since the measurement, types of weights whose figures are noisy

    Raises DeviceError for a daemon's device, OutOfMemoryError if no placement fits, and UsageError for --kvflash and
    for a prompt that is longer than the context.
    """
    problem, profiles = _problem(file, spec, devices, options, asked)
    found = best_placement(problem)
    if found is None:
        free = ", ".join(f"{device.free} on {device.name}" for device in problem.devices)
        raise OutOfMemoryError(
            f"no placement fits: the weights take {_bytes(problem)} bytes beside the context, and {free} are free",
            param="max_ctx",
        )
    planned = plan_shards(file, spec, devices, options)
    current = predict(problem, [PlacedShard(shard.device, shard.layers) for shard in planned])
    used = [shard.device for shard in found.placement]
    split = tuple(len(shard.layers) for shard in found.placement)
    says_it = plan_layers(spec, len(split), split) == tuple(shard.layers for shard in found.placement)
    load = problem.load
    return {
        "format": 1,
        "optimize": problem.objective,
        "load": {name: getattr(load, name) for name in ("sequences", "context", "prompt", "reply")},
        "placement": None if current is None else _facts(current),
        "fastest": {**_facts(found.prediction), "near": found.near},
        "left_out": [device.name for device in problem.devices if device.name not in used],
        "split": ",".join(map(str, split)) if says_it else None,
        "without": [_without(problem, name) for name in used],
        "with": [_with(problem, name) for name in used],
        "profiles": {name: _age(profile) for name, profile in profiles.items()},
    }


def _problem(
    file: GGUFFile, spec: ModelSpec, devices: Sequence[Device], options: ServingOptions, asked: Asked
) -> tuple[Problem, dict[str, DeviceProfile]]:
    if options.kvflash is not None:
        raise UsageError("--kvflash: luce plan predicts contexts that the devices hold", param="kvflash")
    if asked.prompt > options.context:
        raise UsageError(f"--prompt {asked.prompt}: --max-ctx is {options.context}", param="prompt")
    layers, first = range(len(spec.layers)), devices[0]
    types = weight_types(weight_tensors(file, spec))
    size = tensor_bytes(file, spec, layers, first, layers_only=True)
    hosts = sum(device.host for device in devices)
    figures, profiles = [], {}
    for device in devices:
        if device.remote:
            raise DeviceError(f"{device.name}: a daemon's device, which luce plan does not measure")
        profile = profile_of(device, types, anew=asked.anew)
        # Devices of the host share its memory, and a claim on one is a claim on all.
        claims = (c for c in options.claims if (c.device.host if device.host else c.device.name == device.name))
        free = max(0, device.memory().free - sum(claim.bytes for claim in claims)) // (hosts if device.host else 1)
        expand = tensor_bytes(file, spec, layers, device, layers_only=True) / size
        figures.append(device_figures(device, profile, types, free=free, expand=expand))
        profiles[str(device.name)] = profile
    load = Load(options.slots, options.context, asked.prompt, asked.reply, chunk=options.chunk)
    work = model_work(file, spec, first, options)
    return Problem(work, load, tuple(figures), {}, asked.objective), profiles


def _bytes(problem: Problem) -> int:
    model = problem.model
    layers = sum(layer.bytes + (0 if layer.experts is None else layer.experts.bytes) for layer in model.layers)
    return layers + model.embedding + model.head.bytes


def _facts(prediction: Prediction) -> dict[str, Any]:
    stages = [
        {
            "device": stage.shard.device,
            "layers": [stage.shard.layers.start, stage.shard.layers.stop - 1],
            "bytes": stage.bytes,
            "decode_s": stage.decode.total,
            "limit": limit(stage.decode),
            "piece_s": stage.piece.total,
            "piece_limit": limit(stage.piece),
        }
        for stage in prediction.shards
    ]
    links = [
        {
            "from": link.before,
            "to": link.behind,
            "bytes_per_token": link.row_bytes,
            "decode_s": link.decode,
            "piece_s": link.piece,
        }
        for link in prediction.links
    ]
    rates = {"decode_tok_s": prediction.decode_rate, "prompt_tok_s": prediction.prompt_rate}
    return {"stages": stages, "links": links, **rates, "pieces": prediction.pieces, "rows": prediction.rows}


def _rates(problem: Problem, name: str) -> dict[str, Any]:
    found = best_placement(problem) if problem.devices else None
    rates = (None, None) if found is None else (found.prediction.decode_rate, found.prediction.prompt_rate)
    return {"device": name, "decode_tok_s": rates[0], "prompt_tok_s": rates[1]}


def _without(problem: Problem, name: str) -> dict[str, Any]:
    return _rates(replace(problem, devices=tuple(d for d in problem.devices if d.name != name)), name)


def _with(problem: Problem, name: str) -> dict[str, Any]:
    (device,) = (device for device in problem.devices if device.name == name)
    return _rates(replace(problem, devices=(*problem.devices, replace(device, name=f"another {name}"))), name)


def _age(profile: DeviceProfile) -> dict[str, Any]:
    noisy = [name for name, figures in profile.formats.items() if figures.noisy]
    return {"age_s": max(0.0, time.time() - profile.measured), "noisy": noisy}


def show(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the predictions as tables."""
    load, fastest, placement = facts["load"], facts["fastest"], facts["placement"]
    basis = ", ".join(map(_basis, facts["profiles"].items()))
    console.print(
        f"{load['sequences']} sequence{'s' if load['sequences'] > 1 else ''} of {load['context']:,} tokens; "
        f"prompt {load['prompt']:,}, reply {load['reply']:,}; figures: {basis}"
    )
    if placement is None:
        console.print("the placement of luce serve does not fit")
    else:
        _show(console, "the placement of luce serve", placement)
    near = ", nearly" if fastest["near"] else ""
    if placement is not None and placement["stages"] == fastest["stages"]:
        console.print(f"it is the fastest one for {facts['optimize']}{near}")
    else:
        _show(console, f"the fastest one for {facts['optimize']}{near}", fastest)
        names = ",".join(stage["device"] for stage in fastest["stages"])
        if facts["split"] is not None:
            split = f" --layer-split {facts['split']}" if len(fastest["stages"]) > 1 else ""
            console.print(f"luce serve has it with --devices {names}{split}", soft_wrap=True)
    if facts["left_out"]:
        console.print(f"left out: {', '.join(facts['left_out'])}")
    changes = Table("device", "without it", "with one more like it")
    for less, more in zip(facts["without"], facts["with"], strict=True):
        changes.add_row(less["device"], _change(less, fastest), _change(more, fastest))
    console.print(changes)


def _basis(item: tuple[str, Mapping[str, Any]]) -> str:
    name, profile = item
    days = int(profile["age_s"] // 86400)
    age = "today" if not days else f"{days} day{'s' if days > 1 else ''} ago"
    return f"{name} measured {age}" + (" (noisy)" if profile["noisy"] else "")


def _show(console: Console, title: str, facts: Mapping[str, Any]) -> None:
    shown = Table("device", "layers", "memory", "decode", "limited by", "piece", "limited by")
    shown.title, shown.title_justify = title, "left"
    for stage in facts["stages"]:
        first, last = stage["layers"]
        times = f"{stage['decode_s'] * 1e3:,.2f} ms", f"{stage['piece_s'] * 1e3:,.1f} ms"
        memory = f"{stage['bytes'] / _GIB:,.2f} GiB"
        shown.add_row(
            stage["device"], f"{first}..{last}", memory, times[0], stage["limit"], times[1], stage["piece_limit"]
        )
    console.print(shown)
    for link in facts["links"]:
        console.print(
            f"{link['from']} > {link['to']}: {link['bytes_per_token']:,} B a token, {link['decode_s'] * 1e6:,.0f} us, "
            f"{link['piece_s'] * 1e3:,.2f} ms a piece"
        )
    console.print(
        f"decode {facts['decode_tok_s']:,.1f} tok/s, prompts {facts['prompt_tok_s']:,.0f} tok/s "
        f"({facts['pieces']} of {facts['rows']:,} rows)"
    )


def _change(rates: Mapping[str, Any], fastest: Mapping[str, Any]) -> str:
    if rates["decode_tok_s"] is None:
        return "does not fit"
    decode, prompt = (rates[name] / fastest[name] - 1 for name in ("decode_tok_s", "prompt_tok_s"))
    return f"decode {decode:+.0%}, prompts {prompt:+.0%}"
