"""GGUF files for tests: a byte-level encoder that can also write what no proper writer would, and a few valid files."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<B",
}


@dataclass(frozen=True)
class Raw:
    """Bytes that stand in the file as they are."""

    data: bytes


@dataclass(frozen=True)
class Array:
    """An array value; `count` overrides the number of items that the file claims."""

    type: int
    items: Sequence[object]
    count: int | None = None


@dataclass(frozen=True)
class Key:
    """One metadata entry. The value is a number, str, bytes (a string), Array or Raw."""

    name: str | bytes
    type: int
    value: object


@dataclass(frozen=True)
class Tensor:
    """One directory entry. Without `offset` the data follow the tensor before, aligned."""

    name: str | bytes
    shape: tuple[int, ...]
    type: int = GGMLQuantizationType.F32
    data: bytes = b""
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    """uint64 length and UTF-8."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(type: int, value: object) -> bytes:
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, Array):
        count = len(value.items) if value.count is None else value.count
        head = struct.pack("<IQ", value.type, count)
        return head + b"".join(_value(value.type, item) for item in value.items)
    if isinstance(value, str | bytes):
        return string(value)
    return struct.pack(_FORMATS[GGUFValueType(type)], value)


def encode(
    keys: Sequence[Key] = (),
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file. `alignment` pads the data; it is not written as a key. Counts override the true ones."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(string(key.name) + struct.pack("<I", key.type) + _value(key.type, key.value) for key in keys)
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        head += string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        head += struct.pack("<IQ", tensor.type, offset)
        data += tensor.data
    return head + bytes(-len(head) % alignment) + data


def floats(*shape: int, first: float = 0.0) -> bytes:
    """Consecutive numbers as F32 data of a tensor with these dimensions."""
    return (np.arange(np.prod(shape), dtype=np.float32) + np.float32(first)).tobytes()


SAMPLE_KEYS = (
    Key("general.architecture", GGUFValueType.STRING, "sample"),
    Key("sample.uint8", GGUFValueType.UINT8, 200),
    Key("sample.int8", GGUFValueType.INT8, -100),
    Key("sample.uint16", GGUFValueType.UINT16, 60000),
    Key("sample.int16", GGUFValueType.INT16, -30000),
    Key("sample.uint32", GGUFValueType.UINT32, 2**32 - 1),
    Key("sample.int32", GGUFValueType.INT32, -(2**31)),
    Key("sample.uint64", GGUFValueType.UINT64, 2**64 - 1),
    Key("sample.int64", GGUFValueType.INT64, -(2**63)),
    Key("sample.float32", GGUFValueType.FLOAT32, 0.5),
    Key("sample.float64", GGUFValueType.FLOAT64, 0.1),
    Key("sample.true", GGUFValueType.BOOL, 1),
    Key("sample.false", GGUFValueType.BOOL, 0),
    Key("sample.integers", GGUFValueType.ARRAY, Array(GGUFValueType.INT32, [3, -1, 2])),
    Key("sample.numbers", GGUFValueType.ARRAY, Array(GGUFValueType.FLOAT32, [0.25, -4.0])),
    Key("sample.booleans", GGUFValueType.ARRAY, Array(GGUFValueType.BOOL, [1, 0, 1])),
    Key("sample.strings", GGUFValueType.ARRAY, Array(GGUFValueType.STRING, ["a", "", "größe", "日本"])),
)

SAMPLE_TENSORS = (
    Tensor("one", (5,), data=floats(5)),
    Tensor("two", (4, 3), data=floats(4, 3, first=100)),
    Tensor("blocks", (64, 2), GGMLQuantizationType.Q8_0, bytes(range(1, 137))),
    Tensor("four", (2, 1, 2, 3), data=floats(12)),
)


def sample(**overrides: int) -> bytes:
    """A valid file of 1.2 kB with every value type and tensors of 1, 2 and 4 dimensions."""
    return encode(SAMPLE_KEYS, SAMPLE_TENSORS, **overrides)  # type: ignore[arg-type]


def write_split(directory: Path, name: str, tensors: int, per_file: int) -> list[Path]:
    """A split model of gguf's own writer: tensors t0, t1, ... of shape (3,), tI holding 10 I + (0, 1, 2)."""
    writer = gguf.GGUFWriter(directory / f"{name}.gguf", "sample", split_max_tensors=per_file)
    writer.add_uint32("sample.width", 3)
    for index in range(tensors):
        writer.add_tensor(f"t{index}", np.arange(3, dtype=np.float32) + 10 * index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.glob(f"{name}-*.gguf"))


def split_file(path: Path, directory: Path, parts: int) -> list[Path]:
    """The parts of a GGUF file, as llama.cpp's gguf-split makes them: all keys in the first, tensors in their order."""
    reader = gguf.GGUFReader(path)
    keys = [
        Key(field.name, int(field.types[0]), Raw(b"".join(part.tobytes() for part in field.parts[3:])))
        for field in reader.fields.values()
        if not field.name.startswith("GGUF.")
    ]
    tensors = [
        Tensor(tensor.name, tuple(int(size) for size in tensor.shape), tensor.tensor_type, tensor.data.tobytes())
        for tensor in reader.tensors
    ]
    found = []
    for number in range(parts):
        own = [
            Key("split.no", GGUFValueType.UINT16, number),
            Key("split.count", GGUFValueType.UINT16, parts),
            Key("split.tensors.count", GGUFValueType.INT32, len(tensors)),
        ]
        some = tensors[len(tensors) * number // parts : len(tensors) * (number + 1) // parts]
        found.append(directory / f"{path.stem}-{number + 1:05d}-of-{parts:05d}.gguf")
        found[-1].write_bytes(encode([*(keys if number == 0 else []), *own], some))
    return found


def write_recommending(path: Path, **values: object) -> Path:
    """A file with one tensor and these keys of metadata, by the names of gguf-py's `add_` functions."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
