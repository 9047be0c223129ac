"""Qwen3: dense decoder, grouped-query attention with a norm on each query and key head."""

from __future__ import annotations

from luce.models.keys import Source, attention_heads, linear_rope_scaling, rope_dims
from luce.models.spec import Attention, Block, GatedMLP, ModelSpec, Rope


def spec(source: Source) -> ModelSpec:
    """The spec of a qwen3 file."""
    heads = attention_heads(source)
    block = Block(
        mixer=Attention(
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            rope=Rope(
                dims=rope_dims(source, heads.head_dim),
                base=source.number("rope.freq_base", 1e6),
                linear=linear_rope_scaling(source),
            ),
            scale=heads.head_dim**-0.5,
            qk_norm=True,
        ),
        ffn=GatedMLP(source.positive("feed_forward_length")),
    )
    return ModelSpec(
        family="qwen3",
        hidden=source.positive("embedding_length"),
        vocab=source.vocabulary(),
        context_length=source.positive("context_length"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon"),
        blocks=(block,) * source.positive("block_count"),
        tied_head="output.weight" not in source.tensors,
        eos=("<|im_end|>", "<|endoftext|>"),
        nfc=True,
    )
