"""A published DFlash checkpoint (config.json, safetensors), read as a GGUF file with the keys of
luce.draft.dflash.spec.

A safetensors file is a uint64 length (little endian), that many bytes of JSON {name: {dtype, shape, data_offsets}}, and
the tensors' bytes, from which the offsets count. A checkpoint of several files names them in
model.safetensors.index.json.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from luce.draft.dflash.correction import DOMINO, DSPARK, SELECTOR_BEFORE, SELECTOR_HIDDEN, SELECTOR_NEXT
from luce.draft.dflash.spec import (
    CAPTURE_NORM,
    FINAL_NORM,
    FUSION,
    FUSION_NORM,
    MASK_EMBEDDING,
)
from luce.errors import FormatError, ModelError, UnsupportedError
from luce.gguf.metadata import Metadata, Value
from luce.gguf.model_file import ModelFile
from luce.gguf.reader import GGUFFile, TensorInfo

_INDEX, _WEIGHTS, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
#: Far above real ones.
_MOST_JSON, _MOST_TENSORS = 1 << 25, 1 << 14
_TYPES = {
    "F32": (GGMLQuantizationType.F32, 4),
    "F16": (GGMLQuantizationType.F16, 2),
    "BF16": (GGMLQuantizationType.BF16, 2),
}
_ARCHITECTURE = "dflash-draft"
#: `architectures` of published checkpoints, of both generations, and of those of transformers' own class
_PUBLISHED, _DFLASH2, _NATIVE = "DFlashDraftModel", "DFlash2DraftModel", "MuseGlimmerAssistantModel"

_WHOLE = {
    "fc.weight": FUSION[0],
    "encoder.fc.weight": FUSION[0],
    "hidden_norm.weight": FUSION_NORM[0],
    "encoder.output_norm_enc.weight": FUSION_NORM[0],
    "norm.weight": FINAL_NORM,
    "mask_embedding": MASK_EMBEDDING,
    "mask_embedding.weight": MASK_EMBEDDING,
    "candidate_selector.hidden_projection.weight": SELECTOR_HIDDEN,
    "candidate_selector.predecessor_codebook": SELECTOR_BEFORE,
    "candidate_selector.predecessor_codebook.weight": SELECTOR_BEFORE,
    "candidate_selector.successor_codebook": SELECTOR_NEXT,
    "candidate_selector.successor_codebook.weight": SELECTOR_NEXT,
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.gate_proj": "attn_gate",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
#: of a layer, without .weight in either file
_BARE = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
#: tensors of correction heads, whose sizes are in no key
_HEADS = {
    "domino_start": f"{DOMINO}start",
    **{f"domino_gru.{part}_l0": f"{DOMINO}gru.{part}" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    **{f"domino_head.W{i}.weight": f"{DOMINO}head.w{i}" for i in (1, 2)},
    **{f"domino_head.W{i}.bias": f"{DOMINO}head.b{i}" for i in (1, 2)},
    **{
        f"{prefix}markov_head.markov_w{i}.weight": f"{DSPARK}markov.w{i}"
        for prefix in ("dspark_", "mtp.2.")
        for i in (1, 2)
    },
    **{
        f"{prefix}.{part}": f"{DSPARK}confidence.{part}"
        for prefix in ("dspark_confidence_head", "mtp.2.confidence_head.proj")
        for part in ("weight", "bias")
    },
}
_CAPTURE_NORMS = ("aux_hidden_norm.", "aux_hidden_norms.")

# Keys of config.json that are read, and keys without an effect on the draft.
_INTEGERS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
_DFLASH_INTEGERS = {"block_size": "dflash.block_size", "mask_token_id": "dflash.mask_token_id"}
_DFLASH2_INTEGERS = {
    name: f"dflash.{name}" for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
}
_DFLASH_NUMBERS = {
    "input_embedding_scale": "dflash.input_embedding_scale",
    "output_multiplier": "dflash.output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "backbone_rotary_base": "dflash.backbone_rotary_base",
}
_IGNORED = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_window_layers",
        "model_type",
        "num_target_layers",
        "pad_token_id",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_name_or_path",
    }
)
_OTHERWISE_READ = frozenset(
    {
        "dflash_config",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "is_causal",
        "hidden_act",
        "attention_bias",
        "context_kv_layer_norm",
        "target_layer_ids",
        *_INTEGERS,
        *_DFLASH_INTEGERS,
        *_DFLASH_NUMBERS,
    }
)
_DFLASH_READ = frozenset({"causal", "context_kv_layer_norm", "target_layer_ids", *_DFLASH_INTEGERS, *_DFLASH_NUMBERS})
_DFLASH2_READ = frozenset({"projector_type", *_DFLASH2_INTEGERS})


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint: its directory or one of its files."""
    return path.is_dir() or path.name.endswith((".safetensors", ".safetensors.index.json"))


