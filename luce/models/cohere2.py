"""Command R7B and Command A: attention and MLP read one LayerNorm of the stream; three of four layers slide, and the
others are not rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope, sliding_layers
from luce.models.spec import Attention, Dialect, Layer, Markers, MessageMarkers, ModelSpec
from luce.models.tool_formats import COHERE2


def spec(source: Source) -> ModelSpec:
    """The spec of a cohere2 file."""
    rotated = read_attention(source, read_rope(source, adjacent=True))
    sliding = replace(rotated, window=source.positive("attention.sliding_window"))
    whole = replace(rotated, rope=None)
    flags = sliding_layers(source, source.stored_layers(), 4)
    found = cohere(source, "cohere2", [sliding if flag else whole for flag in flags])
    dialect = replace(found.dialect, reasoning=Markers("<|START_THINKING|>", "<|END_THINKING|>"), calls=COHERE2)
    return replace(found, dialect=dialect)


def cohere(source: Source, family: str, mixers: Sequence[Attention]) -> ModelSpec:
    """The parts that all of Cohere's models share."""
    layers = [Layer(mixer, read_mlp(source), ffn_norm=None, parallel=True) for mixer in mixers]
    return replace(
        model(source, family, layers, eps="attention.layer_norm_epsilon"),
        norm="layer",
        logit_scale=source.above("logit_scale", 1.0),
        eos=("<|END_OF_TURN_TOKEN|>",),
        dialect=Dialect(message=MessageMarkers(starts=("<|START_OF_TURN_TOKEN|>",), ends=("<|END_OF_TURN_TOKEN|>",))),
    )
