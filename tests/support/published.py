"""Headers of published models: their metadata keys and tensor shapes in files that hold no data.

Types are as in Q4_K_M files, but which half of the value and down projections gets Q6_K is simplified. The tokenizer
is cut down to a few tokens; the embedding table has its true number of rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from tools.convert_dflash import add_key

Type = GGMLQuantizationType
Value = bool | int | float | str | list[int] | list[bool] | list[str]
#: name and GGUF shape (ne0 first)
Tensor = tuple[str, tuple[int, ...]]

_ALIGNMENT = 32
#: for rows that are no multiple of 256
_FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}


@dataclass(frozen=True)
class Published:
    """One model. `keys` lack the architecture's prefix, except those of the tokenizer."""

    name: str
    architecture: str
    keys: Mapping[str, Value]
    tensors: tuple[Tensor, ...]

    def write(self, directory: Path) -> Path:
        """A GGUF file of the model's full size with a hole in the place of all data."""
        path = directory / f"{self.name}.gguf"
        writer = GGUFWriter(path, self.architecture)
        writer.add_string("general.name", self.name)
        for key, value in self.keys.items():
            add_key(writer, key if key.startswith("tokenizer.") else f"{self.architecture}.{key}", value)
        size = 0
        tied = all(name != "output.weight" for name, _ in self.tensors)
        for name, shape in self.tensors:
            type = _type(name, shape, tied)
            elements, block = GGML_QUANT_SIZES[type]
            nbytes = math.prod(shape) // elements * block
            writer.add_tensor_info(name, shape[::-1], np.dtype(np.float32), nbytes, raw_dtype=type)
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        os.truncate(path, -(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT + size)
        return path


def _type(name: str, shape: tuple[int, ...], tied: bool) -> Type:
    part = name.split(".")[-2]
    if len(shape) == 1 or part in ("ssm_conv1d", "ffn_gate_inp") or name.endswith(".bias"):
        return Type.F32
    block = int(name.split(".")[1]) if name.startswith("blk.") else 0
    type = Type.Q4_K
    if part == "output" or (part == "token_embd" and tied):
        type = Type.Q6_K
    elif part == "attn_qkv":
        type = Type.Q5_K
    elif (part == "attn_v" or part.startswith("ffn_down")) and block % 2 == 0:
        type = Type.Q6_K
    return type if shape[0] % 256 == 0 else _FALLBACK[type]


def _tokenizer(model: str, pre: str | None, tokens: list[str]) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(tokens),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return keys if pre is None else {**keys, "tokenizer.ggml.pre": pre}


def _named(block: int, parts: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Parts are `attn_q` for `attn_q.weight`, or have a suffix of their own."""
    for part, shape in parts.items():
        yield f"blk.{block}.{part}" + ("" if "." in part or part == "ssm_a" else ".weight"), shape


def _mlp(hidden: int, width: int, suffix: str = "") -> dict[str, tuple[int, ...]]:
    return {
        f"ffn_gate{suffix}": (hidden, width),
        f"ffn_up{suffix}": (hidden, width),
        f"ffn_down{suffix}": (width, hidden),
    }


def _experts(hidden: int, width: int, experts: int) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_inp": (hidden, experts),
        "ffn_gate_exps": (hidden, width, experts),
        "ffn_up_exps": (hidden, width, experts),
        "ffn_down_exps": (width, hidden, experts),
    }


def _attention(hidden: int, heads: int, kv_heads: int, size: int, *, queries: int = 1) -> dict[str, tuple[int, ...]]:
    """`queries` is 2 where attn_q holds gates as well."""
    return {
        "attn_q": (hidden, queries * heads * size),
        "attn_k": (hidden, kv_heads * size),
        "attn_v": (hidden, kv_heads * size),
        "attn_output": (heads * size, hidden),
        "attn_q_norm": (size,),
        "attn_k_norm": (size,),
    }


def _outer(hidden: int, vocab: int, *, tied: bool) -> Iterator[Tensor]:
    yield "token_embd.weight", (hidden, vocab)
    yield "output_norm.weight", (hidden,)
    if not tied:
        yield "output.weight", (hidden, vocab)


def _qwen35(
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
        **_tokenizer("gpt2", "qwen35", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    tensors = list(_outer(hidden, vocab, tied=False))
    attention = _attention(hidden, heads, kv_heads, size, queries=2)
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
        tensors += _named(layer, {**norms, **(delta_net if (layer + 1) % 4 else attention), **ffn})
    ahead: dict[str, tuple[int, ...]] = {
        "nextn.eh_proj.weight": (2 * hidden, hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
        "nextn.shared_head_norm.weight": (hidden,),
    }
    tensors += _named(layers, {**norms, **attention, **ffn, **ahead})
    return Published(name, architecture, keys, tuple(tensors))


@dataclass(frozen=True)
class _Gemma4:
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
            **_tokenizer("gemma4", None, ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]),
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
            **_attention(hidden, self.heads, self.kv_heads_of_layers[layer], self.SIZES[0 if local else 1]),
            **_mlp(hidden, self.ffn[layer]),
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
        tensors = [*_outer(self.hidden, self.VOCAB, tied=True), ("rope_freqs.weight", (self.SIZES[1] // 2,))]
        if self.per_layer:
            width = self.per_layer * self.layers
            tensors += [
                ("per_layer_token_embd.weight", (width, self.VOCAB)),
                ("per_layer_model_proj.weight", (self.hidden, width)),
                ("per_layer_proj_norm.weight", (self.per_layer,)),
            ]
        for layer in range(self.layers):
            tensors += _named(layer, self.parts(layer))
        return Published(self.name, "gemma4", self.keys(), tuple(tensors))


def _laguna() -> Published:
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
        **_tokenizer("gpt2", "laguna", ["<unk>", "<pad>", "〈|EOS|〉", "</assistant>"]),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    tensors = list(_outer(hidden, vocab, tied=False))
    sparse = {"exp_probs_b.bias": (experts,), **_experts(hidden, width, experts), **_mlp(hidden, width, "_shexp")}
    for layer in range(layers):
        parts = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_gate": (hidden, heads[layer]),
            **_attention(hidden, heads[layer], kv_heads, size),
            **(sparse if layer else _mlp(hidden, 8192)),
        }
        tensors += _named(layer, parts)
    return Published("Laguna-XS.2", "laguna", keys, tuple(tensors))


def _llama_like(
    name: str, architecture: str, layers: int, hidden: int, vocab: int, keys: dict[str, Value], parts: Mapping[str, Any]
) -> Published:
    """A model whose layers have the same parts, with RMS norms. Tied unless `parts` has an `output`."""
    own = {part: shape for part, shape in parts.items() if part != "output"}
    common: dict[str, Value] = {
        "block_count": layers,
        "embedding_length": hidden,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    tensors = [*_outer(hidden, vocab, tied="output" not in parts)]
    for layer in range(layers):
        tensors += _named(layer, own)
    return Published(name, architecture, {**common, **keys}, tuple(tensors))


def _qwen25() -> Published:
    hidden, heads, kv_heads, size, vocab = 3584, 28, 4, 128, 152064
    parts = _attention(hidden, heads, kv_heads, size)
    del parts["attn_q_norm"], parts["attn_k_norm"]
    biases = {"attn_q.bias": (heads * size,), "attn_k.bias": (kv_heads * size,), "attn_v.bias": (kv_heads * size,)}
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    keys: dict[str, Value] = {
        "context_length": 32768,
        "feed_forward_length": 18944,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.freq_base": 1e6,
        **_tokenizer("gpt2", "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    whole = {**norms, **parts, **biases, **_mlp(hidden, 18944), "output": (hidden, vocab)}
    return _llama_like("Qwen2.5-7B", "qwen2", 28, hidden, vocab, keys, whole)


def _olmoe() -> Published:
    hidden, heads, vocab = 2048, 16, 50304
    parts = {**_attention(hidden, heads, heads, 128), "attn_q_norm": (hidden,), "attn_k_norm": (hidden,)}
    keys: dict[str, Value] = {
        "context_length": 4096,
        "feed_forward_length": 1024,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "expert_count": 64,
        "expert_used_count": 8,
        **_tokenizer("gpt2", "olmo", ["<|endoftext|>", "<|padding|>"]),
    }
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    whole = {**norms, **parts, **_experts(hidden, 1024, 64), "output": (hidden, vocab)}
    return _llama_like("OLMoE-1B-7B", "olmoe", 16, hidden, vocab, keys, whole)


def _headless(parts: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """An attention without norms of heads."""
    return {part: shape for part, shape in parts.items() if part not in ("attn_q_norm", "attn_k_norm")}


def _command_r() -> Published:
    hidden, heads, vocab = 8192, 64, 256000
    keys: dict[str, Value] = {
        "context_length": 131072,
        "feed_forward_length": 22528,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 8e6,
        "rope.scaling.type": "none",
        "logit_scale": 0.0625,
        **_tokenizer("gpt2", "command-r", ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]),
    }
    parts = {"attn_norm": (hidden,), **_headless(_attention(hidden, heads, heads, 128)), **_mlp(hidden, 22528)}
    return _llama_like("Command-R-35B", "command-r", 40, hidden, vocab, keys, parts)


def _stablelm() -> Published:
    hidden, heads, width, vocab = 2048, 32, 5632, 100352
    keys: dict[str, Value] = {
        "context_length": 4096,
        "feed_forward_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "use_parallel_residual": False,
        **_tokenizer("gpt2", "stablelm2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    norms = {f"{norm}{ending}": (hidden,) for norm in ("attn_norm", "ffn_norm") for ending in ("", ".bias")}
    biases = {f"attn_{part}.bias": (hidden,) for part in "qkv"}
    parts = {**norms, **_headless(_attention(hidden, heads, heads, 64)), **biases, **_mlp(hidden, width)}
    found = _llama_like("StableLM-2-1.6B", "stablelm", 24, hidden, vocab, keys, {**parts, "output": (hidden, vocab)})
    return replace(found, tensors=(*found.tensors, ("output_norm.bias", (hidden,))))


def _qwen2_moe() -> Published:
    hidden, heads, experts, width, vocab = 2048, 16, 60, 1408, 151936
    keys: dict[str, Value] = {
        "context_length": 8192,
        "feed_forward_length": 5632,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "rope.freq_base": 1e6,
        "expert_count": experts,
        "expert_used_count": 4,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": 5632,
        **_tokenizer("gpt2", "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    biases = {f"attn_{part}.bias": (hidden,) for part in "qkv"}
    shared = {"ffn_gate_inp_shexp": (hidden,), **_mlp(hidden, 5632, "_shexp")}
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    parts = {**norms, **_headless(_attention(hidden, heads, heads, 128)), **biases, **shared}
    whole = {**parts, **_experts(hidden, width, experts), "output": (hidden, vocab)}
    return _llama_like("Qwen1.5-MoE-A2.7B", "qwen2moe", 24, hidden, vocab, keys, whole)


def _gemma() -> Published:
    hidden, width = 2048, 16384
    keys: dict[str, Value] = {
        "context_length": 8192,
        "feed_forward_length": width,
        "attention.head_count": 8,
        "attention.head_count_kv": 1,
        "attention.key_length": 256,
        "attention.value_length": 256,
        **_tokenizer("llama", None, ["<pad>", "<eos>", "<bos>"]),
        "tokenizer.ggml.scores": [0.0] * 3,
    }
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    parts = {**norms, **_headless(_attention(hidden, 8, 1, 256)), **_mlp(hidden, width)}
    return _llama_like("Gemma-2B", "gemma", 18, hidden, 256000, keys, parts)


def _ernie_keys(width: int, heads: int, kv_heads: int) -> dict[str, Value]:
    return {
        "context_length": 131072,
        "feed_forward_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": 128,
        **_tokenizer("llama", None, ["<unk>", "<s>", "</s>"]),
    }


def _ernie() -> Published:
    hidden, vocab = 1024, 103424
    parts = _attention(hidden, 16, 2, 128)
    del parts["attn_q_norm"], parts["attn_k_norm"]
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    whole = {**norms, **parts, **_mlp(hidden, 3072)}
    return _llama_like("ERNIE-4.5-0.3B", "ernie4_5", 18, hidden, vocab, _ernie_keys(3072, 16, 2), whole)


def _ernie_moe() -> Published:
    hidden, width, layers, vocab = 2560, 12288, 28, 103424
    parts = _attention(hidden, 20, 4, 128)
    del parts["attn_q_norm"], parts["attn_k_norm"]
    common = {"attn_norm": (hidden,), "ffn_norm": (hidden,), **parts}
    experts = {**_experts(hidden, 1536, 64), "exp_probs_b.bias": (64,), **_mlp(hidden, 3072, "_shexp")}
    keys: dict[str, Value] = {
        "block_count": layers,
        "embedding_length": hidden,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **_ernie_keys(width, 20, 4),
        "expert_count": 64,
        "expert_used_count": 6,
        "expert_feed_forward_length": 1536,
        "expert_shared_count": 2,
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": 1,
        # As the converter writes it, which is right for this model alone.
        "expert_shared_feed_forward_length": width // 4,
    }
    tensors = [*_outer(hidden, vocab, tied=True)]
    for layer in range(layers):
        tensors += _named(layer, {**common, **(experts if layer else _mlp(hidden, width))})
    return Published("ERNIE-4.5-21B-A3B", "ernie4_5-moe", keys, tuple(tensors))


def _gemma3() -> Published:
    hidden, heads, kv_heads, size, vocab = 2560, 8, 4, 256, 262144
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    keys: dict[str, Value] = {
        "context_length": 131072,
        "feed_forward_length": 10240,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.sliding_window": 1024,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        **_tokenizer("gemma4", None, ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]),
    }
    parts = {
        **dict.fromkeys(norms, (hidden,)),
        **_attention(hidden, heads, kv_heads, size),
        **_mlp(hidden, 10240),
    }
    return _llama_like("Gemma3-4B", "gemma3", 34, hidden, vocab, keys, parts)


def _gpt_oss() -> Published:
    hidden, heads, kv_heads, size, width, experts, vocab = 2880, 64, 8, 64, 2880, 32, 201088
    parts = _attention(hidden, heads, kv_heads, size)
    del parts["attn_q_norm"], parts["attn_k_norm"]
    keys: dict[str, Value] = {
        "context_length": 131072,
        "feed_forward_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.sliding_window": 128,
        "expert_count": experts,
        "expert_used_count": 4,
        "expert_feed_forward_length": width,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        **_tokenizer("gpt2", "gpt-4o", ["<|return|>", "<|call|>", "<|end|>"]),
    }
    biased = {"attn_q": heads * size, "attn_k": kv_heads * size, "attn_v": kv_heads * size, "attn_output": hidden}
    whole = {
        "attn_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "attn_sinks": (heads,),
        **parts,
        **{f"{part}.bias": (width,) for part, width in biased.items()},
        **_experts(hidden, width, experts),
        "ffn_gate_inp.bias": (experts,),
        **{f"ffn_{part}_exps.bias": (width, experts) for part in ("gate", "up", "down")},
        "output": (hidden, vocab),
    }
    return _llama_like("gpt-oss-20b", "gpt-oss", 24, hidden, vocab, keys, whole)


def _deepseek_v2_lite() -> Published:
    hidden, heads, vocab, rank, turned, plain, value = 2048, 16, 102400, 512, 64, 128, 128
    keys: dict[str, Value] = {
        "block_count": 27,
        "embedding_length": hidden,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 163840,
        "feed_forward_length": 10944,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": plain + turned,
        "attention.value_length_mla": value,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": turned,
        "rope.freq_base": 1e4,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        "leading_dense_block_count": 1,
        "expert_count": 64,
        "expert_used_count": 6,
        "expert_feed_forward_length": 1408,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.0,
        **_tokenizer("gpt2", "deepseek-llm", ["<｜end▁of▁sentence｜>"]),
    }
    tensors = [*_outer(hidden, vocab, tied=False)]
    for layer in range(27):
        parts = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (hidden, heads * (plain + turned)),
            "attn_kv_a_mqa": (hidden, rank + turned),
            "attn_kv_a_norm": (rank,),
            "attn_k_b": (plain, rank, heads),
            "attn_v_b": (rank, value, heads),
            "attn_output": (heads * value, hidden),
        }
        sparse = {**_experts(hidden, 1408, 64), **_mlp(hidden, 2 * 1408, "_shexp")}
        tensors += _named(layer, {**parts, **(sparse if layer else _mlp(hidden, 10944))})
    return Published("DeepSeek-V2-Lite", "deepseek2", keys, tuple(tensors))


PUBLISHED = (
    _qwen35(
        "Qwen3.6-27B",
        "qwen35",
        layers=64,
        hidden=5120,
        heads=24,
        kv_heads=4,
        value_heads=48,
        ffn=_mlp(5120, 17408),
        ffn_keys={"feed_forward_length": 17408},
    ),
    _qwen35(
        "Qwen3.6-35B-A3B",
        "qwen35moe",
        layers=40,
        hidden=2048,
        heads=16,
        kv_heads=2,
        value_heads=32,
        ffn={**_experts(2048, 512, 256), "ffn_gate_inp_shexp": (2048,), **_mlp(2048, 512, "_shexp")},
        ffn_keys={
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
        },
    ),
    _Gemma4(
        "Gemma4-E2B",
        layers=35,
        period=5,
        hidden=1536,
        ffn=[6144] * 15 + [12288] * 20,
        heads=8,
        kv_heads=(1, 1),
        window=512,
        context=131072,
        per_layer=256,
        shared=20,
    ).published(),
    _Gemma4(
        "Gemma4-26B-A4B",
        layers=30,
        period=6,
        hidden=2816,
        ffn=[2112] * 30,
        heads=16,
        kv_heads=(8, 2),
        window=1024,
        context=262144,
        experts=(128, 8, 704),
    ).published(),
    _Gemma4(
        "Gemma4-31B",
        layers=60,
        period=6,
        hidden=5376,
        ffn=[21504] * 60,
        heads=32,
        kv_heads=(16, 4),
        window=1024,
        context=262144,
    ).published(),
    _laguna(),
    _qwen25(),
    _gemma3(),
    _gpt_oss(),
    _deepseek_v2_lite(),
    _olmoe(),
    _ernie(),
    _ernie_moe(),
    _command_r(),
    _stablelm(),
    _qwen2_moe(),
    _gemma(),
)
