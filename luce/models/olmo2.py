"""OLMo 2 and Olmo 3: norms behind each part only, and over all query and all key heads together; in Olmo 3 three of
four layers slide.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope, sliding_layers
from luce.models.spec import CHATML, Attention, Dialect, Layer, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of an olmo2 file."""
    rope = read_rope(source)
    whole = replace(read_attention(source, rope), qk_norm="whole")
    # YaRN concerns the global layers.
    sliding = replace(whole, rope=replace(rope, yarn=None))
    return replace(
        normed_behind(source, "olmo2", whole, sliding),
        eos=("<|endoftext|>", "<|im_end|>"),
        dialect=Dialect(message=CHATML),
    )


def slides(source: Source) -> bool:
    """Whether some layers have a window."""
    return source.integer("attention.sliding_window", 0) > 0


def normed_behind(source: Source, family: str, whole: Attention, sliding: Attention) -> ModelSpec:
    """A model with norms behind each part only, of which every fourth layer is global if the others slide."""
    layers = source.stored_layers()
    flags = sliding_layers(source, layers, 4) if slides(source) else [False] * layers
    near = replace(sliding, window=source.positive("attention.sliding_window")) if any(flags) else sliding
    parts = [
        Layer(
            near if flag else whole,
            read_mlp(source),
            mixer_norm=None,
            ffn_norm=None,
            mixer_post_norm="post_attention_norm",
            ffn_post_norm="post_ffw_norm",
        )
        for flag in flags
    ]
    return model(source, family, parts)
