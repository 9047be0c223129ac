"""Random drafts of all variants, written as GGUF files and as published checkpoints."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.convert_dflash import add_key

ARCHITECTURE = "dflash-draft"
#: GGUF name to that of a checkpoint, of the whole draft and of a layer
WHOLE = {"dflash.fc": "fc", "dflash.hidden_norm": "hidden_norm", "output_norm": "norm"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"},
    **{f"attn_{p}_norm": f"self_attn.{p}_norm" for p in "qk"},
    "attn_output": "self_attn.o_proj",
    "attn_gate": "self_attn.gate_proj",
    **{f"ffn_{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}
#: of correction heads
HEADS = {
    "dflash.domino.start": "domino_start",
    **{f"dflash.domino.gru.{p}": f"domino_gru.{p}_l0" for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    **{f"dflash.domino.head.w{i}": f"domino_head.W{i}.weight" for i in (1, 2)},
    **{f"dflash.domino.head.b{i}": f"domino_head.W{i}.bias" for i in (1, 2)},
    **{f"dflash.dspark.markov.w{i}": f"dspark_markov_head.markov_w{i}.weight" for i in (1, 2)},
    **{f"dflash.dspark.confidence.{p}": f"dspark_confidence_head.{p}" for p in ("weight", "bias")},
}
_SAFETENSORS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}


@dataclass
class MadeDraft:
    """Keys without the architecture, and tensors float32 by GGUF name; tests change either."""

    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        seed: int = 0,
        *,
        layers: int = 2,
        hidden: int = 32,
        captures: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        ffn: int = 48,
        gate: int = 0,
        capture_norms: bool = False,
        **keys: Any,
    ) -> MadeDraft:
        """A draft of about unit gain; `gate` values of its output gate per head; `keys` with underscores for dots and
        given as in the file, None to leave one out."""
        rng = np.random.default_rng(seed)
        q, kv = heads * head_dim, kv_heads * head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "dflash.fc": (hidden, captures * hidden),
            "dflash.hidden_norm": (hidden,),
            "output_norm": (hidden,),
        }
        if capture_norms:
            shapes |= {f"dflash.aux_hidden_norm.{i}": (hidden,) for i in range(captures)}
        for layer in range(layers):
            own: dict[str, tuple[int, ...]] = {
                "attn_norm": (hidden,),
                "ffn_norm": (hidden,),
                "attn_q_norm": (head_dim,),
                "attn_k_norm": (head_dim,),
                "attn_q": (q, hidden),
                "attn_k": (kv, hidden),
                "attn_v": (kv, hidden),
                "attn_output": (hidden, q),
                "ffn_gate": (ffn, hidden),
                "ffn_up": (ffn, hidden),
                "ffn_down": (hidden, ffn),
            }
            if gate:
                own["attn_gate"] = (heads * gate, hidden)
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
        tensors = {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape)
            values = 1 + 0.2 * values if len(shape) == 1 else values * shape[1] ** -0.5
            tensors[f"{name}.weight"] = _short(values)
        return cls(
            {
                "context_length": 4096,
                "embedding_length": hidden,
                "block_count": layers,
                "feed_forward_length": ffn,
                "vocab_size": 64,
                "attention.head_count": heads,
                "attention.head_count_kv": kv_heads,
                "attention.key_length": head_dim,
                "attention.value_length": head_dim,
                "attention.layer_norm_rms_epsilon": 1e-5,
                "rope.freq_base": 1000.0,
                "dflash.block_size": 8,
                "dflash.mask_token_id": 63,
                "dflash.target_layer_ids": list(range(captures)),
            },
            tensors,
        ).with_keys(**keys)

    def with_keys(self, **keys: Any) -> MadeDraft:
        """These keys changed; `rope__freq_base` is `rope.freq_base`."""
        for name, value in keys.items():
            key = name.replace("__", ".")
            if value is None:
                self.keys.pop(key, None)
            else:
                self.keys[key] = value
        return self

    def with_domino(self, vocab: int, *, width: int = 12, inner: int = 10) -> MadeDraft:
        """A head of Domino whose biases are as large as logits."""
        hidden = self.keys["embedding_length"]
        shapes = {
            "start": (width,),
            "gru.weight_ih": (3 * width, hidden),
            "gru.weight_hh": (3 * width, width),
            "gru.bias_ih": (3 * width,),
            "gru.bias_hh": (3 * width,),
            "head.w1": (inner, hidden + width),
            "head.b1": (inner,),
            "head.w2": (vocab, inner),
            "head.b2": (vocab,),
        }
        return self._headed("domino", shapes, gru_hidden_dim=width, emb_dim=inner, vocab_size=vocab)

    def with_dspark(self, vocab: int, *, rank: int = 6, confidence: int = 0) -> MadeDraft:
        """A head of DSpark; `confidence` columns of the matrix that tells how sure it is."""
        shapes: dict[str, tuple[int, ...]] = {"markov.w1": (vocab, rank), "markov.w2": (vocab, rank)}
        keys = {"markov_rank": rank, "vocab_size": vocab}
        if confidence:
            shapes |= {"confidence.weight": (1, confidence), "confidence.bias": (1,)}
            keys |= {"confidence.enabled": 1, "confidence_dim": confidence}
        return self._headed("dspark", shapes, **keys)

    def _headed(self, kind: str, shapes: Mapping[str, tuple[int, ...]], **keys: int) -> MadeDraft:
        rng = np.random.default_rng(len(shapes))
        for name, shape in shapes.items():
            self.tensors[f"dflash.{kind}.{name}"] = _short(rng.standard_normal(shape))
        self.keys |= {f"dflash.{kind}.{name}": value for name, value in {"enabled": 1, **keys}.items()}
        return self

    def write(self, path: Path, architecture: str = ARCHITECTURE) -> Path:
        """The GGUF file."""
        writer = gguf.GGUFWriter(path, architecture)
        for name, value in self.keys.items():
            add_key(writer, f"{architecture}.{name}", value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def published(self) -> dict[str, NDArray[np.float32]]:
        """The tensors under the names of a checkpoint."""
        named = {}
        for name, tensor in self.tensors.items():
            stem = name.removesuffix(".weight")
            if name in HEADS:
                named[HEADS[name]] = tensor
                continue
            if stem in WHOLE:
                own = WHOLE[stem]
            elif stem.startswith("blk."):
                _, layer, part = stem.split(".")
                own = f"layers.{layer}.{LAYER[part]}"
            else:
                own = stem.removeprefix("dflash.")
            named[f"{own}.weight"] = tensor
        return named


def _short(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Values that bfloat16 holds, so that every format has them all."""
    bits = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def safetensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """A safetensors file; uint16 arrays are bfloat16."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def brain(tensor: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Values that bfloat16 holds, in it."""
    return (tensor.view(np.uint32) >> 16).astype(np.uint16)


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], parts: int = 1
) -> Path:
    """A checkpoint, in one file or in parts with their index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if parts == 1:
        (directory / "model.safetensors").write_bytes(safetensors(tensors))
        return directory
    places = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        own = names[part::parts]
        (directory / file).write_bytes(safetensors({name: tensors[name] for name in own}))
        places |= dict.fromkeys(own, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory
