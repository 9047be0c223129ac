"""`luce plan MODEL`: the predicted speed of placements; and the placement of a model's layers before the load, for
`--dry-run` and `luce inspect`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from rich.table import Table

from luce.assembly import place, serving_options
from luce.backend.fastest_placement import Goal
from luce.backend.measured_devices import ModelOnDevices
from luce.backend.placement import default_context, fits_beside, plan_model
from luce.backend.serving_options import ServingOptions
from luce.cli import progress
from luce.cli.arguments import add_json, add_model, add_settings, settings
from luce.cli.console import folded, output
from luce.cli.predicted_plan import Asked, predicted, show
from luce.cli.pull import fetch
from luce.compress.open import ScorerPlan, plan_scorer
from luce.config import values
from luce.config.settings import Config
from luce.draft.observed_drafts import draft_load
from luce.draft.open import DraftPlan, plan_drafter
from luce.errors import ModelError, UsageError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.weight_pool import WeightPool
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.shapes import check_matrices
from luce.models.spec import ModelSpec
from luce.planner.known_cards import CARDS
from luce.remote.open import open_placement
from luce.runtime.cores import limit_threads
from luce.runtime.device import Device
from luce.runtime.step import PAGE
from luce.shard.sizes import state_bytes

_MIB = 1 << 20
#: groups of settings that `luce plan` takes
SETTINGS = ("placement", "planning", "peer copies", "daemons", "engine", "drafting")


@dataclass(frozen=True)
class Opened:
    """A model file and the devices that the settings name, without a load."""

    config: Config
    file: GGUFFile
    spec: ModelSpec
    devices: list[Device]
    #: None without a drafter that has weights
    draft: DraftPlan | None
    #: the small model that reads prompts first; None without one
    scorer: ScorerPlan | None = None
    #: the layers of each device, as the planner has chosen them; empty: by shares or by free memory
    layers: tuple[range, ...] = ()

    @property
    def on_devices(self) -> ModelOnDevices:
        """The model as predictions take it."""
        draft = draft_load(self.config, self.file, self.spec, self.draft)
        return ModelOnDevices(self.file, self.spec, self.devices, self.options, draft)

    @cached_property
    def options(self) -> ServingOptions:
        """The options of the settings, with the memory and the features that the drafter needs."""
        claims, captured = ((), ()) if self.draft is None else (self.draft.claims(), self.draft.spec.layers)
        claims = claims if self.scorer is None else (*claims, *self.scorer.claims)
        options = serving_options(self.config, self.spec, self.devices, claims)
        return replace(options, captured=captured, layers=self.layers)


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, *, planned: bool = False) -> Iterator[Opened]:
    """Open the file and the devices of a command line; they are closed at the end of the block. `planned`: only the
    devices that hold layers, in the order of the layers (luce.assembly.place)."""
    config = settings(arguments)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_gguf(fetch(arguments.model, config)))
        source = Source(str(file.paths[0]), file.metadata, file.tensors)
        spec = read_spec(source).for_context(config.max_ctx)
        check_matrices(source, spec)
        layers: tuple[range, ...] = ()
        if planned:
            placed = place(stack, config, file, spec)
            devices, config, layers = placed.devices, placed.config, placed.layers
        else:
            devices = open_placement(config)
            for device in devices:
                stack.callback(device.close)
        context = default_context(spec, config.max_ctx)
        weights = WeightPool()
        draft = plan_drafter(stack, config, file, spec, devices, context=context, weights=weights)
        scorer = None
        if config.prefill_drafter:
            chosen = config.prefill_drafter_device
            scorer = plan_scorer(stack, config, config.prefill_drafter, devices, chosen, weights=weights)
            alone = Opened(config, file, spec, devices, draft, layers=layers).options
            scorer = scorer.beside(config, partial(fits_beside, file, spec, devices, alone))
        yield Opened(config, file, spec, devices, draft, scorer, layers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, what to predict, --json and the flags of the settings."""
    add_model(parser)
    parser.add_argument("--measure", action="store_true", help="measure the devices again")
    parser.add_argument("--compare", action="store_true", help="predict the placements of all goals")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="DEVICE@FREE[,LATENCY,BANDWIDTH]",
        help="plan with one more device like DEVICE, with so much free memory, such as cuda:0@24GiB, or a card that is "
        f"not here ({', '.join(CARDS)}); on another machine with seconds and bytes per second of its link (repeatable)",
    )
    parser.add_argument("--what-if-only", action="store_true", help="plan with the devices of --what-if alone")
    parser.add_argument("--explain-layer", metavar="N", help="show what layer N takes on each device")
    add_json(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Print predictions, or the plan for --dry-run; load nothing. The exit status of --dry-run is 0 if every device
    holds its part, else that of a ModelError."""
    if arguments.verb != "plan":
        return _dry_run(arguments)
    config = settings(arguments)
    goal = Goal.of(config) or Goal.default(config)
    more = {
        "compare": arguments.compare,
        "what_if": tuple(arguments.what_if),
        "alone": arguments.what_if_only,
        "layer": _layer(arguments.explain_layer),
    }
    limit_threads(config.threads)
    with opened(arguments) as model, progress.shown("looking for figures of the devices", lines=True) as wait:
        facts = predicted(
            model.on_devices,
            Asked(goal, config.measure_budget, arguments.measure, **more),
            wait.step,
        )
    if arguments.json:
        print(json.dumps(facts))
    else:
        show(output(), facts)
    return 0


def _layer(text: str | None) -> int | None:
    try:
        return None if text is None else int(values.integer(0)(text))
    except ValueError as error:
        raise UsageError(f"--explain-layer {text}: {error}", param="explain_layer") from None


def _dry_run(arguments: argparse.Namespace) -> int:
    if getattr(arguments, "server", None) is not None:
        raise UsageError("--dry-run: not with --server, which has its own settings", param="dry_run")
    if arguments.model is None:
        raise UsageError("MODEL: missing", param="model")
    with opened(arguments, planned=True) as model:
        facts = plan(model)
    if getattr(arguments, "json", False):
        print(json.dumps(facts))
    else:
        output().print(table(facts))
    for shard in facts["plan"]:
        if not shard["fits"]:
            first, last = shard["layers"]
            needed, free = shard["weights"] + shard["state"] + shard["buffers"], shard["free"]
            what = f"layers {first}..{last} need"
            if needed <= free:
                needed, free = shard["experts_on_cpu_bytes"], shard["experts_on_cpu_free"]
                what = f"the experts of {len(shard['experts_on_cpu'])} layers on the CPU need"
            print(f"luce: {shard['device']}: {what} {needed} bytes, {free} are free", file=sys.stderr)
    if not facts.get("draft", {"fits": True})["fits"]:
        draft = facts["draft"]
        needed = sum(draft[name] for name in ("weights", "state", "features", "head"))
        print(f"luce: {draft['device']}: the draft needs {needed} bytes, {draft['free']} are free", file=sys.stderr)
    scorer = facts.get("prefill_drafter", {"fits": True})
    if not scorer["fits"]:
        needed, free = scorer["bytes"], scorer["free"]
        print(f"luce: {scorer['device']}: --prefill-drafter needs {needed} bytes, {free} are free", file=sys.stderr)
    return 0 if facts["fits"] else ModelError.exit_code


def plan(model: Opened) -> dict[str, Any]:
    """The placement for JSON; sizes are in bytes.

    served   context: positions of one sequence; parallel: sequences
    kvflash  with --kvflash: max_resident_tokens of a sequence, None for all; reason
    plan     per shard: device; layers (first, last); weights, with the embedding and the head; state of all sequences;
             buffers for activations; pinned_at_most, the host memory of copies between devices; unpacked_at_most, the
             second, unpacked form of weights; free; experts_on_cpu, the layers whose routed experts lie there, with
             their bytes and the free ones (experts_on_cpu_bytes, experts_on_cpu_free); fits; kv_per_token and
             state_per_sequence, with mirrors of other shards' keys and values; activation_bytes_per_token to the next
             shard
    draft    with a --draft that has weights: device, kind, file; weights; state; features of the target; head, a
             daemon's copy of the embedding and the head; free; fits. The free memory of a shard on the same device does
             not contain this memory.
    prefill_drafter  with --prefill-drafter: device, file; bytes, also of the longest text that it reads; free; fits, as
             of the draft
    fits     whether every device holds its part
    """
    spec, options = model.spec, model.options
    planned = plan_model(model.file, spec, model.devices, options)
    kvflash, shards = planned.kvflash, planned.shards
    tokens = None if kvflash.max_resident_pages is None else kvflash.max_resident_pages * PAGE
    entries = []
    for shard, device in zip(shards, model.devices, strict=True):
        unit = state_bytes(device, spec, shard.layers, options)
        entries.append(
            {
                "device": shard.device,
                "layers": [shard.layers.start, shard.layers.stop - 1],
                "weights": shard.weights,
                "state": shard.state,
                "buffers": shard.buffers,
                "pinned_at_most": shard.pinned,
                "unpacked_at_most": shard.unpack_bytes if options.unpack else 0,
                "free": shard.free,
                "experts_on_cpu": list(shard.offloaded),
                "experts_on_cpu_bytes": shard.offloaded_bytes,
                "experts_on_cpu_free": shard.offload_free,
                "fits": shard.fits,
                "kv_per_token": sum(unit.page) // PAGE,
                "state_per_sequence": unit.slot,
                "activation_bytes_per_token": shard.activation,
            }
        )
    own = {shard.device for shard in shards}
    beside = {} if model.draft is None else {"draft": _draft(model.draft, own)}
    if model.scorer is not None:
        fits = str(model.scorer.device.name) in own or model.scorer.bytes <= model.scorer.free
        beside["prefill_drafter"] = {**model.scorer.facts, "free": model.scorer.free, "fits": fits}
    return {
        "served": {"context": options.context, "parallel": options.slots},
        **({"kvflash": {"max_resident_tokens": tokens, "reason": kvflash.reason}} if kvflash.reason else {}),
        "plan": entries,
        **beside,
        "fits": all(part["fits"] for part in (*entries, *beside.values())),
    }


def _draft(draft: DraftPlan, shared: Collection[str]) -> dict[str, Any]:
    """The entry of the drafter. It fits on a device with layers: the plan of these layers leaves memory for it."""
    name, taken = str(draft.device.name), sum(draft.sizes.values())
    fits = name in shared or taken <= draft.free
    return {"device": name, **draft.spec.facts, **draft.sizes, "free": draft.free, "fits": fits}


def table(facts: dict[str, Any]) -> Table:
    """The plan as a table."""
    served = facts["served"]
    sequences = f"{served['parallel']} sequence" + ("s" if served["parallel"] > 1 else "")
    title = f"plan: {sequences} of {served['context']:,} tokens"
    if "kvflash" in facts:
        title += f"; KVFlash: {facts['kvflash']['reason']}"
    columns = "device", "layers", "weights", "context", "buffers", "free", "fits", "activations"
    away = any(shard["experts_on_cpu"] for shard in facts["plan"])
    shown = Table(*columns, *(["experts on CPU"] if away else []), title=title, title_justify="left")
    for shard in facts["plan"]:
        first, last = shard["layers"]
        sizes = (f"{shard[name] / _MIB:,.1f} MiB" for name in ("weights", "state", "buffers", "free"))
        traffic = shard["activation_bytes_per_token"]
        traffic = f"{traffic:,} B/token" if traffic else ""
        experts = [_experts(shard)] if away else []
        shown.add_row(shard["device"], f"{first}..{last}", *sizes, "yes" if shard["fits"] else "NO", traffic, *experts)
    if "draft" in facts:
        draft = facts["draft"]
        own = draft["weights"] + draft["head"], draft["state"] + draft["features"], 0, draft["free"]
        sizes = (f"{size / _MIB:,.1f} MiB" for size in own)
        shown.add_row(draft["device"], "draft", *sizes, "yes" if draft["fits"] else "NO", "")
    if "prefill_drafter" in facts:
        scorer = facts["prefill_drafter"]
        sizes = (f"{size / _MIB:,.1f} MiB" for size in (scorer["bytes"], 0, 0, scorer["free"]))
        shown.add_row(scorer["device"], "compression", *sizes, "yes" if scorer["fits"] else "NO", "")
    return folded(shown)


def _experts(shard: dict[str, Any]) -> str:
    """The layers of a shard whose experts lie on the CPU, and their size there."""
    layers = shard["experts_on_cpu"]
    return f"{ranges(layers)}: {shard['experts_on_cpu_bytes'] / _MIB:,.1f} MiB" if layers else ""


def ranges(layers: Sequence[int]) -> str:
    """Ascending layers as ranges: `3, 8..11`."""
    found: list[list[int]] = []
    for layer in layers:
        if found and found[-1][-1] == layer - 1:
            found[-1][1:] = [layer]
        else:
            found.append([layer])
    return ", ".join("..".join(map(str, run)) for run in found)
