"""The metadata of a GGUF file: a mapping of keys to Python values, with getters that check types.

Big arrays stay packed until a caller asks for them: a vocabulary of 250,000 tokens takes 50 ms to unpack, and not every
caller needs it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from luce.errors import FormatError

_LENGTH = struct.Struct("<Q").unpack_from

D = TypeVar("D")
T = TypeVar("T")


@dataclass(frozen=True)
class PackedStrings:
    """An array of strings as in the file."""

    #: for each string a uint64 length and that many bytes of UTF-8, complete
    data: bytes
    count: int

    def unpack(self) -> list[str]:
        """The strings. Raises UnicodeDecodeError."""
        data = self.data
        strings = []
        position = 0
        for _ in range(self.count):
            start = position + 8
            position = start + _LENGTH(data, position)[0]
            strings.append(data[start:position].decode())
        return strings


#: A value of Metadata; arrays of numbers and booleans are one-dimensional.
Value = bool | int | float | str | NDArray[Any] | PackedStrings


def shown(name: str) -> str:
    """A name from a file, on one line of limited length."""
    return repr(name if len(name) <= 80 else name[:80] + "...")


class _Required:
    """The type of the missing default."""


_REQUIRED = _Required()


class Metadata(Mapping[str, object]):
    """Keys and values. `metadata[key]` is a bool, int, float, str or a list of one of these.

    The getters return one type or raise FormatError naming file and key; without `default`, a missing key is an error
    too. Integers may be stored in any integer type, numbers in any integer or float type; a boolean is neither.
    """

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> object:
        """Raises KeyError, and FormatError if a string of an array is not UTF-8."""
        value = self._values[key]
        if isinstance(value, PackedStrings):
            return self._unpack(key, value)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: D | _Required = _REQUIRED) -> int | D:
        """An integer."""
        return self._get(key, default, "an integer", _integer)

    def number(self, key: str, default: D | _Required = _REQUIRED) -> float | D:
        """An integer or float, as float."""
        return self._get(key, default, "a number", _number)

    def string(self, key: str, default: D | _Required = _REQUIRED) -> str | D:
        """A string."""
        return self._get(key, default, "a string", _string)

    def boolean(self, key: str, default: D | _Required = _REQUIRED) -> bool | D:
        """A boolean."""
        return self._get(key, default, "a boolean", _boolean)

    def integers(self, key: str, default: D | _Required = _REQUIRED) -> list[int] | D:
        """An array of integers."""
        return self._get(key, default, "an array of integers", _array("iu", int))

    def numbers(self, key: str, default: D | _Required = _REQUIRED) -> list[float] | D:
        """An array of integers or floats, as floats."""
        return self._get(key, default, "an array of numbers", _array("iuf", float))

    def strings(self, key: str, default: D | _Required = _REQUIRED) -> list[str] | D:
        """An array of strings."""
        packed = self._get(key, default, "an array of strings", _packed)
        return self._unpack(key, packed) if isinstance(packed, PackedStrings) else packed

    def booleans(self, key: str, default: D | _Required = _REQUIRED) -> list[bool] | D:
        """An array of booleans."""
        return self._get(key, default, "an array of booleans", _array("b", bool))

    def _get(self, key: str, default: D | _Required, expected: str, convert: Callable[[Value], T | None]) -> T | D:
        if key not in self._values:
            if isinstance(default, _Required):
                raise FormatError(f"{self.path}: metadata key {shown(key)} is missing")
            return default
        value = convert(self._values[key])
        if value is None:
            found = _describe(self._values[key])
            raise FormatError(f"{self.path}: metadata key {shown(key)} is {found}, expected {expected}")
        return value

    def _unpack(self, key: str, packed: PackedStrings) -> list[str]:
        try:
            return packed.unpack()
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.path}: metadata key {shown(key)} has a string that is not UTF-8") from error


def _integer(value: Value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _string(value: Value) -> str | None:
    return value if isinstance(value, str) else None


def _boolean(value: Value) -> bool | None:
    return value if isinstance(value, bool) else None


def _packed(value: Value) -> PackedStrings | None:
    return value if isinstance(value, PackedStrings) else None


def _array(kinds: str, element: Callable[[Any], T]) -> Callable[[Value], list[T] | None]:
    """A converter of arrays whose NumPy dtype is of one of `kinds`."""

    def convert(value: Value) -> list[T] | None:
        if isinstance(value, np.ndarray) and value.dtype.kind in kinds:
            return [element(item) for item in value.tolist()]
        return None

    return convert


def _describe(value: Value) -> str:
    if isinstance(value, PackedStrings):
        return "an array of strings"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name}"
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    return names[type(value)]
