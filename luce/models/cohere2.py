"""Command R7B and Command A: attention and MLP read one LayerNorm of the stream; three of four layers slide, and the
others are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope, sliding_layers
from luce.models.spec import Dialect, Layer, Markers, MessageMarkers, ModelSpec
from luce.models.tool_formats import COHERE2


def spec(source: Source) -> ModelSpec:
    """The spec of a cohere2 file."""
    rotated = read_attention(source, read_rope(source, adjacent=True))
    sliding = replace(rotated, window=source.positive("attention.sliding_window"))
    whole = replace(rotated, rope=None)
    flags = sliding_layers(source, source.stored_layers(), 4)
    layers = [Layer(sliding if flag else whole, read_mlp(source), ffn_norm=None, parallel=True) for flag in flags]
    return replace(
        model(source, "cohere2", layers, eps="attention.layer_norm_epsilon"),
        norm="layer",
        logit_scale=source.above("logit_scale", 1.0),
        eos=("<|END_OF_TURN_TOKEN|>",),
        dialect=Dialect(
            reasoning=Markers("<|START_THINKING|>", "<|END_THINKING|>"),
            calls=COHERE2,
            message=MessageMarkers(starts=("<|START_OF_TURN_TOKEN|>",), ends=("<|END_OF_TURN_TOKEN|>",)),
        ),
    )
