"""ERNIE 4.5 with experts: a softmax router with a bias for choosing, shared experts, leading dense layers."""

from __future__ import annotations

from luce.models.ernie4_5 import ernie
from luce.models.keys import Source, read_experts, read_mlp
from luce.models.spec import GatedMLP, ModelSpec, MoE


def spec(source: Source) -> ModelSpec:
    """The spec of an ernie4_5-moe file."""
    dense, experts = read_mlp(source), read_experts(source, gating=1)
    leading, step = source.integer("leading_dense_block_count", 0), source.positive("interleave_moe_layer_step", 1)
    parts: list[GatedMLP | MoE] = [
        experts if layer >= leading and (layer + 1) % step == 0 else dense for layer in range(source.stored_layers())
    ]
    return ernie(source, "ernie4_5-moe", parts)
