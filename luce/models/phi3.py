"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: dense decoder, fused projections, LongRoPE in the models for 128k tokens."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import Dialect, Layer, MessageMarkers, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a phi3 file."""
    window = source.integer("attention.sliding_window", 0)
    # Models for 128k tokens store a window beyond their context.
    sliding = 0 < window < source.positive("context_length")
    attention = replace(read_attention(source, read_rope(source)), window=window if sliding else None)
    layer = Layer(attention, read_mlp(source))
    return replace(
        model(source, "phi3", (layer,) * source.stored_layers()),
        eos=("<|end|>", "<|im_end|>", "<|endoftext|>"),
        dialect=Dialect(message=MessageMarkers(starts=("<|user|>", "<|assistant|>", "<|system|>"), ends=("<|end|>",))),
    )
