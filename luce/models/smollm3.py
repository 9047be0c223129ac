"""SmolLM3: as Llama, but every fourth layer is not rotated."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import CHATML, Dialect, Layer, Markers, ModelSpec

#: no key says so
_NOT_ROTATED_EACH = 4


def spec(source: Source) -> ModelSpec:
    """The spec of a smollm3 file."""
    rotated = Layer(read_attention(source, read_rope(source, adjacent=True)), read_mlp(source))
    plain = replace(rotated, mixer=read_attention(source, None))
    layers = [rotated if (layer + 1) % _NOT_ROTATED_EACH else plain for layer in range(source.stored_layers())]
    return replace(
        model(source, "smollm3", layers),
        eos=("<|im_end|>", "<|end_of_text|>"),
        dialect=Dialect(
            reasoning=Markers("<think>", "</think>"),
            notes=("/think and /no_think in the system prompt switch reasoning on and off",),
            message=CHATML,
        ),
    )
