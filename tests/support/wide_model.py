"""A hybrid model of two layers whose matrices are those K quants, and as wide, that products of many rows need; with a
dense MLP, or a mixture of experts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.runtime.device import Device
from tests.support.drive import Driver
from tests.support.quant_blocks import random_tensor

#: columns of all matrices, and rows of the table
WIDTH, VOCAB = 1024, 64
# Query heads, the size of a head; value heads of the recurrent layer, key heads, and the size of these.
_HEADS, _HEAD, _VALUES, _KEYS, _STATE = 4, 256, 8, 2, 128
# Experts, those chosen, and the features of each and of a shared one that joins them.
_EXPERTS, _USED, _INNER = 5, 2, 512


def write_wide(path: Path, kind: str = "Q4_K", *, experts: str = "") -> Path:
    """A qwen35 file without a tokenizer, or with a type of experts a qwen35moe file: a recurrent layer and one of
    attention; matrices are of this type, and the table, the head and a few others Q6_K, the routers F32."""
    random = np.random.default_rng(3)
    family = "qwen35moe" if experts else "qwen35"
    writer = gguf.GGUFWriter(path, family)
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
    writer.add_array(f"{family}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_uint32(f"{family}.full_attention_interval", 2)
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
    }
    if not experts:
        matrices |= {f"blk.{layer}.ffn_{part}": (WIDTH, kind) for layer in range(2) for part in ("gate", "up")}
        matrices |= {f"blk.{layer}.ffn_down": (WIDTH, "Q6_K") for layer in range(2)}
    for number, (name, (rows, type)) in enumerate(matrices.items()):
        tensor = random_tensor(type, rows, WIDTH, number)
        writer.add_tensor(f"{name}.weight", np.asarray(tensor.raw), raw_dtype=tensor.type)
    if experts:
        _add_experts(writer, kind, experts)
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


def open_wide(
    stack: ExitStack,
    folder: Path,
    *devices: Device,
    kind: str = "Q4_K",
    experts: str = "",
    slots: int = 5,
    **options: Any,
) -> Driver:
    """A driver of the model on devices until the stack ends. Further arguments are ServingOptions."""
    path = write_wide(folder / f"{kind}{experts}.gguf", kind, experts=experts)
    file = stack.enter_context(open_gguf(path))
    spec = read_spec(Source(str(path), file.metadata, file.tensors))
    backend = LayerSplitBackend(file, spec, devices, ServingOptions(slots=slots, **options))
    stack.callback(backend.close)
    return Driver(backend)


def _add_experts(writer: gguf.GGUFWriter, kind: str, experts: str) -> None:
    # A shared MLP of another type does not join the experts, and many rows want wide matrices.
    shared = _INNER if experts == kind else WIDTH
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(_USED)
    writer.add_expert_feed_forward_length(_INNER)
    writer.add_expert_shared_feed_forward_length(shared)
    for layer in range(2):
        routers = np.random.default_rng(layer).standard_normal((_EXPERTS + 1, WIDTH)).astype(np.float32)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", routers[:-1])
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", routers[-1])
        for suffix, count, inner, own in (("_exps", _EXPERTS, _INNER, experts), ("_shexp", 1, shared, kind)):
            for number, (part, rows, cols, type) in enumerate(
                (("gate", inner, WIDTH, own), ("up", inner, WIDTH, own), ("down", WIDTH, inner, "Q6_K"))
            ):
                tensor = random_tensor(type, count * rows, cols, 100 * layer + 10 * count + number)
                raw = np.asarray(tensor.raw)
                raw = raw.reshape(count, rows, -1) if suffix == "_exps" else raw
                writer.add_tensor(f"blk.{layer}.ffn_{part}{suffix}.weight", raw, raw_dtype=tensor.type)
