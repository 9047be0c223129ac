"""MiniMax-M2: norms over all query and all key heads together, sigmoid router with a bias for choosing."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_experts, read_rope, running_layers
from luce.models.spec import Dialect, Layer, Markers, MessageMarkers, ModelSpec
from luce.models.tool_formats import MINIMAX_M2


def spec(source: Source) -> ModelSpec:
    """The spec of a minimax-m2 file."""
    attention = replace(read_attention(source, read_rope(source, base=5e6)), qk_norm="whole")
    layer = Layer(attention, replace(read_experts(source, gating=2), normalise=True))
    return replace(
        model(source, "minimax-m2", (layer,) * running_layers(source)),
        eos=("[e~[",),
        dialect=Dialect(
            reasoning=Markers("<think>", "</think>"),
            calls=MINIMAX_M2,
            notes=("a reply begins inside <think>",),
            message=MessageMarkers(starts=("]~b]",), ends=("[e~[",)),
        ),
    )
