"""GLM-4.5, 4.6 and 4.7: sigmoid router with a bias for choosing, a shared expert, leading dense layers; trailing layers
predict further tokens.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.glm4 import GLM_DIALECT, GLM_EOS
from luce.models.keys import Source, model, read_attention, read_experts, read_mlp, read_rope, running_layers
from luce.models.spec import Layer, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a glm4moe file."""
    attention = read_attention(source, read_rope(source, base=1e6))
    if "blk.0.attn_q_norm.weight" in source.tensors:
        attention = replace(attention, qk_norm="head")
    dense, experts = read_mlp(source), read_experts(source, gating=2)
    leading = source.integer("leading_dense_block_count", 0)
    layers = [
        Layer(attention, dense if layer < leading else experts, ffn_norm="post_attention_norm")
        for layer in range(running_layers(source))
    ]
    return replace(model(source, "glm4moe", layers), eos=GLM_EOS, dialect=GLM_DIALECT)
