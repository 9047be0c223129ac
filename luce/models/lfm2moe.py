"""LFM2 with experts: sigmoid router with a bias for choosing, leading dense layers."""

from __future__ import annotations

from luce.models.keys import Source, read_experts, read_mlp
from luce.models.lfm2 import lfm2
from luce.models.spec import GatedMLP, ModelSpec, MoE


def spec(source: Source) -> ModelSpec:
    """The spec of an lfm2moe file."""
    leading, experts = source.integer("leading_dense_block_count", 0), read_experts(source, gating=2)
    dense = read_mlp(source)
    parts: list[GatedMLP | MoE] = [dense if layer < leading else experts for layer in range(source.stored_layers())]
    return lfm2(source, "lfm2moe", parts)
