"""GGUF files, versions 2 and 3, little endian: header, metadata, tensor directory and tensor bytes, read by position.

Layout (specification: docs/gguf.md of the ggml project; all integers little endian):

    "GGUF", uint32 version, uint64 tensors, uint64 keys
    per key     string name, uint32 value type, value
    per tensor  string name, uint32 dimensions (1..4), uint64 each, ne0 first, uint32 type, uint64 offset
    padding to general.alignment (default 32), then the data; offsets count from its start

A string is a uint64 length and UTF-8; an array is a uint32 element type, a uint64 count and the elements.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from luce.errors import FormatError, UnsupportedError
from luce.gguf.metadata import Metadata, PackedStrings, Value, shown
from luce.gguf.model_file import FileRows, ModelFile
from luce.gguf.quants import block_size

# Far above real files (a few thousand tensors, some dozen keys). They bound the memory of small hostile entries, whose
# Python objects are larger than the entries.
_MOST_TENSORS = 1 << 17
_MOST_KEYS = 1 << 16

#: bytes that are read at a time of the part before the tensors
_HEAD = 1 << 16

# struct and NumPy spell these alike.
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
}

_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor directory."""

    name: str
    #: 1 to 4 dimensions in GGUF order: ne0, the contiguous dimension, first
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    #: absolute in the file
    offset: int
    #: bytes of the data
    nbytes: int
    #: the file: GGUFFile.paths[part]
    part: int

    @property
    def cols(self) -> int:
        """Elements of a row: ne0."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Product of the other dimensions."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.nbytes // self.rows


class GGUFFile:
    """An open model, in one file or in parts. `raw` and `rows` raise ModelError if a file changes meanwhile."""

    def __init__(
        self,
        paths: tuple[Path, ...],
        metadata: Metadata,
        tensors: Mapping[str, TensorInfo],
        files: tuple[ModelFile, ...],
    ) -> None:
        self.paths = paths
        #: of the first part
        self.metadata = metadata
        #: by name, in the order of the files
        self.tensors = tensors
        #: one for each path
        self.files = files

    @property
    def name(self) -> str:
        """The model's own name, or that of the file without its ending. Raises FormatError if it is no string."""
        return self.metadata.string("general.name", default="") or model_stem(self.paths[0])

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: uint8 [rows, row_bytes]. Raises FormatError if there is no such tensor."""
        return self.rows(name)[:]

    def rows(self, name: str) -> FileRows:
        """As `raw`, but read when they are used. After `close`, a use raises ValueError."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.paths[0]}: tensor {name!r} is missing")
        return FileRows(self.files[info.part], info.offset, (info.rows, info.row_bytes))

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self.files:
            file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def model_stem(path: Path) -> str:
    """The name of a model file without its ending, and without the number of a part of a split model."""
    match = _SPLIT_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file; any part of a split model (NAME-00001-of-00003.gguf) opens the whole model.

    Raises ModelError if a file cannot be opened, FormatError if its bytes are not GGUF or parts are missing or do not
    belong together, UnsupportedError for other versions, byte orders and tensor types. Each names the file.
    """
    opened = _read(path, 0)
    count = opened.metadata.integer("split.count", 1)
    # Files merged by llama.cpp keep the key with value 0.
    if count <= 1:
        return opened
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count or not 1 <= int(match[2]) <= count:
        raise FormatError(f"{path}: is part of {count} files, so its name must end in -NNNNN-of-{count:05d}.gguf")
    paths = tuple(path.with_name(f"{match[1]}-{index + 1:05d}-of-{match[3]}.gguf") for index in range(count))
    missing = next((p for p in paths if not os.path.lexists(p)), None)
    if missing is not None:
        raise FormatError(f"{missing}: is missing ({path.name} is one of {count} parts)")
    return _join(paths, [_read(p, index) for index, p in enumerate(paths)])


def _join(paths: tuple[Path, ...], parts: list[GGUFFile]) -> GGUFFile:
    """One GGUFFile of all parts. Raises FormatError if they do not belong together."""
    first = parts[0].metadata
    tensors: dict[str, TensorInfo] = {}
    for index, (path, part) in enumerate(zip(paths, parts, strict=True)):
        number = part.metadata.integer("split.no")
        if number != index:
            raise FormatError(f"{path}: split.no is {number}, its name says {index}")
        for key in ("split.count", "split.tensors.count"):
            if part.metadata.integer(key) != first.integer(key):
                raise FormatError(
                    f"{path}: {key} is {part.metadata.integer(key)}, in {paths[0].name} {first.integer(key)}"
                )
        repeated = next((name for name in part.tensors if name in tensors), None)
        if repeated is not None:
            raise FormatError(f"{path}: tensor {shown(repeated)} is also in {paths[tensors[repeated].part].name}")
        tensors.update(part.tensors)
    if len(tensors) != first.integer("split.tensors.count"):
        raise FormatError(
            f"{paths[0]}: split.tensors.count is {first.integer('split.tensors.count')}, the parts hold {len(tensors)}"
        )
    return GGUFFile(paths, first, tensors, tuple(file for part in parts for file in part.files))


def _read(path: Path, part: int) -> GGUFFile:
    """One file; `part` is its index in the model."""
    file = ModelFile(path)
    cursor = _Cursor(file)
    tensor_count, key_count = _header(cursor)
    metadata = Metadata(_keys(cursor, key_count), path)
    alignment = metadata.integer("general.alignment", 32)
    if alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"{path}: general.alignment is {alignment}, expected a power of two")
    return GGUFFile((path,), metadata, _tensors(cursor, tensor_count, alignment, part), (file,))


class _Cursor:
    """Reads values from a file's start on. Raises FormatError for a value that passes the end."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self.path = file.path
        self.size = file.size
        #: the file up to the last value that was asked for, or further
        self.data = bytearray()
        self.position = 0
        self.fill(min(_HEAD, self.size))

    def fill(self, end: int) -> None:
        """Read on up to `end`, which is not behind the file's end."""
        if end > len(self.data):
            # In large pieces, so that few small reads are made.
            more = min(max(end - len(self.data), _HEAD), self.size - len(self.data))
            self.data += self._file.read(len(self.data), more).data

    def skip(self, size: int, what: str) -> int:
        """Skip the `size` bytes of `what`; returns their start."""
        start = self.position
        if size > self.size - start:
            raise self.truncated(what)
        self.position = start + size
        self.fill(self.position)
        return start

    def unpack(self, format: str, what: str) -> tuple[Any, ...]:
        """Values of a struct format."""
        return struct.unpack_from(format, self.data, self.skip(struct.calcsize(format), what))

    def text(self, what: str) -> str:
        """A string."""
        (length,) = self.unpack("<Q", what)
        start = self.skip(length, what)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.path}: {what} is not UTF-8") from error

    def truncated(self, what: str) -> FormatError:
        """The error for `what` passing the end of the file."""
        return FormatError(f"{self.path}: {what} passes the end of the file at {self.size} bytes")


