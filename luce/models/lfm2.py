"""LFM2 and LFM2.5: gated short convolutions, with layers of attention in between."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_mlp, read_rope_of
from luce.models.spec import CHATML, Attention, Dialect, GatedMLP, Layer, ModelSpec, MoE, ShortConv
from luce.models.tool_formats import LFM2


def spec(source: Source) -> ModelSpec:
    """The spec of an lfm2 file."""
    return lfm2(source, "lfm2", [read_mlp(source)] * source.stored_layers())


def lfm2(source: Source, family: str, parts: list[GatedMLP | MoE] | list[GatedMLP]) -> ModelSpec:
    """The spec of a file whose layers have these feed-forward parts."""
    heads, width = source.positive("attention.head_count"), source.positive("embedding_length")
    size = source.positive("attention.key_length", max(1, width // heads))
    window = source.integer("attention.sliding_window", 0)
    # 0 marks a convolution.
    counts = source.per_layer("attention.head_count_kv", len(parts), least=0)
    rope, conv = read_rope_of(source, size, base=1e6), ShortConv(source.positive("shortconv.l_cache"))
    layers = []
    for count, ffn in zip(counts, parts, strict=True):
        if count and heads % count:
            raise source.refuse("attention.head_count_kv", f"has {count}, of which {heads} heads are no multiple")
        attention = Attention(heads, count, size, rope, size**-0.5, qk_norm="head", window=window or None)
        layers.append(Layer(attention if count else conv, ffn))
    return replace(
        model(source, family, layers),
        final_norm="token_embd_norm",
        eos=("<|im_end|>",),
        dialect=Dialect(message=CHATML, calls=LFM2),
    )
