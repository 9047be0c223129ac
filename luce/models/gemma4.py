"""Gemma 4: sliding and global layers with different head sizes; E models with per-layer embeddings and layers that
read keys and values of another layer; models with experts beside the dense MLP.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model
from luce.models.spec import (
    Attention,
    Dialect,
    GatedMLP,
    Markers,
    MessageMarkers,
    ModelSpec,
    MoE,
    ReasoningBudget,
    Rope,
    SandwichLayer,
)
from luce.models.tool_formats import GEMMA4


def spec(source: Source) -> ModelSpec:
    """The spec of a gemma4 file."""
    layers = source.stored_layers()
    sliding = source.metadata.booleans(source.key("attention.sliding_window_pattern"))
    if len(sliding) != layers:
        raise source.refuse("attention.sliding_window_pattern", f"has {len(sliding)} entries for {layers} layers")
    widths = source.per_layer("feed_forward_length", layers)
    heads = source.per_layer("attention.head_count", layers)
    kv_heads = source.per_layer("attention.head_count_kv", layers)
    experts = _experts(source)
    specs = tuple(
        SandwichLayer(
            mixer=_attention(source, layer, heads[layer], kv_heads[layer], sliding),
            ffn=GatedMLP(widths[layer], "gelu"),
            experts=experts,
        )
        for layer in range(layers)
    )
    hidden = source.positive("embedding_length")
    return replace(
        model(source, "gemma4", specs),
        eos=("<turn|>", "<eos>"),
        dialect=Dialect(
            reasoning=Markers("<|channel>thought\n", "<channel|>"),
            calls=GEMMA4,
            # Without a blank line behind the marker it may go on to reason.
            budget=ReasoningBudget(lead_out="\n\n", usual_tokens=16384),
            notes=(
                "the role assistant is written model",
                "thinking is switched on by <|think|> in the system turn; off adds an empty thought channel",
                'strings in tool calls stand between <|"|> tokens',
            ),
            message=MessageMarkers(starts=("<|turn>",), ends=("<turn|>",)),
        ),
        embedding_scale=hidden**0.5,
        logit_softcap=source.number("final_logit_softcapping", 0.0),
        per_layer=source.integer("embedding_length_per_layer_input", 0),
        mask_token=4,
    )


def _attention(source: Source, layer: int, heads: int, kv_heads: int, sliding: list[bool]) -> Attention:
    suffix = "_swa" if sliding[layer] else ""
    head_dim = source.positive(f"attention.key_length{suffix}")
    factors = "rope_freqs.weight" if not sliding[layer] and "rope_freqs.weight" in source.tensors else None
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope(
            dims=source.positive(f"rope.dimension_count{suffix}", head_dim),
            base=source.number(f"rope.freq_base{suffix}"),
            factors=factors,
        ),
        scale=1.0,
        qk_norm="head",
        value_norm=True,
        value_from_key=f"blk.{layer}.attn_v.weight" not in source.tensors,
        donor=donor(source, layer, sliding),
        window=source.positive("attention.sliding_window") if sliding[layer] else None,
    )


def donor(source: Source, layer: int, sliding: list[bool]) -> int | None:
    """The layer whose keys and values a layer reads: the last of the same kind that has its own."""
    own = len(sliding) - source.integer("attention.shared_kv_layers", 0)
    if layer < own:
        return None
    same = [other for other in range(own) if sliding[other] == sliding[layer]]
    if not same:
        raise source.refuse(
            "attention.shared_kv_layers", f"leaves no layer whose keys and values layer {layer} could read"
        )
    return same[-1]


def _experts(source: Source) -> MoE | None:
    count = source.integer("expert_count", 0)
    if not count:
        return None
    return MoE(
        experts=count,
        used=source.positive("expert_used_count"),
        hidden=source.positive("expert_feed_forward_length"),
        shared=0,
        gating="softmax",
        expert_scale=True,
        activation="gelu",
    )
