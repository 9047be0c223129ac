"""Gemma and CodeGemma: dense decoder, gelu, embeddings scaled by the width."""

from __future__ import annotations

from luce.models.gemma3 import gemma
from luce.models.keys import Source, read_attention, read_rope
from luce.models.spec import ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a gemma file."""
    attention = read_attention(source, read_rope(source))
    return gemma(source, "gemma", [attention] * source.stored_layers(), post_norms=False)
