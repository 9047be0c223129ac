"""Headers of published models: their metadata keys and tensor shapes in files that hold no data.

Types are as in Q4_K_M files, but which half of the value and down projections gets Q6_K is simplified. The tokenizer
is cut down to a few tokens; the embedding table has its true number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from tests.support.published_hybrid import Gemma4, laguna, qwen35


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
    tensors = [*outer_tensors(hidden, vocab, tied="output" not in parts)]
    for layer in range(layers):
        tensors += layer_tensors(layer, own)
    return Published(name, architecture, {**common, **keys}, tuple(tensors))


def _qwen25() -> Published:
    hidden, heads, kv_heads, size, vocab = 3584, 28, 4, 128, 152064
    parts = attention_shapes(hidden, heads, kv_heads, size)
    del parts["attn_q_norm"], parts["attn_k_norm"]
    biases = {"attn_q.bias": (heads * size,), "attn_k.bias": (kv_heads * size,), "attn_v.bias": (kv_heads * size,)}
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    keys: dict[str, Value] = {
        "context_length": 32768,
        "feed_forward_length": 18944,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.freq_base": 1e6,
        **tokenizer_keys("gpt2", "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    whole = {**norms, **parts, **biases, **mlp_shapes(hidden, 18944), "output": (hidden, vocab)}
    return _llama_like("Qwen2.5-7B", "qwen2", 28, hidden, vocab, keys, whole)


def _olmoe() -> Published:
    hidden, heads, vocab = 2048, 16, 50304
    parts = {**attention_shapes(hidden, heads, heads, 128), "attn_q_norm": (hidden,), "attn_k_norm": (hidden,)}
    keys: dict[str, Value] = {
        "context_length": 4096,
        "feed_forward_length": 1024,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "expert_count": 64,
        "expert_used_count": 8,
        **tokenizer_keys("gpt2", "olmo", ["<|endoftext|>", "<|padding|>"]),
    }
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    whole = {**norms, **parts, **expert_shapes(hidden, 1024, 64), "output": (hidden, vocab)}
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
        **tokenizer_keys("gpt2", "command-r", ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]),
    }
    parts = {
        "attn_norm": (hidden,),
        **_headless(attention_shapes(hidden, heads, heads, 128)),
        **mlp_shapes(hidden, 22528),
    }
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
        **tokenizer_keys("gpt2", "stablelm2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    norms = {f"{norm}{ending}": (hidden,) for norm in ("attn_norm", "ffn_norm") for ending in ("", ".bias")}
    biases = {f"attn_{part}.bias": (hidden,) for part in "qkv"}
    parts = {**norms, **_headless(attention_shapes(hidden, heads, heads, 64)), **biases, **mlp_shapes(hidden, width)}
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
        **tokenizer_keys("gpt2", "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    }
    biases = {f"attn_{part}.bias": (hidden,) for part in "qkv"}
    shared = {"ffn_gate_inp_shexp": (hidden,), **mlp_shapes(hidden, 5632, "_shexp")}
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    parts = {**norms, **_headless(attention_shapes(hidden, heads, heads, 128)), **biases, **shared}
    whole = {**parts, **expert_shapes(hidden, width, experts), "output": (hidden, vocab)}
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
        **tokenizer_keys("llama", None, ["<pad>", "<eos>", "<bos>"]),
        "tokenizer.ggml.scores": [0.0] * 3,
    }
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    parts = {**norms, **_headless(attention_shapes(hidden, 8, 1, 256)), **mlp_shapes(hidden, width)}
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
        **tokenizer_keys("llama", None, ["<unk>", "<s>", "</s>"]),
    }


def _ernie() -> Published:
    hidden, vocab = 1024, 103424
    parts = attention_shapes(hidden, 16, 2, 128)
    del parts["attn_q_norm"], parts["attn_k_norm"]
    norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    whole = {**norms, **parts, **mlp_shapes(hidden, 3072)}
    return _llama_like("ERNIE-4.5-0.3B", "ernie4_5", 18, hidden, vocab, _ernie_keys(3072, 16, 2), whole)


def _ernie_moe() -> Published:
    hidden, width, layers, vocab = 2560, 12288, 28, 103424
    parts = attention_shapes(hidden, 20, 4, 128)
    del parts["attn_q_norm"], parts["attn_k_norm"]
    common = {"attn_norm": (hidden,), "ffn_norm": (hidden,), **parts}
    experts = {**expert_shapes(hidden, 1536, 64), "exp_probs_b.bias": (64,), **mlp_shapes(hidden, 3072, "_shexp")}
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
    tensors = [*outer_tensors(hidden, vocab, tied=True)]
    for layer in range(layers):
        tensors += layer_tensors(layer, {**common, **(experts if layer else mlp_shapes(hidden, width))})
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
        **tokenizer_keys("gemma4", None, ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]),
    }
    parts = {
        **dict.fromkeys(norms, (hidden,)),
        **attention_shapes(hidden, heads, kv_heads, size),
        **mlp_shapes(hidden, 10240),
    }
    return _llama_like("Gemma3-4B", "gemma3", 34, hidden, vocab, keys, parts)


def _gemma3n() -> Published:
    """Without the keys and values with which the layers were trained that read those of others."""
    hidden, vocab, layers, width, size, rank = 2048, 262144, 30, 256, 256, 64
    keys: dict[str, Value] = {
        "block_count": layers,
        "context_length": 32768,
        "embedding_length": hidden,
        "embedding_length_per_layer_input": width,
        "feed_forward_length": [8192] * layers,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [bool((layer + 1) % 5) for layer in range(layers)],
        "attention.shared_kv_layers": 10,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "activation_sparsity_scale": [1.6448534] * 10 + [-math.inf] * 20,
        "altup.active_idx": 0,
        "altup.num_inputs": 4,
        "rope.freq_base": 1e6,
        **tokenizer_keys("gemma4", None, ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]),
    }
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm", "laurel_post_norm")
    parts = {
        **dict.fromkeys((*norms, "altup_router_norm", "altup_correct_scale"), (hidden,)),
        **attention_shapes(hidden, 8, 2, size),
        **mlp_shapes(hidden, 8192),
        "inp_gate": (hidden, width),
        "proj": (width, hidden),
        "altup_router": (hidden, 4),
        "altup_predict_coef": (4, 16),
        "altup_correct_coef": (4, 4),
        "laurel_l": (hidden, rank),
        "laurel_r": (rank, hidden),
    }
    shared = {part: shape for part, shape in parts.items() if part not in ("attn_k", "attn_v", "attn_k_norm")}
    tensors = [
        ("token_embd.weight", (hidden, vocab)),
        ("output_norm.weight", (hidden,)),
        ("per_layer_token_embd.weight", (layers * width, vocab)),
        ("per_layer_model_proj.weight", (hidden, layers * width)),
        ("per_layer_proj_norm.weight", (width,)),
        ("altup_proj.weight", (hidden, hidden, 3)),
        ("altup_unembd_proj.weight", (hidden, hidden, 3)),
    ]
    for layer in range(layers):
        tensors += layer_tensors(layer, parts if layer < 20 else shared)
    return Published("Gemma3n-E2B", "gemma3n", keys, tuple(tensors))


def _gpt_oss() -> Published:
    hidden, heads, kv_heads, size, width, experts, vocab = 2880, 64, 8, 64, 2880, 32, 201088
    parts = attention_shapes(hidden, heads, kv_heads, size)
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
        **tokenizer_keys("gpt2", "gpt-4o", ["<|return|>", "<|call|>", "<|end|>"]),
    }
    biased = {"attn_q": heads * size, "attn_k": kv_heads * size, "attn_v": kv_heads * size, "attn_output": hidden}
    whole = {
        "attn_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "attn_sinks": (heads,),
        **parts,
        **{f"{part}.bias": (width,) for part, width in biased.items()},
        **expert_shapes(hidden, width, experts),
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
        **tokenizer_keys("gpt2", "deepseek-llm", ["<｜end▁of▁sentence｜>"]),
    }
    tensors = [*outer_tensors(hidden, vocab, tied=False)]
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
        sparse = {**expert_shapes(hidden, 1408, 64), **mlp_shapes(hidden, 2 * 1408, "_shexp")}
        tensors += layer_tensors(layer, {**parts, **(sparse if layer else mlp_shapes(hidden, 10944))})
    return Published("DeepSeek-V2-Lite", "deepseek2", keys, tuple(tensors))


PUBLISHED = (
    qwen35(
        "Qwen3.6-27B",
        "qwen35",
        layers=64,
        hidden=5120,
        heads=24,
        kv_heads=4,
        value_heads=48,
        ffn=mlp_shapes(5120, 17408),
        ffn_keys={"feed_forward_length": 17408},
    ),
    qwen35(
        "Qwen3.6-35B-A3B",
        "qwen35moe",
        layers=40,
        hidden=2048,
        heads=16,
        kv_heads=2,
        value_heads=32,
        ffn={**expert_shapes(2048, 512, 256), "ffn_gate_inp_shexp": (2048,), **mlp_shapes(2048, 512, "_shexp")},
        ffn_keys={
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
        },
    ),
    Gemma4(
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
    Gemma4(
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
    Gemma4(
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
    laguna(),
    _qwen25(),
    _gemma3(),
    _gemma3n(),
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
