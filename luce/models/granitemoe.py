"""Granite 3 with experts, of which all have the feed-forward width."""

from __future__ import annotations

from dataclasses import replace

from luce.models.granite import granite
from luce.models.keys import Source
from luce.models.llama import dense_or_mixtral
from luce.models.spec import ModelSpec, MoE


def spec(source: Source) -> ModelSpec:
    """The spec of a granitemoe file."""
    ffn = dense_or_mixtral(source)
    if isinstance(ffn, MoE):
        ffn = replace(ffn, shared=source.integer("expert_shared_feed_forward_length", 0))
    return granite(source, "granitemoe", ffn)
