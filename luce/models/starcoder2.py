"""StarCoder2: LayerNorm and an MLP without a gate, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_rope
from luce.models.spec import Layer, ModelSpec, PlainMLP


def spec(source: Source) -> ModelSpec:
    """The spec of a starcoder2 file."""
    window = source.integer("attention.sliding_window", 0)
    attention = replace(read_attention(source, read_rope(source)), window=window or None)
    ffn = PlainMLP(source.positive("feed_forward_length"), bias=source.biased("ffn_up"))
    layer = Layer(attention, ffn)
    return replace(
        model(source, "starcoder2", (layer,) * source.stored_layers(), eps="attention.layer_norm_epsilon"),
        norm="layer",
        norm_bias="output_norm.bias" in source.tensors,
        eos=("<|endoftext|>",),
    )
