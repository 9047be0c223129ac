"""`luce inspect MODEL`: facts of a file, the placement of its layers, and the size of each. Reads no weights."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections import Counter
from typing import Any

from rich.table import Table
from rich.text import Text

from luce.backend.expert_placement import ExpertBytes
from luce.cli import plan
from luce.cli.arguments import add_json, add_model, add_settings
from luce.cli.console import folded, output
from luce.cli.plan import Opened
from luce.errors import LuceError
from luce.gguf.reader import GGUFFile
from luce.layers.tensors import tensor_bytes
from luce.models.model_card import ModelCard, find_card
from luce.models.spec import AnyLayer, Attention, GatedDeltaNet, ModelSpec, MoE, SandwichLayer, ShortConv
from luce.models.tool_formats import choose_calls
from luce.runtime.step import PAGE
from luce.shard.sizes import pages_for, state_bytes
from luce.text.call_check import call_mismatch
from luce.text.chat import ChatFormat
from luce.text.template import ChatTemplate
from luce.text.tokenizer import Tokenizer

#: groups of settings that this verb takes
SETTINGS = ("placement", "daemons", "engine", "KVFlash", "drafting", "model cards")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --layers, --json and the flags of the settings."""
    add_model(parser)
    parser.add_argument("--layers", action="store_true", help="show a table of all layers (--json always contains it)")
    add_json(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Print tables, or one JSON object."""
    with plan.opened(arguments) as model:
        facts = describe(model.file, model.spec) | _card(find_card(model.config.model_cards, model.file)) | place(model)
    if arguments.json:
        print(json.dumps(facts))
    else:
        _show(facts, arguments.layers)
    return 0


def describe(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    """The facts of a file that do not depend on devices. Sizes are in bytes."""
    types: Counter[str] = Counter()
    for tensor in file.tensors.values():
        types[tensor.type.name] += tensor.nbytes
    attention = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    heads = dict.fromkeys((mixer.heads, mixer.kv_heads, mixer.head_dim) for mixer in attention)
    experts = dict.fromkeys(moe for layer in spec.layers for moe in _mixtures(layer))
    template: str | None = file.metadata.string("tokenizer.chat_template", default=None)
    calls, why = choose_calls(template, spec.dialect.calls)
    written: dict[str, Any] = {"format": calls.format, "why": why, "mismatch": _call_mismatch(file, spec, template)}
    return {
        "path": str(file.paths[0]),
        "name": file.metadata.string("general.name", default=""),
        "family": spec.family,
        "layers": dict(Counter(_mixer(layer) for layer in spec.layers)),
        "skipped_layers": list(spec.skipped_layers),
        "hidden": spec.hidden,
        "vocabulary": spec.vocab,
        "context": spec.longest_context,
        "heads": [{"query": query, "kv": kv, "size": size} for query, kv, size in heads],
        "experts": [{"count": moe.experts, "used": moe.used, "size": moe.hidden} for moe in experts],
        "tied_head": spec.tied_head,
        "tensors": len(file.tensors),
        "bytes": dict(types.most_common()),
        "tokenizer": {
            "model": file.metadata.string("tokenizer.ggml.model", default="none"),
            "pre": file.metadata.string("tokenizer.ggml.pre", default=""),
        },
        "chat_template": "tokenizer.chat_template" in file.metadata,
        "dialect": {**dataclasses.asdict(spec.dialect), "calls": written},
    }


def _card(card: ModelCard | None) -> dict[str, Any]:
    """The card that matches the file, and the sampling values that it recommends."""
    found = None if card is None else {"name": card.name, "source": card.origin, "sampling": dict(card.sampling)}
    return {"model_card": found}


def _call_mismatch(file: GGUFFile, spec: ModelSpec, source: str | None) -> str | None:
    """What is wrong with the calls that the file's chat template writes; None if nothing is, or there is none."""
    if source is None:
        return None
    try:
        tokenizer = Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)
        bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        with contextlib.closing(ChatTemplate(source, bos=bos, eos=eos)) as template:
            return call_mismatch(ChatFormat(template, tokenizer, spec.dialect))
    except LuceError as error:
        return f"not read back: {error}"


