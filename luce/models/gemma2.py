"""Gemma 2: every second layer slides; soft caps on scores and logits; norms before and behind each part."""

from __future__ import annotations

from dataclasses import replace

from luce.models.gemma3 import by_width, gemma
from luce.models.keys import Source, read_attention, read_rope, sliding_layers
from luce.models.spec import ModelSpec

#: by the config of the 27B model, whose queries are scaled by its width; the files have no key for it
_LAYERS_27B = 46


def spec(source: Source) -> ModelSpec:
    """The spec of a gemma2 file."""
    layers = source.stored_layers()
    whole = replace(read_attention(source, read_rope(source)), softcap=source.above("attn_logit_softcapping", 50.0))
    whole = by_width(source, whole) if layers == _LAYERS_27B else whole
    sliding = replace(whole, window=source.positive("attention.sliding_window"))
    flags = sliding_layers(source, layers, 2)
    return replace(
        gemma(source, "gemma2", [sliding if flag else whole for flag in flags]),
        logit_softcap=source.above("final_logit_softcapping", 30.0),
    )
