"""Typed getters: what each accepts, what each refuses, and what the error names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFValueType

from luce.errors import FormatError
from luce.gguf.metadata import Metadata
from luce.gguf.reader import open_gguf
from tests.support.gguf_files import Array, Key, encode, sample

INTEGERS = {
    "sample.uint8": 200,
    "sample.int8": -100,
    "sample.uint16": 60000,
    "sample.int16": -30000,
    "sample.uint32": 2**32 - 1,
    "sample.int32": -(2**31),
    "sample.uint64": 2**64 - 1,
    "sample.int64": -(2**63),
}
FLOATS = {"sample.float32": 0.5, "sample.float64": 0.1}
#: what each getter accepts, as (key, value)
ACCEPTED: dict[str, dict[str, object]] = {
    "integer": {**INTEGERS},
    "number": {**{key: float(value) for key, value in INTEGERS.items()}, **FLOATS},
    "string": {"general.architecture": "sample"},
    "boolean": {"sample.true": True, "sample.false": False},
    "integers": {"sample.integers": [3, -1, 2]},
    "numbers": {"sample.integers": [3.0, -1.0, 2.0], "sample.numbers": [0.25, -4.0]},
    "strings": {"sample.strings": ["a", "", "größe", "日本"]},
    "booleans": {"sample.booleans": [True, False, True]},
}
ELEMENTS = {"integer": int, "number": float, "string": str, "boolean": bool}


@pytest.fixture
def metadata(tmp_path: Path) -> Metadata:
    path = tmp_path / "sample.gguf"
    path.write_bytes(sample())
    with open_gguf(path) as file:
        return file.metadata


def getter(metadata: Metadata, name: str) -> Callable[..., object]:
    method: Callable[..., object] = getattr(metadata, name)
    return method


@pytest.mark.parametrize("name", ACCEPTED)
def test_getter_accepts_its_types_and_no_other(metadata: Metadata, name: str) -> None:
    get = getter(metadata, name)
    element = ELEMENTS[name.removesuffix("s")]
    for key in metadata:
        if key in ACCEPTED[name]:
            value = get(key)
            assert value == ACCEPTED[name][key]
            assert all(type(item) is element for item in (value if isinstance(value, list) else [value]))
        else:
            with pytest.raises(FormatError) as caught:
                get(key, None)
            assert str(caught.value).startswith(f"{metadata.path}: metadata key {key!r} is a")
            assert ", expected a" in str(caught.value)


@pytest.mark.parametrize("name", ACCEPTED)
def test_missing_key(metadata: Metadata, name: str) -> None:
    get = getter(metadata, name)
    with pytest.raises(FormatError, match=r"sample\.gguf: metadata key 'sample.absent' is missing"):
        get("sample.absent")
    assert get("sample.absent", default=None) is None
    assert get("sample.absent", "other") == "other"


def test_messages_name_both_types(metadata: Metadata) -> None:
    for key, call, message in [
        ("sample.true", metadata.integer, "is a boolean, expected an integer"),
        ("sample.float64", metadata.integer, "is a float, expected an integer"),
        ("sample.uint8", metadata.string, "is an integer, expected a string"),
        ("general.architecture", metadata.number, "is a string, expected a number"),
        ("sample.integers", metadata.strings, "is an array of int32, expected an array of strings"),
        ("sample.strings", metadata.integers, "is an array of strings, expected an array of integers"),
    ]:
        with pytest.raises(FormatError) as caught:
            call(key)
        assert str(caught.value).endswith(message)


def test_mapping(metadata: Metadata) -> None:
    assert len(metadata) == len(list(metadata)) == 17
    assert "sample.uint8" in metadata and "sample.absent" not in metadata
    assert metadata.get("sample.absent", 3) == 3
    assert metadata["sample.true"] is True
    assert metadata["sample.integers"] == [3, -1, 2]
    with pytest.raises(KeyError):
        metadata["sample.absent"]


def test_strings_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    path.write_bytes(encode([Key("tokens", GGUFValueType.ARRAY, Array(GGUFValueType.STRING, ["a", b"\xff"]))]))
    metadata = open_gguf(path).metadata
    for read in (metadata.strings, metadata.__getitem__):
        with pytest.raises(FormatError, match=r"tokens\.gguf: metadata key 'tokens' has a string that is not UTF-8"):
            read("tokens")