def open_checkpoint(path: Path) -> GGUFFile:
    """Open a checkpoint. Raises ModelError if a file cannot be opened, FormatError if its bytes are wrong, and
    UnsupportedError naming the key or tensor that Luce does not support."""
    directory = path if path.is_dir() else path.parent
    config = _json(directory / _CONFIG)
    paths = _parts(path if path.is_file() else directory / _WEIGHTS, directory)
    tensors: dict[str, TensorInfo] = {}
    files = []
    for part, file in enumerate(paths):
        data = ModelFile(file)
        files.append(data)
        for info in _tensors(data, part):
            if info.name in tensors:
                raise FormatError(f"{file}: tensor {info.name} occurs twice")
            tensors[info.name] = info
    keys = _Config(directory / _CONFIG, config).keys() | _head_keys(tensors)
    metadata = Metadata(keys, directory / _CONFIG)
    return GGUFFile(tuple(paths), metadata, tensors, tuple(files))


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_JSON + 1)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    return _object(path, text)


def _object(path: Path, text: bytes) -> dict[str, Any]:
    if len(text) > _MOST_JSON:
        raise FormatError(f"{path}: its JSON is longer than {_MOST_JSON} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: is not a JSON object")
    return found


def _parts(path: Path, directory: Path) -> list[Path]:
    """The files with tensors, in order of name."""
    index = directory / _INDEX
    if path.name == _WEIGHTS and not path.exists() and index.exists():
        path = index
    if not path.name.endswith(".json"):
        return [path]
    places = _json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FormatError(f"{path}: weight_map is missing or does not name files")
    names = sorted(set(places.values()))
    if any(Path(name).name != name for name in names):
        raise FormatError(f"{path}: weight_map names files of other directories")
    return [directory / name for name in names]


def _tensors(file: ModelFile, part: int) -> list[TensorInfo]:
    """The tensors of one file under their GGUF names."""
    path = file.path
    if file.size < 8:
        raise FormatError(f"{path}: is too short for a safetensors file")
    (length,) = struct.unpack("<Q", file.read(0, 8).data)
    if length > min(_MOST_JSON, file.size - 8):
        raise FormatError(f"{path}: claims a header of {length} bytes; the file has {file.size}")
    header = _object(path, file.read(8, length).tobytes())
    header.pop("__metadata__", None)
    if len(header) > _MOST_TENSORS:
        raise FormatError(f"{path}: claims {len(header)} tensors; at most {_MOST_TENSORS} are read")
    found = [_tensor(path, name, entry, 8 + length, file.size, part) for name, entry in header.items()]
    for before, after in pairwise(sorted(found, key=lambda info: info.offset)):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(f"{path}: tensors {before.name} and {after.name} overlap")
    return found


def _tensor(path: Path, name: str, entry: Any, base: int, size: int, part: int) -> TensorInfo:
    where = f"{path}: tensor {name[:80]!r}"
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if dtype not in _TYPES:
        raise UnsupportedError(f"{where} has type {dtype!r}, expected one of {', '.join(_TYPES)}")
    numbers = [*(shape if isinstance(shape, list) else [None]), *(offsets if isinstance(offsets, list) else [None])]
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in numbers):
        raise FormatError(f"{where} lacks a valid shape and data_offsets")
    assert isinstance(shape, list) and isinstance(offsets, list)
    type_, width = _TYPES[dtype]
    if not 1 <= len(shape) <= 3 or 0 in shape or len(offsets) != 2:
        raise FormatError(f"{where} has shape {shape} and data_offsets {offsets}")
    begin, end = offsets
    if end - begin != math.prod(shape) * width or base + end > size:
        raise FormatError(f"{where} passes the end of the file, or its size does not match its shape")
    return TensorInfo(_name(path, name), tuple(reversed(shape)), type_, base + begin, end - begin, part)


def _name(path: Path, name: str) -> str:
    """The GGUF name of a tensor."""
    own = name.removeprefix("model.")
    for names in (_WHOLE, _HEADS):
        if own in names:
            return names[own]
    stem, dot, suffix = own.rpartition(".")
    for prefix in _CAPTURE_NORMS:
        index = stem.removeprefix(prefix)
        if index != stem and dot and suffix == "weight" and index.isdecimal():
            return CAPTURE_NORM[0].format(int(index))
    layers, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if layers == "layers" and index.isdecimal() and suffix == "weight" and part in _LAYER:
        return f"blk.{int(index)}.{_LAYER[part]}.weight"
    bare = own.split(".", 2)
    if layers == "layers" and len(bare) == 3 and bare[1].isdecimal() and bare[2] in _BARE:
        return f"blk.{int(bare[1])}.{_BARE[bare[2]]}"
    raise UnsupportedError(f"{path}: tensor {name[:80]!r} is unknown: the draft may depend on it")


