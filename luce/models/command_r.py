"""Command R of 35B and Aya: attention and MLP read one LayerNorm of the stream; every layer is global and rotated."""

from __future__ import annotations

from luce.models.cohere2 import cohere
from luce.models.keys import Source, read_attention, read_rope, refuse_norms_of_each_head
from luce.models.spec import ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a command-r file. Command R+ has a norm of its own for each head, which Luce does not compute."""
    refuse_norms_of_each_head(source)
    attention = read_attention(source, read_rope(source, adjacent=True))
    return cohere(source, "command-r", [attention] * source.stored_layers())
