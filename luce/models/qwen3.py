"""Qwen3: dense decoder, grouped-query attention with a norm on each query and key head."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import CHATML, Dialect, GatedMLP, Layer, Markers, ModelSpec, MoE, ReasoningBudget

#: what Qwen's models were trained to conclude their reasoning with (Qwen3 Technical Report, arXiv 2505.09388)
LEAD_IN = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
)


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen3 file."""
    return qwen3(source, "qwen3", read_mlp(source))


def qwen3(source: Source, family: str, ffn: GatedMLP | MoE) -> ModelSpec:
    """The spec of a file whose every layer has this feed-forward part."""
    layer = Layer(replace(read_attention(source, read_rope(source, base=1e6)), qk_norm="head"), ffn)
    return replace(
        model(source, family, (layer,) * source.stored_layers()),
        eos=("<|im_end|>", "<|endoftext|>"),
        nfc=True,
        dialect=Dialect(
            reasoning=Markers("<think>", "</think>"),
            budget=ReasoningBudget(LEAD_IN, "\n\n", usual_tokens=32768, most_tokens=38912),
            notes=("enable_thinking false adds an empty <think> part to the prompt",),
            message=CHATML,
        ),
    )
