"""Llama and the models stored under its name (SmolLM2, Mistral, Mixtral, TinyLlama): grouped-query attention, dense or
with experts.

GGUF files of this architecture hold Q and K rows permuted so that rotary pairs are adjacent.
"""

from __future__ import annotations

from dataclasses import replace

from luce.models.keys import Source, model, read_attention, read_mlp, read_rope
from luce.models.spec import CHATML, Dialect, GatedMLP, Layer, ModelSpec, MoE

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
    layer = Layer(read_attention(source, read_rope(source, adjacent=True)), dense_or_mixtral(source))
    # Models stored under this name have templates of many kinds; ChatML is the one with markers of its own.
    return replace(
        model(source, "llama", (layer,) * source.stored_layers()),
        eos=_EOS,
        dialect=Dialect(message=CHATML),
    )


def dense_or_mixtral(source: Source) -> GatedMLP | MoE:
    """A dense MLP, or Mixtral's experts, which are as wide."""
    experts = source.integer("expert_count", 0)
    if not experts:
        return read_mlp(source)
    return MoE(
        experts=experts,
        used=source.positive("expert_used_count"),
        hidden=source.positive("feed_forward_length"),
        shared=0,
        gating="softmax",
    )
