"""`luce inspect MODEL`: what a file holds, where its layers would go, and what each of them takes. Reads no weights."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from luce.backend.plan import pages_for, plan_layers, state_bytes
from luce.cli.main import settings
from luce.cli.pull import fetch
from luce.config import Config
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.build import tensor_bytes
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import Attention, Block, GatedMLP, ModelSpec, MoE, SandwichBlock
from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device
from luce.runtime.open import open_devices
from luce.runtime.step import PAGE


def run(arguments: argparse.Namespace) -> int:
    """Print tables, or one JSON object."""
    config = settings(arguments)
    with open_gguf(fetch(arguments.model)) as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        devices = open_devices(config.target_devices)
        try:
            facts = describe(file, spec) | place(file, spec, devices, config)
        finally:
            for device in devices:
                device.close()
    if arguments.json:
        print(json.dumps(facts))
    else:
        _show(facts, arguments.layers)
    return 0


def describe(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    """Facts of a file that do not depend on devices; all sizes in bytes."""
    types: Counter[str] = Counter()
    for tensor in file.tensors.values():
        types[tensor.type.name] += tensor.nbytes
    attention = [block.mixer for block in spec.blocks if isinstance(block.mixer, Attention)]
    heads = dict.fromkeys((mixer.heads, mixer.kv_heads, mixer.head_dim) for mixer in attention)
    experts = dict.fromkeys(moe for block in spec.blocks for moe in _mixtures(block))
    return {
        "path": str(file.paths[0]),
        "name": file.metadata.string("general.name", default=""),
        "family": spec.family,
        "layers": dict(Counter(_mixer(block) for block in spec.blocks)),
        "skipped_layers": list(spec.skipped_blocks),
        "hidden": spec.hidden,
        "vocabulary": spec.vocab,
        "context": spec.context_length,
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
    }


def place(file: GGUFFile, spec: ModelSpec, devices: list[Device], config: Config) -> dict[str, Any]:
    """What the layers take on these devices, in bytes.

    blocks  per layer: mixer, feed-forward part, device, weights, KV per token, donor (the layer whose KV it reads
            instead), window, state per sequence
    plan    per shard: layers (first, last) and the sums of its layers; weights with the embedding and the head
    kv      per page group: window, layers, KV per token, positions and bytes that one sequence takes at most
    """
    context = config.max_ctx or spec.context_length
    kv = KVTypes(config.cache_type_k, config.cache_type_v)
    groups: list[dict[str, Any]] = [
        {"window": group.window, "layers": 0, "per_token": 0, "positions": 0, "bytes": 0} for group in spec.page_groups
    ]
    blocks: list[dict[str, Any]] = []
    shards: list[dict[str, Any]] = []
    ranges = plan_layers(spec, len(devices), config.target_layer_split)
    for layers, device in zip(ranges, devices, strict=True):
        for layer in layers:
            block = spec.blocks[layer]
            state = state_bytes(device, spec, range(layer, layer + 1), kv)
            index = spec.group_of(layer)
            blocks.append(
                {
                    "layer": layer,
                    "mixer": _mixer(block),
                    "ffn": _ffn(block),
                    "device": str(device.name),
                    "weights": _block_bytes(file, layer, device),
                    "kv_per_token": sum(state.page) // PAGE,
                    "donor": spec.donor(layer),
                    "window": None if index is None else groups[index]["window"],
                    "state_per_sequence": state.slot,
                }
            )
            if index is not None:
                group = groups[index]
                pages = pages_for(spec.page_groups[index].window, context, config.chunk)
                group["layers"] += 1
                group["per_token"] += state.page[index] // PAGE
                group["positions"] = pages * PAGE
                group["bytes"] += state.page[index] * pages
        own = blocks[layers.start : layers.stop]
        shards.append(
            {
                "device": str(device.name),
                "layers": [layers.start, layers.stop - 1],
                "weights": tensor_bytes(file, spec, layers, device),
                "kv_per_token": sum(entry["kv_per_token"] for entry in own),
                "state_per_sequence": sum(entry["state_per_sequence"] for entry in own),
            }
        )
    totals = {name: sum(shard[name] for shard in shards) for name in ("weights", "kv_per_token", "state_per_sequence")}
    return {"blocks": blocks, "kv": groups, "plan": shards, **totals}


def _mixer(block: Block | SandwichBlock) -> str:
    if not isinstance(block.mixer, Attention):
        return "gated DeltaNet"
    return "attention" if block.mixer.window is None else "sliding attention"


def _ffn(block: Block | SandwichBlock) -> str:
    names = (["MLP"] if isinstance(block.ffn, GatedMLP) else []) + ["MoE"] * len(_mixtures(block))
    return ", ".join(names)


def _mixtures(block: Block | SandwichBlock) -> list[MoE]:
    """The MoE part of a block, in the place of its MLP or beside it, if it has one."""
    part = block.experts if isinstance(block, SandwichBlock) else block.ffn
    return [part] if isinstance(part, MoE) else []


def _block_bytes(file: GGUFFile, layer: int, device: Device) -> int:
    """Bytes of one layer's tensors: as stored on a GPU, as float32 on the host."""
    tensors = [tensor for name, tensor in file.tensors.items() if name.startswith(f"blk.{layer}.")]
    return sum(4 * t.rows * t.cols if device.host else t.nbytes for t in tensors)


def _show(facts: dict[str, Any], layers: bool) -> None:
    console = Console(highlight=False)
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
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    kinds = Table("type", "bytes", title=f"{facts['tensors']} tensors", title_justify="left")
    for name, size in facts["bytes"].items():
        kinds.add_row(name, f"{size:,}")
    kinds.add_row("total", f"{sum(facts['bytes'].values()):,}")
    console.print(kinds)
    if facts["kv"]:
        console.print(_kv_table(facts))
    if layers:
        console.print(_layer_table(facts))
    shards = Table(
        "device", "layers", "weights", "KV per token", "state per sequence", title="plan", title_justify="left"
    )
    for shard in facts["plan"]:
        first, last = shard["layers"]
        sizes = (shard["weights"], shard["kv_per_token"], shard["state_per_sequence"])
        shards.add_row(shard["device"], f"{first}..{last}", *(f"{size:,}" for size in sizes))
    console.print(shards)


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
    # No frame, and the devices left to the plan: a line should fit 80 columns.
    columns = ("layer", "mixer", "FFN", "weights", "KV/token", "window", "state")
    table = Table(*columns, title="layers", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for block in facts["blocks"]:
        table.add_row(
            str(block["layer"]),
            block["mixer"],
            block["ffn"],
            f"{block['weights']:,}",
            f"{block['kv_per_token']:,}" if block["donor"] is None else f"layer {block['donor']}'s",
            "" if block["mixer"] == "gated DeltaNet" else _window(block["window"]),
            f"{block['state_per_sequence']:,}",
        )
    ends = facts["weights"] - sum(block["weights"] for block in facts["blocks"])
    table.add_row("", "embedding, head", "", f"{ends:,}")
    weights, kv, state = (f"{facts[name]:,}" for name in ("weights", "kv_per_token", "state_per_sequence"))
    table.add_row("", "total", "", weights, kv, "", state)
    return table


def _window(window: int | None) -> str:
    return "all" if window is None else f"{window:,}"