def place(model: Opened) -> dict[str, Any]:
    """The memory of the layers on the devices, in bytes: luce.cli.plan.plan, and

    per_layer  mixer; ffn; device; weights there; experts_on_cpu_bytes, of its routed experts on the CPU; kv_per_token;
               donor, the layer whose keys and values it reads; window; state_per_sequence
    kv         per page group: window; layers; per_token; positions and bytes of one sequence at most
    """
    file, spec, config = model.file, model.spec, model.config
    facts = plan.plan(model)
    context = config.max_ctx or spec.context_length
    max_resident = facts.get("kvflash", {}).get("max_resident_tokens")
    groups: list[dict[str, Any]] = [
        {"window": group.window, "layers": 0, "per_token": 0, "positions": 0, "bytes": 0} for group in spec.page_groups
    ]
    layers: list[dict[str, Any]] = []
    experts = ExpertBytes(file, spec, model.options.experts)
    for shard, device in zip(facts["plan"], model.devices, strict=True):
        first, last = shard["layers"]
        for layer in range(first, last + 1):
            layer_spec, donor, one = spec.layers[layer], spec.donor(layer), range(layer, layer + 1)
            state = state_bytes(device, spec, one if donor is None else range(0), model.options)
            index = spec.group_of(layer)
            layers.append(
                {
                    "layer": layer,
                    "mixer": _mixer(layer_spec),
                    "ffn": _ffn(layer_spec),
                    "device": str(device.name),
                    "weights": tensor_bytes(file, spec, one, device, layers_only=True)
                    - (experts.placed(one, device) if layer in shard["experts_on_cpu"] else 0),
                    "experts_on_cpu_bytes": experts.on_cpu(one) if layer in shard["experts_on_cpu"] else 0,
                    "kv_per_token": sum(state.page) // PAGE,
                    "donor": donor,
                    "window": None if index is None else groups[index]["window"],
                    "state_per_sequence": state.slot,
                }
            )
            if index is not None:
                group = groups[index]
                pages = pages_for(spec.page_groups[index].window, context, model.options.chunk)
                if max_resident is not None and spec.page_groups[index].window is None:
                    pages = min(pages, max_resident // PAGE)
                group["layers"] += 1
                group["per_token"] += state.page[index] // PAGE
                group["positions"] = pages * PAGE
                group["bytes"] += state.page[index] * pages
    totals = {name: sum(layer[name] for layer in layers) for name in ("kv_per_token", "state_per_sequence")}
    weights = sum(shard["weights"] + shard["experts_on_cpu_bytes"] for shard in facts["plan"])
    return {"per_layer": layers, "kv": groups, **facts, "weights": weights, **totals}


def _mixer(layer: AnyLayer) -> str:
    if isinstance(layer.mixer, GatedDeltaNet):
        return "gated DeltaNet"
    if isinstance(layer.mixer, ShortConv):
        return "short convolution"
    if layer.mixer.latent is not None:
        return "latent attention"
    return "attention" if layer.mixer.window is None else "sliding attention"


def _ffn(layer: AnyLayer) -> str:
    names = ([] if isinstance(layer.ffn, MoE) else ["MLP"]) + ["MoE"] * len(_mixtures(layer))
    return ", ".join(names)


def _mixtures(layer: AnyLayer) -> list[MoE]:
    """The MoE part of a layer, in the place of its MLP or beside it; empty if it has none."""
    part = layer.experts if isinstance(layer, SandwichLayer) else layer.ffn
    return [part] if isinstance(part, MoE) else []


def _between(markers: dict[str, str] | None) -> str:
    return "not marked" if markers is None else f"{markers['open'].strip()} ... {markers['close']}"


def _written(calls: dict[str, Any]) -> str:
    return f"{calls['format']} ({calls['why']})" + (f": {calls['mismatch']}" if calls["mismatch"] else "")


def _written_card(card: dict[str, Any] | None) -> str:
    if card is None:
        return "none"
    sampling = ", ".join(f"{name} {value:g}" for name, value in card["sampling"].items())
    return f"{card['name']} ({card['source']})" + (f": {sampling}" if sampling else "")


def _show(facts: dict[str, Any], with_layers: bool) -> None:
    console = output()
    table = Table(show_header=False, box=None)
    rows = {
        "file": facts["path"],
        "name": facts["name"],
        "family": facts["family"],
        "layers": ", ".join(f"{n} {mixer}" for mixer, n in facts["layers"].items())
        + (f" (+{len(facts['skipped_layers'])} not run)" if facts["skipped_layers"] else ""),
        "hidden": facts["hidden"],
        "heads": "; ".join(f"{h['query']} query, {h['kv']} KV, size {h['size']}" for h in facts["heads"]) or "none",
        "experts": "; ".join(f"{e['used']} of {e['count']}, size {e['size']}" for e in facts["experts"]) or "none",
        "vocabulary": f"{facts['vocabulary']:,}" + (", head tied to it" if facts["tied_head"] else ""),
        "context": f"{facts['context']:,} tokens",
        "weights": f"{facts['weights']:,} bytes",
        "KV per token": f"{facts['kv_per_token']:,} bytes",
        "state per sequence": f"{facts['state_per_sequence']:,} bytes",
        "tokenizer": " ".join(facts["tokenizer"].values()),
        "chat template": "yes" if facts["chat_template"] else "no",
        "reasoning": _between(facts["dialect"]["reasoning"]),
        "tool calls": _written(facts["dialect"]["calls"]),
        "model card": _written_card(facts["model_card"]),
        "notes": "\n".join(facts["dialect"]["notes"]) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    console.print(folded(table))
    kinds = Table("type", "bytes", title=f"{facts['tensors']} tensors", title_justify="left")
    for name, size in facts["bytes"].items():
        kinds.add_row(name, f"{size:,}")
    kinds.add_row("total", f"{sum(facts['bytes'].values()):,}")
    console.print(kinds)
    if facts["kv"]:
        console.print(_kv_table(facts))
    if with_layers:
        console.print(_layer_table(facts))
    console.print(plan.table(facts))


def _kv_table(facts: dict[str, Any]) -> Table:
    table = Table(
        "window",
        "layers",
        "KV per token",
        "tokens at most",
        "bytes at most",
        title="KV of a sequence",
        title_justify="left",
    )
    for group in facts["kv"]:
        sizes = (group["layers"], group["per_token"], group["positions"], group["bytes"])
        table.add_row(_window(group["window"]), *(f"{size:,}" for size in sizes))
    return table


def _layer_table(facts: dict[str, Any]) -> Table:
    # Without a frame and without devices, which the plan shows, a line fits 80 columns.
    columns = ("layer", "mixer", "FFN", "weights", "KV/token", "window", "state")
    table = Table(*columns, title="layers", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for layer in facts["per_layer"]:
        table.add_row(
            str(layer["layer"]),
            layer["mixer"],
            layer["ffn"] + (" on CPU" if layer["experts_on_cpu_bytes"] else ""),
            f"{layer['weights']:,}",
            f"{layer['kv_per_token']:,}" if layer["donor"] is None else f"layer {layer['donor']}'s",
            "" if layer["mixer"] == "gated DeltaNet" else _window(layer["window"]),
            f"{layer['state_per_sequence']:,}",
        )
    rest = facts["weights"] - sum(layer["weights"] + layer["experts_on_cpu_bytes"] for layer in facts["per_layer"])
    table.add_row("", "embedding, head", "", f"{rest:,}")
    if away := sum(layer["experts_on_cpu_bytes"] for layer in facts["per_layer"]):
        table.add_row("", "experts on the CPU", "", f"{away:,}")
    weights, kv, state = (f"{facts[name]:,}" for name in ("weights", "kv_per_token", "state_per_sequence"))
    table.add_row("", "total", "", weights, kv, "", state)
    return table


def _window(window: int | None) -> str:
    return "all" if window is None else f"{window:,}"
