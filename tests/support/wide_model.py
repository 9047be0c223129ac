"""A hybrid model of two layers whose matrices are those K quants, and as wide, that products of many rows need."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.support.quant_blocks import random_tensor

#: columns of all matrices, and rows of the table
WIDTH, VOCAB = 1024, 64
# Query heads, the size of a head; value heads of the recurrent layer, key heads, and the size of these.
_HEADS, _HEAD, _VALUES, _KEYS, _STATE = 4, 256, 8, 2, 128


def write_wide(path: Path, kind: str = "Q4_K") -> Path:
    """A qwen35 file without a tokenizer: a recurrent layer and one of attention; matrices are of this type, and the
    table, the head and a few others Q6_K."""
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(64)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_uint32("qwen35.full_attention_interval", 2)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_group_count(_KEYS)
    writer.add_ssm_time_step_rank(_VALUES)
    writer.add_ssm_inner_size(_VALUES * _STATE)
    matrices = {
        "token_embd": (VOCAB, "Q6_K"),
        "output": (VOCAB, "Q6_K"),
        "blk.0.attn_qkv": ((2 * _KEYS + _VALUES) * _STATE, "Q6_K"),
        "blk.0.attn_gate": (_VALUES * _STATE, kind),
        "blk.0.ssm_alpha": (_VALUES, kind),
        "blk.0.ssm_beta": (_VALUES, kind),
        "blk.0.ssm_out": (WIDTH, kind),
        "blk.1.attn_q": (2 * _HEADS * _HEAD, kind),
        "blk.1.attn_k": (_HEAD, kind),
        "blk.1.attn_v": (_HEAD, "Q6_K"),
        "blk.1.attn_output": (WIDTH, kind),
        **{f"blk.{layer}.ffn_{part}": (WIDTH, kind) for layer in range(2) for part in ("gate", "up")},
        **{f"blk.{layer}.ffn_down": (WIDTH, "Q6_K") for layer in range(2)},
    }
    for number, (name, (rows, type)) in enumerate(matrices.items()):
        tensor = random_tensor(type, rows, WIDTH, number)
        writer.add_tensor(f"{name}.weight", np.asarray(tensor.raw), raw_dtype=tensor.type)
    vectors = {"blk.0.ssm_a": _VALUES, "blk.0.ssm_dt.bias": _VALUES, "blk.0.ssm_norm.weight": _STATE}
    vectors |= {"output_norm.weight": WIDTH, "blk.1.attn_q_norm.weight": _HEAD, "blk.1.attn_k_norm.weight": _HEAD}
    vectors |= {f"blk.{n}.{part}.weight": WIDTH for n in range(2) for part in ("attn_norm", "post_attention_norm")}
    for name, size in vectors.items():
        values = random.uniform(0.5, 1.5, size).astype(np.float32)
        writer.add_tensor(name, -values if name.endswith("ssm_a") else values)
    writer.add_tensor(
        "blk.0.ssm_conv1d.weight", random.standard_normal((_STATE * (2 * _KEYS + _VALUES), 4), np.float32)
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
