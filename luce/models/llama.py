"""Llama and the models stored under its name (SmolLM2, Mistral, TinyLlama): dense decoder, grouped-query attention.

GGUF files of this architecture hold Q and K rows permuted so that rotary pairs are adjacent.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, attention_heads, linear_rope_scaling, model, rope_dims
from luce.models.spec import CHATML, Attention, Dialect, GatedMLP, Layer, ModelSpec, Rope

# Of the templates of models stored under this name: Llama 3, whose files name one of its three; ChatML; OpenChat;
# DeepSeek Coder.
_EOS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_turn|>",
    "<|EOT|>",
)


def spec(source: Source) -> ModelSpec:
    """The spec of a llama file."""
    if source.integer("expert_count", 0):
        raise source.refuse(
            "expert_count", "is set: mixtures of experts under the llama architecture are not supported"
        )
    heads = attention_heads(source)
    rope = Rope(
        dims=rope_dims(source, heads.head_dim),
        base=source.number("rope.freq_base", 10000.0),
        adjacent=True,
        factors="rope_freqs.weight" if "rope_freqs.weight" in source.tensors else None,
        linear=linear_rope_scaling(source),
    )
    layer = Layer(
        mixer=Attention(
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            rope=rope,
            scale=heads.head_dim**-0.5,
        ),
        ffn=GatedMLP(source.positive("feed_forward_length")),
    )
    # Models stored under this name have templates of many kinds; ChatML is the one with markers of its own.
    return replace(
        model(source, "llama", (layer,) * source.stored_layers()),
        eos=_EOS,
        dialect=Dialect(message=CHATML),
    )
