"""The header of a published model: its keys, and its tensors in their true shapes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from tools.convert_dflash import add_key

Type = GGMLQuantizationType
Value = bool | int | float | str | list[int] | list[float] | list[bool] | list[str]
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
    if part.startswith(("altup_", "laurel_")):
        return Type.F16
    block = int(name.split(".")[1]) if name.startswith("blk.") else 0
    type = Type.Q4_K
    if part == "output" or (part == "token_embd" and tied):
        type = Type.Q6_K
    elif part == "attn_qkv":
        type = Type.Q5_K
    elif (part == "attn_v" or part.startswith("ffn_down")) and block % 2 == 0:
        type = Type.Q6_K
    return type if shape[0] % 256 == 0 else _FALLBACK[type]


def tokenizer_keys(model: str, pre: str | None, tokens: list[str]) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(tokens),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return keys if pre is None else {**keys, "tokenizer.ggml.pre": pre}


def layer_tensors(block: int, parts: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Parts are `attn_q` for `attn_q.weight`, or have a suffix of their own."""
    for part, shape in parts.items():
        yield f"blk.{block}.{part}" + ("" if "." in part or part == "ssm_a" else ".weight"), shape


def mlp_shapes(hidden: int, width: int, suffix: str = "") -> dict[str, tuple[int, ...]]:
    return {
        f"ffn_gate{suffix}": (hidden, width),
        f"ffn_up{suffix}": (hidden, width),
        f"ffn_down{suffix}": (width, hidden),
    }


def expert_shapes(hidden: int, width: int, experts: int) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_inp": (hidden, experts),
        "ffn_gate_exps": (hidden, width, experts),
        "ffn_up_exps": (hidden, width, experts),
        "ffn_down_exps": (width, hidden, experts),
    }


def attention_shapes(
    hidden: int, heads: int, kv_heads: int, size: int, *, queries: int = 1
) -> dict[str, tuple[int, ...]]:
    """`queries` is 2 where attn_q holds gates as well."""
    return {
        "attn_q": (hidden, queries * heads * size),
        "attn_k": (hidden, kv_heads * size),
        "attn_v": (hidden, kv_heads * size),
        "attn_output": (heads * size, hidden),
        "attn_q_norm": (size,),
        "attn_k_norm": (size,),
    }


def outer_tensors(hidden: int, vocab: int, *, tied: bool) -> Iterator[Tensor]:
    yield "token_embd.weight", (hidden, vocab)
    yield "output_norm.weight", (hidden,)
    if not tied:
        yield "output.weight", (hidden, vocab)
