"""Qwen2 and the models stored under its name (Qwen2.5, QwQ, R1-Distill-Qwen): dense decoder, grouped-query attention
with biases on queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import CHATML, Dialect, Layer, Markers, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen2 file."""
    layer = Layer(replace(read_attention(source, read_rope(source, base=1e6)), bias=True), read_mlp(source))
    return replace(
        model(source, "qwen2", (layer,) * source.stored_layers()),
        eos=("<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"),
        nfc=True,
        dialect=Dialect(
            # Of QwQ and the distilled models; others do not write them.
            reasoning=Markers("<think>", "</think>"),
            notes=("prompts of QwQ and of the R1 distills end with <think>",),
            message=CHATML,
        ),
    )
