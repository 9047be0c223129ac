"""Qwen3.5 and Qwen3.6, mixture of experts: softmax router, and a shared expert with its own gate."""

from __future__ import annotations

from luce.models.hybrid import hybrid
from luce.models.keys import Source
from luce.models.spec import ModelSpec, MoE


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen35moe file. Softmax gating, normalised, scale 1 follow from the architecture."""
    experts = source.positive("expert_count")
    used = source.positive("expert_used_count")
    if used > experts:
        raise source.refuse("expert_used_count", f"is {used} of {experts} experts")
    hidden = source.positive("expert_feed_forward_length")
    ffn = MoE(
        experts=experts,
        used=used,
        hidden=hidden,
        shared=source.positive("expert_shared_feed_forward_length", hidden),
        gating="softmax",
        shared_gate=True,
    )
    return hybrid(source, "qwen35moe", ffn)
