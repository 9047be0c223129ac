"""Reads a family's metadata keys; builds the parts of a spec that several families describe with the same keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luce.errors import UnsupportedError
from luce.gguf.metadata import Metadata, shown
from luce.gguf.reader import TensorInfo
from luce.models.spec import Layer, ModelSpec, SandwichLayer

# Far above real models. It bounds the work for a hostile file with many small tensors.
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class Source:
    """The part of a file that a family reads: its metadata and the names, shapes and types of its tensors."""

    path: str
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.metadata.string("general.architecture")

    def key(self, name: str) -> str:
        """`block_count` is `qwen35.block_count` in a qwen35 file."""
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer of the architecture's own keys, required without a default."""
        key = self.key(name)
        return self.metadata.integer(key) if default is None else self.metadata.integer(key, default=default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the architecture's own keys, required without a default."""
        key = self.key(name)
        return self.metadata.number(key) if default is None else self.metadata.number(key, default=default)

    def above(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A finite number above `least`; others are refused."""
        value = self.number(name, default)
        if not least < value < math.inf:
            raise self.refuse(name, f"is {value:g}, expected a finite number above {least:g}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1; others are refused."""
        value = self.integer(name, default)
        if value < 1:
            raise self.refuse(name, f"is {value}, expected at least 1")
        return value

    def stored_layers(self) -> int:
        """`block_count`, which the tensors must confirm: a family makes a spec of every layer."""
        count = self.positive("block_count")
        if count > _MOST_LAYERS:
            raise self.refuse("block_count", f"is {count}, expected at most {_MOST_LAYERS}")
        found = {name.split(".", 2)[1] for name in self.tensors if name.startswith("blk.")}
        missing = next((layer for layer in range(count) if str(layer) not in found), None)
        if missing is not None:
            raise UnsupportedError(
                f"{self.path}: tensor blk.{missing}.attn_norm.weight is missing: {self.key('block_count')} is {count}"
            )
        return count

    def per_layer(self, name: str, layers: int) -> list[int]:
        """A positive integer for each layer: an array in the file, or one value for all."""
        value = self.metadata.get(self.key(name))
        if not isinstance(value, list | tuple):
            return [self.positive(name)] * layers
        values = self.metadata.integers(self.key(name))
        if len(values) != layers or min(values) < 1:
            raise self.refuse(name, f"must be {layers} positive numbers, one for each layer")
        return values

    def refuse(self, name: str, why: str) -> UnsupportedError:
        """The error for a key whose value Luce does not support."""
        return UnsupportedError(f"{self.path}: {self.key(name)} {why}")

    def vocabulary(self) -> int:
        """Rows of the embedding table."""
        table = self.tensors.get("token_embd.weight")
        if table is None:
            raise UnsupportedError(f"{self.path}: tensor token_embd.weight is missing")
        return table.rows


def model(source: Source, family: str, layers: Sequence[Layer | SandwichLayer]) -> ModelSpec:
    """A model of these layers, with the fields that all families read from the same keys; a family replaces others."""
    return ModelSpec(
        family=family,
        hidden=source.positive("embedding_length"),
        vocab=source.vocabulary(),
        context_length=source.positive("context_length"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon"),
        layers=tuple(layers),
        tied_head="output.weight" not in source.tensors,
    )


@dataclass(frozen=True)
class Heads:
    """heads, kv_heads and head_dim of full attention."""

    heads: int
    kv_heads: int
    head_dim: int


def attention_heads(source: Source) -> Heads:
    """Head counts and size of full attention; key and value heads must have the same size."""
    heads = source.positive("attention.head_count")
    kv_heads = source.positive("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise source.refuse("attention.head_count", f"is {heads}, not a multiple of the {kv_heads} KV heads")
    head_dim = source.positive("attention.key_length", max(1, source.positive("embedding_length") // heads))
    value_dim = source.positive("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise source.refuse("attention.value_length", f"is {value_dim}, but attention.key_length is {head_dim}")
    return Heads(heads, kv_heads, head_dim)


def rope_dims(source: Source, head_dim: int) -> int:
    """Rotated elements of a head: even, at most the whole head."""
    dims = source.positive("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise source.refuse("rope.dimension_count", f"is {dims}, expected an even number up to {head_dim}")
    return dims


def linear_rope_scaling(source: Source) -> float:
    """The divisor of positions. Refuses scaling types other than none and linear."""
    kind = source.metadata.string(source.key("rope.scaling.type"), default="none")
    if kind not in ("none", "linear"):
        raise source.refuse("rope.scaling.type", f"is {shown(kind)}, expected none or linear")
    return source.number("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
