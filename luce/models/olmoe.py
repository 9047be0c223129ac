"""OLMoE: experts whose weights are not normalised, norms over all query and all key heads together."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_rope
from luce.models.spec import Layer, ModelSpec, MoE


def spec(source: Source) -> ModelSpec:
    """The spec of an olmoe file."""
    attention = replace(read_attention(source, read_rope(source)), qk_norm="whole")
    experts = MoE(
        experts=source.positive("expert_count"),
        used=source.positive("expert_used_count"),
        # All experts have the feed-forward width: files have no other key for it.
        hidden=source.positive("feed_forward_length"),
        shared=0,
        gating="softmax",
        normalise=source.flag("expert_weights_norm", False),
    )
    return replace(
        model(source, "olmoe", (Layer(attention, experts),) * source.stored_layers()),
        eos=("<|endoftext|>",),
    )
