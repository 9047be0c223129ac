"""Qwen3.5 and Qwen3.6, dense."""

from __future__ import annotations

from luce.models.hybrid import hybrid
from luce.models.keys import Source
from luce.models.spec import GatedMLP, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen35 file."""
    return hybrid(source, "qwen35", GatedMLP(source.positive("feed_forward_length")))
