"""EXAONE 4.0: norms behind each part only, and on query and key heads; in the 32B three of four layers slide, and the
others are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope, sliding_layers
from luce.models.spec import Dialect, Layer, Markers, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of an exaone4 file."""
    layers = source.stored_layers()
    whole = sliding = replace(read_attention(source, read_rope(source, base=1e6)), qk_norm="head")
    flags = [False] * layers
    if source.integer("attention.sliding_window", 0):
        flags = sliding_layers(source, layers, 4)
        sliding = replace(whole, window=source.positive("attention.sliding_window"))
        whole = replace(whole, rope=None)
    return replace(
        model(
            source,
            "exaone4",
            [
                Layer(
                    sliding if flag else whole,
                    read_mlp(source),
                    mixer_norm=None,
                    ffn_norm=None,
                    mixer_post_norm="post_attention_norm",
                    ffn_post_norm="post_ffw_norm",
                )
                for flag in flags
            ],
        ),
        eos=("[|endofturn|]",),
        dialect=Dialect(reasoning=Markers("<think>", "</think>")),
    )
