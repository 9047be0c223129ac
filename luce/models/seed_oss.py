"""Seed-OSS: dense decoder, grouped-query attention with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import Dialect, Layer, Markers, MessageMarkers, ModelSpec
from luce.models.tool_formats import SEED_OSS


def spec(source: Source) -> ModelSpec:
    """The spec of a seed_oss file."""
    layer = Layer(read_attention(source, read_rope(source, base=1e7)), read_mlp(source), ffn_norm="post_attention_norm")
    return replace(
        model(source, "seed_oss", (layer,) * source.stored_layers()),
        eos=("<seed:eos>",),
        dialect=Dialect(
            reasoning=Markers("<seed:think>", "</seed:think>"),
            calls=SEED_OSS,
            message=MessageMarkers(starts=("<seed:bos>",), ends=("<seed:eos>",)),
        ),
    )
