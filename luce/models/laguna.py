"""Laguna (Poolside): sliding and global attention layers with different head counts, a softplus gate on each head's
output, YaRN on the global layers, and a sigmoid router after the leading dense layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from luce.gguf.metadata import shown
from luce.models.keys import Source, model, read_yarn, sliding_layers
from luce.models.spec import (
    Attention,
    Dialect,
    GatedMLP,
    Layer,
    Markers,
    MessageMarkers,
    ModelSpec,
    MoE,
    ReasoningBudget,
    Rope,
    Yarn,
)
from luce.models.tool_formats import GLM45

_SIGMOID = 2


def spec(source: Source) -> ModelSpec:
    """The spec of a laguna file."""
    layers = source.stored_layers()
    heads = source.per_layer("attention.head_count", layers)
    kv_heads = source.per_layer("attention.head_count_kv", layers)
    sliding = _sliding(source, layers)
    dense = source.integer("leading_dense_block_count", 1)
    ffn = _experts(source)
    specs = [
        Layer(
            mixer=_attention(source, layer, heads[layer], kv_heads[layer], sliding[layer]),
            ffn=GatedMLP(source.positive("feed_forward_length")) if layer < dense else ffn,
        )
        for layer in range(layers)
    ]
    return replace(
        model(source, "laguna", specs),
        # Full attention should see at least the positions that the sliding layers see.
        tail=source.positive("attention.sliding_window") if any(sliding) else 0,
        eos=("</assistant>",),
        mask_token=12,
        dialect=Dialect(
            reasoning=Markers("<think>", "</think>"),
            calls=GLM45,
            budget=ReasoningBudget(usual_tokens=32768),
            notes=(
                "Poolside's system prompt is added to conversations without one",
                "the prompt ends with <think> or </think>",
            ),
            # A vocabulary may lack these as tokens of their own.
            message=MessageMarkers(
                starts=("<user>", "<assistant>", "<system>"),
                ends=("</system>", "</user>", "</assistant>"),
                special=False,
            ),
        ),
    )


def _sliding(source: Source, layers: int) -> Sequence[bool]:
    if source.key("attention.sliding_window_pattern") in source.metadata:
        return sliding_layers(source, layers, 4)
    # The first layer of four is global, not the last.
    return [bool(layer % 4) for layer in range(layers)]


def _attention(source: Source, layer: int, heads: int, kv_heads: int, sliding: bool) -> Attention:
    head_dim = source.positive("attention.key_length")
    gate = source.tensors.get(f"blk.{layer}.attn_gate.weight")
    if sliding:
        dims = source.positive("rope.dimension_count_swa", head_dim)
        rope = Rope(dims=dims, base=source.number("rope.freq_base_swa", 10000.0))
    else:
        dims = source.positive("rope.dimension_count", head_dim // 2)
        rope = Rope(dims=dims, base=source.above("rope.freq_base", least=1.0), yarn=_yarn(source))
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5,
        qk_norm="head",
        # XS.2 has one gate per head, M.1 one per element: the shape of the tensor decides.
        output_gate=head_dim if gate is not None and gate.rows == heads * head_dim else 1,
        window=source.positive("attention.sliding_window") if sliding else None,
    )


def _yarn(source: Source) -> Yarn | None:
    kind = source.metadata.string(source.key("rope.scaling.type"), default="none")
    if kind not in ("none", "yarn"):
        raise source.refuse("rope.scaling.type", f"is {shown(kind)}, expected yarn or none")
    return read_yarn(source) if kind == "yarn" else None


def _experts(source: Source) -> MoE:
    gating = source.integer("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise source.refuse("expert_gating_func", f"is {gating}, expected {_SIGMOID} (sigmoid)")
    hidden = source.positive("expert_feed_forward_length")
    return MoE(
        experts=source.positive("expert_count"),
        used=source.positive("expert_used_count"),
        hidden=hidden,
        shared=source.positive("expert_shared_feed_forward_length", hidden),
        gating="sigmoid",
        normalise=source.metadata.boolean(source.key("expert_weights_norm"), default=True),
        scale=source.number("expert_weights_scale", 1.0),
        bias=True,
    )
