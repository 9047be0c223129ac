"""Qwen3: dense decoder, grouped-query attention with a norm on each query and key head."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, attention_heads, linear_rope_scaling, model, rope_dims
from luce.models.spec import (
    CHATML,
    Attention,
    Dialect,
    GatedMLP,
    Layer,
    Markers,
    ModelSpec,
    ReasoningBudget,
    Rope,
)

#: what Qwen's models were trained to conclude their reasoning with (Qwen3 Technical Report, arXiv 2505.09388)
LEAD_IN = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
)


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen3 file."""
    heads = attention_heads(source)
    layer = Layer(
        mixer=Attention(
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            rope=Rope(
                dims=rope_dims(source, heads.head_dim),
                base=source.number("rope.freq_base", 1e6),
                linear=linear_rope_scaling(source),
            ),
            scale=heads.head_dim**-0.5,
            qk_norm=True,
        ),
        ffn=GatedMLP(source.positive("feed_forward_length")),
    )
    return replace(
        model(source, "qwen3", (layer,) * source.stored_layers()),
        eos=("<|im_end|>", "<|endoftext|>"),
        nfc=True,
        dialect=Dialect(
            reasoning=Markers("<think>", "</think>"),
            budget=ReasoningBudget(LEAD_IN, "\n\n", usual_tokens=32768, most_tokens=38912),
            notes=("enable_thinking false adds an empty <think> part to the prompt",),
            message=CHATML,
        ),
    )
