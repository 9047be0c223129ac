"""The fewest reference files that have every kind of layer, for tests of what all families share.

A family is data: its layers are built from a ModelSpec alone, and prefixes, drafts, trees, daemons and placements see
no more of it. So a second file of layers of the same kinds runs the same lines of these. Which kinds there are follows
from the files: one with a kind that no other one has is among those of `covering`, whoever adds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pytest

from luce.gguf.reader import open_gguf
from luce.models.spec import Attention
from tests.support.reference import Reference, references

#: fields of a ModelSpec that say how text is read and written, not what layers compute
_TEXT = {"family", "eos", "nfc", "dialect", "mask_token", "context_length", "vocab", "layers"}
#: fields of an Attention that say which rows it looks at and what it has of them
_ROWS = ("window", "donor", "value_from_key", "bidirectional")


def kinds(reference: Reference) -> frozenset[str]:
    """What a file's layers are made of: the parts of each mixer and each MLP, which of those that look at other rows
    are together, how they are joined, what is before and behind the layers, and the types of weights."""
    spec = reference.spec
    with open_gguf(reference.path) as file:
        found = {f"weights {tensor.type.name}" for tensor in file.tensors.values()}
    found.add(f"groups of pages: {len(spec.page_groups)}, recurrent: {spec.recurrent}")
    found |= {f"{name} {_kind(value)}" for name, value in _fields(spec) if name not in _TEXT}
    for layer in spec.layers:
        parts = dict(_fields(layer))
        for name in ("mixer", "ffn"):
            part = parts.pop(name)
            found |= {f"{type(part).__name__} {key} {_kind(value)}" for key, value in _fields(part)}
        found.add(f"{type(layer).__name__} of {type(layer.ffn).__name__} {_kind(tuple(parts.items()))}")
        if isinstance(layer.mixer, Attention):
            found.add(_looks(layer.mixer))
    return frozenset(found)


def _looks(mixer: Attention) -> str:
    """How a row looks at other ones."""
    shared = "all" if mixer.kv_heads == 1 else "some" if mixer.kv_heads < mixer.heads else "no"
    return f"{shared} heads share keys, " + ", ".join(f"{name} {_kind(getattr(mixer, name))}" for name in _ROWS)


@cache
def covering() -> tuple[Reference, ...]:
    """Files, each with a kind that those before it lack, until there is none."""
    of = {reference: kinds(reference) for reference in references()}
    missing, chosen = set[str]().union(*of.values()), list[Reference]()
    while missing:
        chosen.append(max(of, key=lambda reference: len(of[reference] & missing)))
        missing -= of[chosen[-1]]
    return tuple(chosen)


@cache
def each_kind() -> pytest.MarkDecorator:
    """Parametrises a test by all files as `reference`; those that are not among `covering` run in the nightly check."""
    repeated = {reference: [pytest.mark.repeated] for reference in {*references()} - {*covering()}}
    params = [pytest.param(each, marks=repeated.get(each, [])) for each in references()]
    return pytest.mark.parametrize("reference", params, ids=lambda reference: reference.name)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(value, field.name)) for field in fields(value))


def _kind(value: Any) -> str:
    """A value without its sizes: whether there is a number, and which of several words it is."""
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(f'{name}={_kind(part)}' for name, part in _fields(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(_kind(part) for part in value)})"
    if isinstance(value, bool | str) or value is None:
        return str(value)
    return f"{'1' if value == 1 else 'some' if value else '0'}"
