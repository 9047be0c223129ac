"""Headers of published models whose layers differ: Qwen 3.5 and 3.6, Gemma 4, Laguna."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tests.support.published_header import (
    Published,
    Value,
    attention_shapes,
    expert_shapes,
    layer_tensors,
    mlp_shapes,
    outer_tensors,
    tokenizer_keys,
)


def qwen35(
    name: str,
    architecture: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    ffn: dict[str, tuple[int, ...]],
    ffn_keys: dict[str, Value],
) -> Published:
    """Layers of gated DeltaNet, every fourth of attention, and one layer for multi-token prediction at the end."""
    size, key_heads, state, taps, vocab = 256, 16, 128, 4, 248320
    inner, channels = value_heads * state, (2 * key_heads + value_heads) * state
    keys: dict[str, Value] = {
        "block_count": layers + 1,
        "nextn_predict_layers": 1,
        "context_length": 262144,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": taps,
        "ssm.state_size": state,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": inner,
        **ffn_keys,
        **tokenizer_keys("gpt2", "qwen35", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    tensors = list(outer_tensors(hidden, vocab, tied=False))
    attention = attention_shapes(hidden, heads, kv_heads, size, queries=2)
    delta_net: dict[str, tuple[int, ...]] = {
        "attn_qkv": (hidden, channels),
        "attn_gate": (hidden, inner),
        "ssm_alpha": (hidden, value_heads),
        "ssm_beta": (hidden, value_heads),
        "ssm_a": (value_heads,),
        "ssm_dt.bias": (value_heads,),
        "ssm_conv1d": (taps, channels),
        "ssm_norm": (state,),
        "ssm_out": (inner, hidden),
    }
    norms: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "post_attention_norm": (hidden,)}
    for layer in range(layers):
        tensors += layer_tensors(layer, {**norms, **(delta_net if (layer + 1) % 4 else attention), **ffn})
    ahead: dict[str, tuple[int, ...]] = {
        "nextn.eh_proj.weight": (2 * hidden, hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
        "nextn.shared_head_norm.weight": (hidden,),
    }
    tensors += layer_tensors(layers, {**norms, **attention, **ffn, **ahead})
    return Published(name, architecture, keys, tuple(tensors))


@dataclass(frozen=True)
class Gemma4:
    """Sizes of a Gemma 4 model. Models without per-layer embeddings take V of global layers from K."""

    name: str
    layers: int
    #: layers `period - 1`, `2 * period - 1`, ... are global
    period: int
    hidden: int
    #: width of each layer
    ffn: list[int]
    heads: int
    #: of sliding and of global layers
    kv_heads: tuple[int, int]
    window: int
    context: int
    per_layer: int = 0
    shared: int = 0
    #: number, used, width
    experts: tuple[int, int, int] | None = None

    VOCAB: ClassVar[int] = 262144
    #: head sizes of sliding and of global layers
    SIZES: ClassVar[tuple[int, int]] = (256, 512)

    @property
    def sliding(self) -> list[bool]:
        """Whether each layer slides."""
        return [bool((layer + 1) % self.period) for layer in range(self.layers)]

    @property
    def kv_heads_of_layers(self) -> list[int]:
        """KV heads of each layer."""
        return [self.kv_heads[0 if flag else 1] for flag in self.sliding]

    def keys(self) -> dict[str, Value]:
        """The metadata."""
        ffn, kv_heads, (local, whole) = self.ffn, self.kv_heads_of_layers, self.SIZES
        keys: dict[str, Value] = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": ffn if len(set(ffn)) > 1 else ffn[0],
            "attention.head_count": self.heads,
            "attention.head_count_kv": kv_heads if len(set(kv_heads)) > 1 else kv_heads[0],
            "attention.key_length": whole,
            "attention.value_length": whole,
            "attention.key_length_swa": local,
            "attention.value_length_swa": local,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": self.sliding,
            "attention.shared_kv_layers": self.shared,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "rope.dimension_count": whole,
            "rope.dimension_count_swa": local,
            "embedding_length_per_layer_input": self.per_layer,
            "final_logit_softcapping": 30.0,
            **tokenizer_keys("gemma4", None, ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]),
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.add_bos_token": True,
        }
        if self.experts:
            names = ("expert_count", "expert_used_count", "expert_feed_forward_length")
            keys |= dict(zip(names, self.experts, strict=True))
        return keys

    def parts(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer."""
        hidden, local = self.hidden, self.sliding[layer]
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        parts: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(norms, (hidden,)),
            "layer_output_scale": (1,),
            **attention_shapes(hidden, self.heads, self.kv_heads_of_layers[layer], self.SIZES[0 if local else 1]),
            **mlp_shapes(hidden, self.ffn[layer]),
        }
        if layer >= self.layers - self.shared:
            parts = {part: shape for part, shape in parts.items() if part not in ("attn_k", "attn_v", "attn_k_norm")}
        elif not self.per_layer and not local:
            del parts["attn_v"]
        if self.per_layer:
            parts |= {"inp_gate": (hidden, self.per_layer), "proj": (self.per_layer, hidden), "post_norm": (hidden,)}
        if self.experts:
            number, _, width = self.experts
            parts |= {
                "ffn_gate_inp": (hidden, number),
                "ffn_gate_inp.scale": (hidden,),
                "ffn_gate_up_exps": (hidden, 2 * width, number),
                "ffn_down_exps": (width, hidden, number),
                "ffn_down_exps.scale": (number,),
                "pre_ffw_norm_2": (hidden,),
                "post_ffw_norm_1": (hidden,),
                "post_ffw_norm_2": (hidden,),
            }
        return parts

    def published(self) -> Published:
        """The header of the published file."""
        tensors = [*outer_tensors(self.hidden, self.VOCAB, tied=True), ("rope_freqs.weight", (self.SIZES[1] // 2,))]
        if self.per_layer:
            width = self.per_layer * self.layers
            tensors += [
                ("per_layer_token_embd.weight", (width, self.VOCAB)),
                ("per_layer_model_proj.weight", (self.hidden, width)),
                ("per_layer_proj_norm.weight", (self.per_layer,)),
            ]
        for layer in range(self.layers):
            tensors += layer_tensors(layer, self.parts(layer))
        return Published(self.name, "gemma4", self.keys(), tuple(tensors))


def laguna() -> Published:
    """Laguna-XS.2. Its trained length is the product of YaRN's factor and original length."""
    layers, hidden, size, kv_heads, vocab, width, experts = 40, 2048, 128, 8, 100352, 512, 256
    heads = [64 if layer % 4 else 48 for layer in range(layers)]
    keys: dict[str, Value] = {
        "block_count": layers,
        "context_length": 131072,
        "embedding_length": hidden,
        "feed_forward_length": 8192,
        "vocab_size": vocab,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.sliding_window": 512,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": experts,
        "expert_used_count": 8,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_attn_factor": 1.0,
        "rope.scaling.yarn_beta_fast": 64.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        **tokenizer_keys("gpt2", "laguna", ["<unk>", "<pad>", "〈|EOS|〉", "</assistant>"]),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    tensors = list(outer_tensors(hidden, vocab, tied=False))
    sparse = {
        "exp_probs_b.bias": (experts,),
        **expert_shapes(hidden, width, experts),
        **mlp_shapes(hidden, width, "_shexp"),
    }
    for layer in range(layers):
        parts = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_gate": (hidden, heads[layer]),
            **attention_shapes(hidden, heads[layer], kv_heads, size),
            **(sparse if layer else mlp_shapes(hidden, 8192)),
        }
        tensors += layer_tensors(layer, parts)
    return Published("Laguna-XS.2", "laguna", keys, tuple(tensors))
