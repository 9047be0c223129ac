"""Qwen1.5-MoE and Qwen2-57B-A14B: biases on queries, keys and values; experts whose weights are not normalised, and a
shared one behind a gate.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_experts, read_rope
from luce.models.spec import CHATML, Dialect, Layer, ModelSpec


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen2moe file. Softmax gating without normalising follows from the architecture."""
    experts = replace(read_experts(source, gating=1, normalise=False), shared_gate=True)
    layer = Layer(replace(read_attention(source, read_rope(source, base=1e6)), bias=True), experts)
    return replace(
        model(source, "qwen2moe", (layer,) * source.stored_layers()),
        eos=("<|im_end|>", "<|endoftext|>"),
        nfc=True,
        dialect=Dialect(message=CHATML),
    )
