"""The trained weights as GGUF files, quantised, with the layout of published files of these families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from . import draft, draft2, drafter, target
from .data import CHAT_TEMPLATE, END, MASK, SPECIALS, VOCAB, token_id
from .layers import EPS

Floats = NDArray[np.float32]
_DRAFT = "qwen35-dflash-draft"


def q6_k(values: Floats) -> NDArray[np.uint8]:
    """Q6_K blocks of rows whose length is a multiple of 256: 6-bit numbers, int8 scales of 16, one f16 scale."""
    x = values.reshape(-1, 16, 16)
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    scales = largest / -32.0
    d = (np.abs(scales).max(-1) / 127.0).astype(np.float16)
    wide = np.where(d == 0, 1, d).astype(np.float32)
    steps = np.clip(np.round(scales / wide[:, None]), -128, 127).astype(np.int8)
    unit = wide[:, None] * steps
    rounded = np.round(x / np.where(unit == 0, 1, unit)[..., None])
    q = (np.clip(rounded, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128, quarters of 32
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = sum(q[:, :, i] >> 4 << 2 * i for i in range(4))
    parts = (low.reshape(-1, 128), np.asarray(high).reshape(-1, 64), steps.view(np.uint8), d[:, None].view(np.uint8))
    return np.concatenate(parts, -1).reshape(*values.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, name: str, values: Floats, kind: Type) -> None:
    values = np.ascontiguousarray(values, np.float32)
    if kind == Type.F32:
        writer.add_tensor(name, values)
    else:
        raw = q6_k(values) if kind == Type.Q6_K else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)


def _kind(name: str, values: Floats, matrices: Type, mixed: tuple[str, ...]) -> Type:
    """F32 for vectors and convolutions; Q6_K for the tensors in `mixed`, `matrices` for other matrices."""
    if values.ndim != 2 or ("conv" in name and not name.endswith("conv_proj.weight")) or matrices == Type.F32:
        return Type.F32
    return Type.Q6_K if any(part in name for part in mixed) else matrices


def _tokenizer(writer: gguf.GGUFWriter, bpe: tokenizers.Tokenizer) -> None:
    texts = [bpe.id_to_token(i) for i in range(VOCAB)]
    control = {text for text, flag in SPECIALS.items() if flag}
    kinds = [gguf.TokenType.NORMAL] * VOCAB
    for text in SPECIALS:
        kinds[token_id(bpe, text)] = gguf.TokenType.CONTROL if text in control else gguf.TokenType.USER_DEFINED
    merges = json.loads(bpe.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(token_id(bpe, END))
    writer.add_eos_token_id(token_id(bpe, "<|im_end|>"))
    writer.add_pad_token_id(token_id(bpe, END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write(writer: gguf.GGUFWriter, weights: Mapping[str, Floats], matrices: Type, mixed: tuple[str, ...]) -> None:
    for name, values in weights.items():
        _add(writer, name, values, _kind(name, values, matrices, mixed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arrays(weights: Mapping[str, Tensor]) -> dict[str, Floats]:
    return {name: w.float().numpy() for name, w in weights.items()}


def _described(path: Path, architecture: str, name: str, sizes: ModuleType, matrices: Type) -> gguf.GGUFWriter:
    """A file with the keys that all three models share; `sizes` is the model's module."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_license("apache-2.0")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if matrices == Type.Q8_0 else gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(sizes.CONTEXT)
    writer.add_block_count(sizes.LAYERS)
    writer.add_embedding_length(sizes.HIDDEN)
    writer.add_feed_forward_length(sizes.FFN)
    writer.add_head_count(sizes.HEADS)
    writer.add_head_count_kv(sizes.KV_HEADS)
    writer.add_key_length(sizes.HEAD)
    writer.add_value_length(sizes.HEAD)
    writer.add_rope_freq_base(sizes.ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPS)
    return writer


