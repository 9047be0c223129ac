"""Which tensors of a file a shard reads, and the bytes that they take on a device."""

from __future__ import annotations

import math
from collections.abc import Iterable

from luce.gguf.quants import block_size
from luce.gguf.reader import GGUFFile, TensorInfo
from luce.models.spec import Attention, ModelSpec
from luce.ops.weight import stored_bytes
from luce.runtime.device import Device

EMBEDDING = "token_embd.weight"
#: the table of per-layer embeddings; files with the second name also have other names for the layers' parts of it
PER_LAYER_TABLES = ("per_layer_token_embd.weight", "per_layer_tok_embd.weight")


def tensor_name(layer: int, part: str) -> str:
    """`blk.3.attn_q.weight` of layer 3 and `attn_q`."""
    return f"blk.{layer}.{part}.weight"


def head_name(spec: ModelSpec) -> str:
    """The tensor of the head."""
    return EMBEDDING if spec.tied_head else "output.weight"


def _ends(spec: ModelSpec) -> set[str]:
    """The tensors behind the last layer; a file may lack the biases."""
    joining = {"altup_unembd_proj.weight"} if spec.streams > 1 else set()
    return {f"{spec.final_norm}.weight", f"{spec.final_norm}.bias", head_name(spec), "output.bias", *joining}


def shard_tensors(file: GGUFFile, spec: ModelSpec, layers: range, *, layers_only: bool = False) -> set[str]:
    """Names of the tensors that a shard of these layers reads, as LayerBuilder does.

    Without `layers_only` also the tensors outside layers: the embedding before the first layer, the head behind the
    last, and in every shard the tables of per-layer embeddings and the divisors of rotary frequencies.
    """
    wanted = {f"blk.{layer}." for layer in layers}
    names = {name for name in file.tensors if name[: name.find(".", 4) + 1] in wanted}
    for layer in layers:
        names -= _unused(spec, layer)
    if not layers_only:
        named = {EMBEDDING} if layers.start == 0 else set()
        if layers.start == 0 and spec.streams > 1:
            named |= {"altup_proj.weight"}
        if layers.stop == len(spec.layers):
            named |= _ends(spec)
        if spec.per_layer:
            named |= {*PER_LAYER_TABLES, "per_layer_model_proj.weight", "per_layer_proj_norm.weight"}
        mixers = (spec.layers[layer].mixer for layer in layers)
        ropes = (m.rope for m in mixers if isinstance(m, Attention) and m.rope is not None)
        named |= {name for rope in ropes for name in (rope.factors, rope.long_factors) if name is not None}
        names |= named & file.tensors.keys()
    return names


def expert_tensors(file: GGUFFile, layer: int) -> list[str]:
    """Names of the weights and biases of a layer's routed experts."""
    names = (name for name in file.tensors if name.startswith(f"blk.{layer}.") and "_exps." in name)
    return sorted(name for name in names if not name.endswith(".scale"))


def tensor_bytes(file: GGUFFile, spec: ModelSpec, layers: range, device: Device, *, layers_only: bool = False) -> int:
    """Bytes that the tensors of a shard take on a device: as stored, or as float32 on a device that does not keep them
    packed, where only the embedding tables stay in quant blocks.

    `layers_only` as for shard_tensors, except that a layer's columns of the per-layer table count with the layer.
    """
    names = shard_tensors(file, spec, layers, layers_only=layers_only)
    table = 0
    if not device.packed:
        head = spec.tied_head and layers.stop == len(spec.layers)
        table = file.tensors[EMBEDDING].nbytes if EMBEDDING in names and layers.start == 0 else 0
        names -= set() if head else {EMBEDDING}
    infos = [file.tensors[name] for name in names - {*PER_LAYER_TABLES}]
    # Keys that serve as values too are stored twice.
    mixers = ((layer, spec.layers[layer].mixer) for layer in layers)
    keys = {tensor_name(layer, "attn_k") for layer, m in mixers if isinstance(m, Attention) and m.value_from_key}
    infos += [file.tensors[name] for name in keys & names]
    columns = sum(
        (stored_bytes(file.tensors[name]) if device.packed else file.tensors[name].nbytes)
        * len(table_layers(file, spec, layers, name))
        // len(spec.layers)
        for name in PER_LAYER_TABLES
        if spec.per_layer and name in file.tensors
    )
    return table + columns + placed_bytes(infos, device)


def placed_bytes(infos: Iterable[TensorInfo], device: Device) -> int:
    """Bytes that tensors take on a device: as stored, or as float32."""
    return sum(stored_bytes(info) if device.packed else 4 * info.rows * info.cols for info in infos)


def head_bytes(file: GGUFFile, spec: ModelSpec, device: Device) -> int:
    """Bytes of the embedding and the head on one device."""
    names = (_ends(spec) & file.tensors.keys()) | ({EMBEDDING} if device.packed else set())
    return placed_bytes([file.tensors[name] for name in names], device)


def table_layers(file: GGUFFile, spec: ModelSpec, layers: range, name: str) -> range:
    """The layers whose columns of the per-layer table `name` a shard has: its own, and layers that share quant blocks
    with them.

    All layers if the file lacks the table; building then reports that.
    """
    if name not in file.tensors:
        return range(len(spec.layers))
    elements, _ = block_size(file.tensors[name].type)
    step = elements // math.gcd(elements, spec.per_layer)
    return range(layers.start // step * step, min(-(-layers.stop // step) * step, len(spec.layers)))


def _unused(spec: ModelSpec, layer: int) -> set[str]:
    """Tensors of a layer that are not read: some files contain the projections with which a borrowing layer was
    trained."""
    if spec.donor(layer) is None:
        return set()
    return {tensor_name(layer, part) for part in ("attn_k", "attn_v", "attn_k_norm")}
