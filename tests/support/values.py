"""Values of annotated types, none of them a default, and their comparison."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from typing import Any

import msgspec
import numpy as np

from luce.runtime.device import Fetched
from luce.runtime.step import PendingMasks

_numbers = itertools.count(1)


def made(kind: Any) -> Any:
    """A value of an annotated type; of a dataclass with each field other than its default, also inside."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (PendingMasks, Fetched):
        # Masks follow a step in a message of their own, and no step for a daemon has tokens of another device.
        return None
    if dataclasses.is_dataclass(kind):
        hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
        return kind(**{f.name: _other(made(hints[f.name]), f.default) for f in fields})  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        return made(next(part for part in parts if part is not types.NoneType))
    if origin is tuple:
        return tuple(made(parts[0] if part is Ellipsis else part) for part in parts)
    if origin is dict:
        return {made(parts[0]): made(parts[1])}
    if origin is np.ndarray:
        return np.array([[next(_numbers) % 100, 0]], parts[1].__args__[0])
    if kind in (int, float, str):
        return kind(next(_numbers))
    assert kind is bool, f"no value is made of {kind} yet"
    return True


def _other(value: Any, default: Any) -> Any:
    if isinstance(value, bool):
        return not default if isinstance(default, bool) else value
    assert default is dataclasses.MISSING or value is None or not same(value, default)
    return value


def same(one: Any, other: Any) -> bool:
    """Whether types, dtypes, shapes and values are equal, field by field."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    names: tuple[str, ...] = ()
    if dataclasses.is_dataclass(one):
        names = tuple(field.name for field in dataclasses.fields(one))
    elif isinstance(one, msgspec.Struct):
        names = one.__struct_fields__
    return all(same(getattr(one, n), getattr(other, n)) for n in names) if names else bool(one == other)
