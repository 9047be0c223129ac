"""A draft in llama.cpp's dialect (architecture `dflash`), seen as a GGUF file with the keys of luce.draft.dflash.spec.

The dialect has its keys at the top level, counts captured layers by their inputs (one more than the layer whose output
is captured), and has the target's tokenizer, of which the mask token and the number of tokens are read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from luce.draft.dflash.spec import FUSION, FUSION_NORM
from luce.errors import UnsupportedError
from luce.gguf.metadata import Metadata, Value
from luce.gguf.reader import GGUFFile

ARCHITECTURE = "dflash"
_AS = "dflash-draft"
_TENSORS = {"fc.weight": FUSION[0], "enc.output_norm.weight": FUSION_NORM[0]}
#: integers and numbers of the dialect that have other names here
_INTEGERS = {
    name: f"dflash.{name}"
    for name in ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
}
_NUMBERS = {"logit_scale": "dflash.output_multiplier"}
_ELSEWHERE = frozenset({"target_layers", "sample_from_anchor", "rope.dimension_sections"})


def translated(file: GGUFFile) -> GGUFFile:
    """The file itself if it is of another architecture; the two share their open files.

    Raises UnsupportedError or FormatError naming the file and the key that is wrong, missing or not supported.
    """
    if file.metadata.string("general.architecture") != ARCHITECTURE:
        return file
    metadata, path = file.metadata, file.paths[0]
    keys: dict[str, Value] = {"general.architecture": _AS, "general.type": "model"}

    def put(name: str, value: Value) -> None:
        keys[f"{_AS}.{name}"] = value

    for key in metadata:
        name = key.removeprefix(f"{ARCHITECTURE}.")
        if name == key or name in _ELSEWHERE:
            continue
        if name in _INTEGERS:
            put(_INTEGERS[name], metadata.integer(key))
        elif name in _NUMBERS:
            put(_NUMBERS[name], metadata.number(key))
        else:
            # luce.draft.dflash.spec refuses what it does not know.
            put(name, _value(metadata, key))
    inputs = np.array(metadata.integers(f"{ARCHITECTURE}.target_layers"), np.int64)
    if (inputs < 1).any():
        raise UnsupportedError(f"{path}: {ARCHITECTURE}.target_layers is {inputs.tolist()}, expected layers from 1 on")
    put("dflash.target_layer_ids", inputs - 1)
    put("dflash.mask_token_id", metadata.integer("tokenizer.ggml.mask_token_id"))
    tokens = "tokenizer.ggml.tokens"
    if tokens in metadata:
        put("vocab_size", len(metadata.strings(tokens)))
    if metadata.boolean(f"{ARCHITECTURE}.sample_from_anchor", default=False):
        raise UnsupportedError(f"{path}: {ARCHITECTURE}.sample_from_anchor is true, which is not supported")
    _check_sections(file)
    tensors = {}
    for name, info in file.tensors.items():
        own = _TENSORS.get(name, name)
        tensors[own] = replace(info, name=own)
    return GGUFFile(file.paths, Metadata(keys, path), tensors, file.files)


def _check_sections(file: GGUFFile) -> None:
    """Drafts for targets whose rotation has sections say that theirs has one: the plain rotation."""
    key = f"{ARCHITECTURE}.rope.dimension_sections"
    sections = file.metadata.integers(key, default=[])
    if any(sections[1:]):
        raise UnsupportedError(f"{file.paths[0]}: {key} is {sections}: a rotation in sections is not supported")


def _value(metadata: Metadata, key: str) -> Value:
    value = metadata[key]
    if isinstance(value, list):
        return np.array(value)
    assert isinstance(value, bool | int | float | str)
    return value
