"""Holds the sizes of a spec against the shapes of the tensors, before anything is planned or allocated with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from luce.errors import UnsupportedError
from luce.gguf.reader import TensorInfo
from luce.models.keys import Source
from luce.models.spec import (
    AltUpLayer,
    AnyLayer,
    Attention,
    GatedMLP,
    ModelSpec,
    MoE,
    PlainMLP,
    SandwichLayer,
    ShortConv,
)

#: name of a tensor, its expected elements of a row, and its expected rows; None: any
_Expected = tuple[str, int | None, int | None]

#: parts of a layer of which any may stand for the first
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "attn_q": ("attn_qkv", "attn_q_b"),
    "attn_k": ("attn_qkv",),
    "attn_qkv": ("attn_q",),
    "attn_q_a": ("attn_q",),
    "attn_q_b": ("attn_q",),
    "ffn_up_exps": ("ffn_gate_up_exps",),
}


def check_shapes(source: Source, spec: ModelSpec) -> None:
    """Raises UnsupportedError naming the key, or the first tensor whose shape does not fit the spec.

    Tensors that are missing under these names are for the loader to report: files may hold them under other names.
    """
    _check_experts(source, spec)
    for name, cols, rows in _expected(source, spec):
        info = source.tensors.get(name)
        if info is None:
            continue
        if cols not in (None, info.cols) or rows not in (None, info.rows):
            expected = ", ".join("any" if size is None else str(size) for size in (cols, rows))
            raise UnsupportedError(
                f"{source.path}: tensor {name} has shape {list(info.shape)}, expected [{expected}] by the metadata"
            )


def check_matrices(source: Source, spec: ModelSpec) -> None:
    """Raises UnsupportedError, in the loader's words, naming the first matrix that the file has under no name: for
    plans, which load nothing. Norms, biases, and matrices that only some families have, are not looked for."""
    for name, *_ in _expected(source, spec):
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        others = [f"{stem}.{other}.weight" for other in _OTHERS.get(part, ())]
        if part == "output" or not source.tensors.keys().isdisjoint((name, *others)):
            # Without a head of its own, the embedding is the head.
            continue
        if part == "ffn_gate" and fused_gate_up(source.tensors, *_gated(spec, stem)):
            continue
        raise UnsupportedError(f"{source.path}: tensor {name} is missing")


def _gated(spec: ModelSpec, stem: str) -> tuple[int, int]:
    """The layer of `blk.3`, and the width of its gated MLP."""
    index = int(stem.rpartition(".")[2])
    ffn = spec.layers[index].ffn
    assert isinstance(ffn, GatedMLP)
    return index, ffn.hidden


def fused_gate_up(tensors: Mapping[str, TensorInfo], layer: int, width: int, suffix: str = "") -> bool:
    """Whether ffn_up of a layer holds the rows of ffn_gate too, before its own."""
    up = tensors.get(f"blk.{layer}.ffn_up{suffix}.weight")
    return up is not None and up.rows == 2 * width and f"blk.{layer}.ffn_gate{suffix}.weight" not in tensors


def _check_experts(source: Source, spec: ModelSpec) -> None:
    for layer in spec.layers:
        experts = layer.experts if isinstance(layer, SandwichLayer) else layer.ffn
        if isinstance(experts, MoE) and experts.used > experts.experts:
            raise source.refuse("expert_used_count", f"is {experts.used} of {experts.experts} experts")


def _expected(source: Source, spec: ModelSpec) -> Iterator[_Expected]:
    yield "token_embd.weight", spec.hidden, None
    yield "output.weight", spec.hidden, spec.vocab
    for index, layer in enumerate(spec.layers):
        fused = isinstance(layer.ffn, GatedMLP) and fused_gate_up(source.tensors, index, layer.ffn.hidden)
        for part, cols, rows in _of_layer(spec, layer, fused=fused):
            yield f"blk.{index}.{part}.weight", cols, rows


def _of_layer(spec: ModelSpec, layer: AnyLayer, *, fused: bool) -> Iterator[_Expected]:
    mixer = layer.mixer
    if isinstance(mixer, ShortConv):
        yield "shortconv.in_proj", spec.hidden, 3 * spec.hidden
        yield "shortconv.out_proj", spec.hidden, spec.hidden
    elif isinstance(mixer, Attention) and mixer.latent is not None:
        latent, turned = mixer.latent, mixer.head_dim - mixer.latent.rank
        yield "attn_q_a", spec.hidden, latent.query_rank
        yield "attn_q_b", latent.query_rank, mixer.heads * (latent.plain + turned)
        yield "attn_q", spec.hidden, mixer.heads * (latent.plain + turned)
        yield "attn_kv_a_mqa", spec.hidden, mixer.head_dim
        yield "attn_k_b", latent.plain, mixer.heads * latent.rank
        yield "attn_v_b", latent.rank, mixer.heads * latent.value
        yield "attn_output", mixer.heads * latent.value, spec.hidden
    elif isinstance(mixer, Attention):
        queries = mixer.heads * mixer.head_dim
        yield "attn_q", spec.hidden, queries * (2 if mixer.query_gate else 1)
        yield "attn_output", queries, spec.hidden
        if mixer.donor is None:
            yield "attn_k", spec.hidden, mixer.kv_heads * mixer.head_dim
            yield "attn_qkv", spec.hidden, (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    else:
        yield "attn_qkv", spec.hidden, mixer.channels
        yield "attn_gate", spec.hidden, mixer.value_heads * mixer.head_dim
    if isinstance(layer, AltUpLayer):
        yield "laurel_l", spec.hidden, layer.laurel
        yield "laurel_r", layer.laurel, spec.hidden
    if isinstance(layer.ffn, GatedMLP):
        yield "ffn_gate", spec.hidden, layer.ffn.hidden
        yield "ffn_up", spec.hidden, layer.ffn.hidden * (2 if fused else 1)
        yield "ffn_down", layer.ffn.hidden, spec.hidden
    if isinstance(layer.ffn, PlainMLP):
        yield "ffn_up", spec.hidden, layer.ffn.hidden
        yield "ffn_down", layer.ffn.hidden, spec.hidden
    experts = layer.experts if isinstance(layer, SandwichLayer) else layer.ffn
    if isinstance(experts, MoE):
        yield "ffn_gate_inp", spec.hidden, experts.experts
        yield "ffn_up_exps", spec.hidden, experts.experts * experts.hidden
        yield "ffn_down_exps", experts.hidden, experts.experts * spec.hidden
