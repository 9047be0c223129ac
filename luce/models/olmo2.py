"""OLMo 2 and Olmo 3: norms behind each part only, and over all query and all key heads together; in Olmo 3 three of
four layers slide.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope, sliding_layers
from luce.models.spec import CHATML, Dialect, Layer, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of an olmo2 file."""
    layers = source.stored_layers()
    whole = sliding = replace(read_attention(source, read_rope(source)), qk_norm="whole")
    flags = [False] * layers
    if source.integer("attention.sliding_window", 0):
        flags = sliding_layers(source, layers, 4)
        # YaRN concerns the global layers.
        assert whole.rope is not None
        near = replace(whole.rope, yarn=None)
        sliding = replace(whole, rope=near, window=source.positive("attention.sliding_window"))
    return replace(
        model(
            source,
            "olmo2",
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
        eos=("<|endoftext|>", "<|im_end|>"),
        dialect=Dialect(message=CHATML),
    )
