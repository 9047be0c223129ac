"""Mistral 3 (Ministral 3, newer files of Mistral Small and Devstral): as Llama, with YaRN on every layer and a
temperature of the queries that grows with their position.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_rope, read_temperature
from luce.models.llama import dense_or_mixtral
from luce.models.spec import Dialect, Layer, Markers, ModelSpec
from luce.models.tool_formats import MISTRAL_V11


def spec(source: Source) -> ModelSpec:
    """The spec of a mistral3 file."""
    attention = read_attention(source, read_rope(source, adjacent=True))
    layer = Layer(replace(attention, temperature=read_temperature(source)), dense_or_mixtral(source))
    return replace(
        model(source, "mistral3", (layer,) * source.stored_layers()),
        eos=("</s>",),
        dialect=Dialect(
            reasoning=Markers("[THINK]", "[/THINK]"),
            calls=MISTRAL_V11,
            notes=("a system prompt stands between [SYSTEM_PROMPT] and [/SYSTEM_PROMPT]",),
        ),
    )
