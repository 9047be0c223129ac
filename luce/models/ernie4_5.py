"""ERNIE 4.5, dense: grouped-query attention, rotated in adjacent pairs as it was trained."""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import GatedMLP, Layer, ModelSpec, MoE


def spec(source: Source) -> ModelSpec:
    """The spec of an ernie4_5 file."""
    return ernie(source, "ernie4_5", [read_mlp(source)] * source.stored_layers())


def ernie(source: Source, family: str, parts: list[GatedMLP] | list[GatedMLP | MoE]) -> ModelSpec:
    """The spec of a file whose layers have these feed-forward parts."""
    attention = read_attention(source, read_rope(source, base=5e5, adjacent=True))
    return replace(
        model(source, family, [Layer(attention, part) for part in parts]),
        eos=("<|end_of_sentence|>",),
    )