def write_target(
    path: Path, weights: Mapping[str, Tensor], bpe: tokenizers.Tokenizer, matrices: Type = Type.Q8_0
) -> None:
    """A qwen35 file: tables and feed-forward Q6_K, other matrices `matrices`; all F32 if that is F32."""
    arrays = _arrays(weights)
    for name in list(arrays):
        if name.endswith("ssm_a"):
            arrays[name] = -np.exp(arrays[name])
    writer = _described(path, "qwen35", "luce-tiny", target, matrices)
    writer.add_rope_dimension_count(target.ROPE_DIMS)
    writer.add_rope_dimension_sections([3, 3, 2, 0])
    writer.add_uint32("qwen35.full_attention_interval", target.INTERVAL)
    writer.add_ssm_conv_kernel(target.TAPS)
    writer.add_ssm_state_size(target.STATE)
    writer.add_ssm_group_count(target.KEY_HEADS)
    writer.add_ssm_time_step_rank(target.VALUE_HEADS)
    writer.add_ssm_inner_size(target.VALUE_HEADS * target.STATE)
    _tokenizer(writer, bpe)
    _write(writer, arrays, matrices, ("token_embd", "output.weight", "ffn_"))


def write_drafter(
    path: Path, weights: Mapping[str, Tensor], bpe: tokenizers.Tokenizer, matrices: Type = Type.Q8_0
) -> None:
    """A qwen3 file with a tied head."""
    writer = _described(path, "qwen3", "luce-tiny-drafter", drafter, matrices)
    _tokenizer(writer, bpe)
    _write(writer, _arrays(weights), matrices, ())


def write_draft(
    path: Path, weights: Mapping[str, Tensor], bpe: tokenizers.Tokenizer, matrices: Type = Type.Q8_0
) -> None:
    """A DFlash draft: no tokenizer, table or head of its own."""
    _write(_draft_described(path, "luce-tiny-draft", bpe, matrices), _arrays(weights), matrices, ())


def write_draft2(
    path: Path, weights: Mapping[str, Tensor], bpe: tokenizers.Tokenizer, matrices: Type = Type.Q8_0
) -> None:
    """A DFlash2 draft: fusion and feed-forward Q6_K, other matrices `matrices`; all F32 if that is F32."""
    writer = _draft_described(path, "luce-tiny-draft2", bpe, matrices)
    writer.add_bool(f"{_DRAFT}.attention.causal", False)
    for name, value in (("conv_kernel_size", draft2.TAPS), ("conv_group_size", draft2.GROUP)):
        writer.add_uint32(f"{_DRAFT}.dflash.{name}", value)
    for name, value in (("selector_rank", draft2.RANK), ("selector_top_k", draft2.TOP)):
        writer.add_uint32(f"{_DRAFT}.dflash.{name}", value)
    _write(writer, _arrays(weights), matrices, ("dflash.fc", "ffn_gate", "ffn_up", "ffn_down"))


def _draft_described(path: Path, name: str, bpe: tokenizers.Tokenizer, matrices: Type) -> gguf.GGUFWriter:
    """A file with the keys that drafts of both generations have."""
    prefix = _DRAFT
    writer = _described(path, prefix, name, draft, matrices)
    writer.add_vocab_size(VOCAB)
    writer.add_uint32(f"{prefix}.dflash.n_target_layers", len(draft.CAPTURE))
    writer.add_uint32(f"{prefix}.dflash.n_target_features", len(draft.CAPTURE) * draft.HIDDEN)
    writer.add_uint32(f"{prefix}.dflash.block_size", draft.BLOCK)
    writer.add_uint32(f"{prefix}.dflash.mask_token_id", token_id(bpe, MASK))
    writer.add_array(f"{prefix}.dflash.target_layer_ids", list(draft.CAPTURE))
    return writer


WRITERS = {"target": write_target, "drafter": write_drafter, "draft": write_draft, "draft2": write_draft2}


def read(path: Path) -> dict[str, Tensor]:
    """A file's tensors, decoded to float32, by name, in the form that training uses."""
    result = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        values = np.log(-values) if tensor.name.endswith("ssm_a") else values.copy()
        result[tensor.name] = torch.from_numpy(values)
    return result