def _head_keys(tensors: Mapping[str, TensorInfo]) -> dict[str, Value]:
    """The keys of the correction heads in the checkpoint, from the shapes of their tensors."""
    keys: dict[str, Value] = {}
    w2, w1 = tensors.get(f"{DOMINO}head.w2"), tensors.get(f"{DSPARK}markov.w1")
    if w2 is not None:
        start = tensors.get(f"{DOMINO}start", w2)
        keys |= {f"{DOMINO}gru_hidden_dim": start.cols, f"{DOMINO}emb_dim": w2.cols, f"{DOMINO}vocab_size": w2.rows}
        keys[f"{DOMINO}enabled"] = 1
    if w1 is not None:
        keys |= {f"{DSPARK}markov_rank": w1.cols, f"{DSPARK}vocab_size": w1.rows, f"{DSPARK}enabled": 1}
        confidence = tensors.get(f"{DSPARK}confidence.weight")
        if confidence is not None:
            keys |= {f"{DSPARK}confidence_dim": confidence.cols, f"{DSPARK}confidence.enabled": 1}
    return {f"{_ARCHITECTURE}.{name}": value for name, value in keys.items()}


class _Config:
    """config.json as metadata keys."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._top = values
        own = values.get("dflash_config")
        if own is not None and not isinstance(own, dict):
            raise self._refuse("dflash_config", "must be an object or null")
        self._own: Mapping[str, Any] = own or {}
        #: the class of transformers: all rows of a block see each other, and one position more than the window
        self._native = False
        self._keys: dict[str, Value] = {"general.architecture": _ARCHITECTURE, "general.type": "model"}

    def keys(self) -> dict[str, Value]:
        """Raises UnsupportedError naming the key that is unknown, or whose value is not supported."""
        architectures = self._top.get("architectures") or [_PUBLISHED]
        if not isinstance(architectures, list) or architectures[0] not in (_PUBLISHED, _DFLASH2, _NATIVE):
            raise self._refuse("architectures", f"is {architectures}, expected {_PUBLISHED}, {_DFLASH2} or {_NATIVE}")
        self._native = architectures[0] == _NATIVE
        second = _DFLASH2_READ if architectures[0] == _DFLASH2 else frozenset[str]()
        self._unknown(self._top, _IGNORED | _OTHERWISE_READ | second, "")
        self._unknown(self._own, _DFLASH_READ | second, "dflash_config.")
        if second:
            self._second()
        for name, key in _INTEGERS.items():
            self._put(key, self._integer(name, self._top.get(name)))
        for name, key in _DFLASH_INTEGERS.items():
            self._put(key, self._integer(name, self._either(name)))
        for name, key in _DFLASH_NUMBERS.items():
            self._put(key, self._number(name, self._either(name)))
        self._attention()
        self._rope()
        self._windows()
        ids = self._either("target_layer_ids")
        if ids is not None:
            if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 1 << 31 for i in ids):
                raise self._refuse("target_layer_ids", "must be a list of layers")
            self._put("dflash.target_layer_ids", np.array(ids, np.int32))
        norm = self._flag("context_kv_layer_norm", self._either("context_kv_layer_norm"))
        self._put("dflash.context_kv_layer_norm", None if norm is None else int(norm))
        return self._keys

    def _second(self) -> None:
        """The keys of DFlash2, which has no mask and no captured layers by default."""
        kind = self._either("projector_type")
        if kind not in (None, "dflash2"):
            raise self._refuse("projector_type", f"is {kind!r}, expected dflash2")
        for name, key in _DFLASH2_INTEGERS.items():
            value = self._integer(name, self._either(name))
            if value is None:
                raise self._refuse(f"dflash_config.{name}", "is missing")
            if value < 1:
                raise self._refuse(f"dflash_config.{name}", f"is {value}, expected at least 1")
            self._put(key, value)
        for name in ("mask_token_id", "target_layer_ids"):
            if self._either(name) is None:
                raise self._refuse(f"dflash_config.{name}", "is missing")

    def _attention(self) -> None:
        head_dim = self._integer("head_dim", self._top.get("head_dim"))
        if head_dim is None:
            hidden, heads = (
                self._integer(name, self._top.get(name)) for name in ("hidden_size", "num_attention_heads")
            )
            if not hidden or not heads:
                raise self._refuse("head_dim", "is missing")
            head_dim = hidden // heads
        self._put("attention.key_length", head_dim)
        self._put("attention.value_length", head_dim)
        self._put("attention.layer_norm_rms_epsilon", self._number("rms_norm_eps", self._top.get("rms_norm_eps")))
        if self._top.get("attention_bias"):
            raise self._refuse("attention_bias", "is true: biases are not supported")
        if self._top.get("hidden_act", "silu") != "silu":
            raise self._refuse("hidden_act", f"is {self._top['hidden_act']!r}, expected silu")
        causal = self._flag("is_causal", self._top.get("is_causal"))
        if causal is None:
            causal = self._flag("dflash_config.causal", self._own.get("causal"))
        if self._native and causal is None:
            causal = False
        self._put("attention.causal", causal)

    def _rope(self) -> None:
        nested = {}
        for name in ("rope_scaling", "rope_parameters"):
            value = self._top.get(name)
            if value is not None:
                if not isinstance(value, dict):
                    raise self._refuse(name, "must be an object or null")
                nested.update(value)
        base = self._top.get("rope_theta", nested.get("rope_theta"))
        self._put("rope.freq_base", self._number("rope_theta", base))
        part = self._top.get("partial_rotary_factor", nested.get("partial_rotary_factor"))
        if part is not None:
            share = self._number("partial_rotary_factor", part) or 0.0
            head_dim = self._keys[f"{_ARCHITECTURE}.attention.key_length"]
            assert isinstance(head_dim, int)
            self._put("rope.dimension_count", int(head_dim * share))
        kind = nested.get("rope_type", nested.get("type", "default"))
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if kind in ("linear", "yarn"):
            known |= {"factor"}
            self._put("rope.scaling.type", kind)
            self._put("rope.scaling.factor", self._number("rope_scaling.factor", nested.get("factor")))
        if kind == "yarn":
            known |= {"original_max_position_embeddings", "beta_fast", "beta_slow"}
            original = nested.get("original_max_position_embeddings", self._top.get("max_position_embeddings"))
            self._put(
                "rope.scaling.original_context_length", self._integer("original_max_position_embeddings", original)
            )
            for name in ("beta_fast", "beta_slow"):
                self._put(f"rope.scaling.yarn_{name}", self._number(name, nested.get(name)))
        elif kind not in ("default", "linear"):
            raise self._refuse("rope_scaling", f"is of type {kind!r}, expected default, linear or yarn")
        self._unknown(nested, frozenset(known), "rope_scaling.")

    def _windows(self) -> None:
        layers = self._top.get("num_hidden_layers")
        types = self._top.get("layer_types")
        use = self._flag("use_sliding_window", self._top.get("use_sliding_window"))
        if types is None and not self._native and not use:
            return
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != layers or not all(t in known for t in types):
            raise self._refuse("layer_types", f"must name {' or '.join(known)} for each of {layers} layers")
        window = self._integer("sliding_window", self._top.get("sliding_window")) or 0
        if use is False:
            window = 0
        elif self._native:
            window += 1
        # Without a window such layers are still causal (luce.draft.dflash.spec).
        if "sliding_attention" in types:
            self._put("attention.sliding_window", window)
            self._put("attention.sliding_window_pattern", np.array([t == "sliding_attention" for t in types]))

    def _either(self, name: str) -> Any:
        """A value of dflash_config, else of the top level: checkpoints use both."""
        own = self._own.get(name)
        return self._top.get(name) if own is None else own

    def _put(self, key: str, value: Value | None) -> None:
        if value is not None:
            self._keys[f"{_ARCHITECTURE}.{key}"] = value

    def _integer(self, name: str, value: Any) -> int | None:
        if value is not None and (type(value) is not int or not -(1 << 31) < value < 1 << 31):
            raise self._refuse(name, f"is {value!r}, expected an integer")
        return value

    def _number(self, name: str, value: Any) -> float | None:
        if value is not None and (type(value) not in (int, float) or not abs(value) <= sys.float_info.max):
            raise self._refuse(name, f"is {value!r}, expected a number")
        return None if value is None else float(value)

    def _flag(self, name: str, value: Any) -> bool | None:
        if value is not None and type(value) is not bool:
            raise self._refuse(name, f"is {value!r}, expected true or false")
        return value

    def _unknown(self, values: Mapping[str, Any], known: frozenset[str], prefix: str) -> None:
        for name, value in values.items():
            if name not in known and value is not None:
                raise self._refuse(prefix + name, "is unknown: the draft may depend on it")

    def _refuse(self, name: str, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self._path}: {name} {why}")