def _header(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and keys."""
    path = cursor.path
    if cursor.data[:4] != b"GGUF":
        raise FormatError(f"{path}: is not a GGUF file (it starts with {bytes(cursor.data[:4])!r})")
    cursor.skip(4, "the magic")
    (version,) = cursor.unpack("<I", "the version")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(f"{path}: is a big-endian GGUF file; only little-endian ones can be read")
    if version not in (2, 3):
        raise UnsupportedError(f"{path}: has GGUF version {version}; only versions 2 and 3 can be read")
    tensors, keys = cursor.unpack("<QQ", "the header")
    for count, most, what in ((tensors, _MOST_TENSORS, "tensors"), (keys, _MOST_KEYS, "metadata keys")):
        if count > most:
            raise FormatError(f"{path}: claims {count} {what}; at most {most} are read")
    return tensors, keys


def _keys(cursor: _Cursor, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for index in range(count):
        key = cursor.text(f"the name of metadata key {index}")
        if key in values:
            raise FormatError(f"{cursor.path}: metadata key {shown(key)} occurs twice")
        what = f"the value of metadata key {shown(key)}"
        (type,) = cursor.unpack("<I", what)
        values[key] = _array(cursor, what) if type == GGUFValueType.ARRAY else _scalar(cursor, type, what)
    return values


def _scalar(cursor: _Cursor, type: int, what: str) -> bool | int | float | str:
    if type == GGUFValueType.STRING:
        return cursor.text(what)
    if type == GGUFValueType.BOOL:
        (byte,) = cursor.unpack("<B", what)
        if byte > 1:
            raise FormatError(f"{cursor.path}: {what} is a boolean of value {byte}")
        return bool(byte)
    value: int | float
    (value,) = cursor.unpack(_format(cursor, type, what), what)
    return value


def _array(cursor: _Cursor, what: str) -> NDArray[Any] | PackedStrings:
    type, count = cursor.unpack("<IQ", what)
    if type == GGUFValueType.ARRAY:
        raise FormatError(f"{cursor.path}: {what} is an array of arrays")
    if type == GGUFValueType.STRING:
        return _strings(cursor, count, what)
    dtype = np.dtype("<B" if type == GGUFValueType.BOOL else _format(cursor, type, what))
    start = cursor.skip(count * dtype.itemsize, what)
    # A copy, as the bytes go on to grow.
    array = np.frombuffer(cursor.data, dtype, count, start).copy()
    if type == GGUFValueType.BOOL:
        if array.max(initial=0) > 1:
            raise FormatError(f"{cursor.path}: {what} has a boolean of value {array.max()}")
        return array.view(np.bool_)
    return array


def _strings(cursor: _Cursor, count: int, what: str) -> PackedStrings:
    data, start = cursor.data, cursor.position
    position, last, filled = start, cursor.size - 8, len(cursor.data) - 8
    length = struct.Struct("<Q").unpack_from
    # An absurd count fails soon: every string takes 8 bytes of the file.
    for _ in range(count):
        if position > last:
            raise cursor.truncated(what)
        if position > filled:
            cursor.fill(position + 8)
            filled = len(data) - 8
        position += 8 + length(data, position)[0]
    cursor.skip(position - start, what)
    return PackedStrings(bytes(memoryview(data)[start:position]), count)


def _format(cursor: _Cursor, type: int, what: str) -> str:
    if type not in _FORMATS:
        raise FormatError(f"{cursor.path}: {what} has type {type}, which GGUF does not know")
    return _FORMATS[type]


def _tensors(cursor: _Cursor, count: int, alignment: int, part: int) -> dict[str, TensorInfo]:
    entries = [_entry(cursor, index) for index in range(count)]
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type, offset in entries:
        where = f"{cursor.path}: tensor {shown(name)}"
        if name in tensors:
            raise FormatError(f"{where} occurs twice")
        elements, size = block_size(type)
        if shape[0] % elements:
            raise FormatError(f"{where} has rows of {shape[0]} elements, not a multiple of {type.name}'s {elements}")
        nbytes = math.prod(shape) // elements * size
        if offset % alignment:
            raise FormatError(f"{where} has offset {offset}, not a multiple of the alignment {alignment}")
        if base + offset + nbytes > cursor.size:
            raise FormatError(f"{where} passes the end of the file: {nbytes} bytes at {base + offset} of {cursor.size}")
        tensors[name] = TensorInfo(name, shape, type, base + offset, nbytes, part)
    for before, after in pairwise(sorted(tensors.values(), key=lambda info: info.offset)):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(f"{cursor.path}: tensors {shown(before.name)} and {shown(after.name)} overlap")
    return tensors


def _entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Name, shape, type and offset of one directory entry."""
    name = cursor.text(f"the name of tensor {index}")
    what = f"tensor {shown(name)}"
    (dimensions,) = cursor.unpack("<I", what)
    if not 1 <= dimensions <= 4:
        raise FormatError(f"{cursor.path}: {what} has {dimensions} dimensions, expected 1 to 4")
    shape = cursor.unpack(f"<{dimensions}Q", what)
    if 0 in shape:
        raise FormatError(f"{cursor.path}: {what} has an empty dimension: {list(shape)}")
    code, offset = cursor.unpack("<IQ", what)
    try:
        return name, shape, GGMLQuantizationType(code), offset
    except ValueError as error:
        raise UnsupportedError(f"{cursor.path}: {what} has unknown type {code}") from error
