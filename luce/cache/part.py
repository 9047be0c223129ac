"""A part: one file of tensors, each in frames that are compressed and checked on their own. FORMAT.md shows the bytes.

A part is complete when its trailer is: the frames, then their index, then its length and digest. Frames hold at most a
few MiB, so that threads can work side by side and memory stays bounded.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from luce.errors import LuceError

_MAGIC = b"LUCEPART"
_TRAILER = struct.Struct("<Q16s8s")
# Level 3 is a third slower than level 1 and no smaller; level -1 leaves half-precision floats as they are.
_LEVEL = 1
#: largest frame that a reader accepts, uncompressed
_MOST = 1 << 30


class DamagedError(LuceError):
    """Stored bytes are not what was written."""


class Frame(msgspec.Struct, frozen=True):
    """One tensor, or some pages of it.

    page    number of the first page, -1 where the tensor is not made of a sequence's pages
    planes  bytes per value: the first bytes of all values lie together, then the second bytes, and so on
    digest  BLAKE2b-128 of the stored bytes, in hex
    """

    name: str
    page: int
    dtype: str
    shape: tuple[int, ...]
    planes: int
    codec: str
    offset: int
    stored: int
    digest: str


class PartInfo(msgspec.Struct, frozen=True):
    """What a manifest says of a part: file name, size, digest of its index."""

    name: str
    bytes: int
    index: str


def digest(data: bytes | memoryview) -> str:
    """BLAKE2b-128 in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Encoded:
    """A tensor as it is stored: see Frame."""

    stored: bytes
    codec: str
    planes: int
    digest: str


def encode(array: NDArray[np.generic]) -> Encoded:
    """The stored form of an array. Any thread may do it.

    The bytes of floats are split into planes: signs and exponents then lie together and shrink, and mantissas, which do
    not, cost the decoder nothing (f16 from a normal distribution: 1.18 instead of 1.09, read 2.7 times as fast).
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    planes = array.dtype.itemsize if array.dtype.itemsize in (2, 4) else 1
    if planes > 1:
        split = np.empty((planes, raw.size // planes), np.uint8)
        for plane in range(planes):
            split[plane] = raw[plane::planes]
        raw = split.reshape(-1)
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(raw.data)
    stored, codec = (packed, "zstd") if len(packed) < raw.size else (raw.tobytes(), "raw")
    return Encoded(stored, codec, planes, digest(stored))


def decode(frame: Frame, stored: bytes, into: NDArray[np.generic] | None = None) -> NDArray[np.generic]:
    """The array of a frame, in `into` if that is given: C-contiguous, of its shape and dtype. Raises DamagedError."""
    if digest(stored) != frame.digest:
        raise DamagedError(f"{frame.name}: the checksum is wrong")
    try:
        dtype = np.dtype(frame.dtype)
        size = int(np.prod(frame.shape, dtype=np.int64)) * dtype.itemsize
        if not 0 <= size <= _MOST or dtype.hasobject or frame.planes not in (1, dtype.itemsize):
            raise ValueError(f"{size} bytes of {dtype}")
        if frame.codec == "zstd":
            stored = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
        raw = np.frombuffer(stored, np.uint8)
        if raw.size != size:
            raise ValueError(f"{raw.size} bytes instead of {size}")
        array = np.empty(frame.shape, dtype) if into is None else into
        if (array.shape, array.dtype) != (frame.shape, dtype):
            raise ValueError(f"{frame.shape} of {dtype} instead of {array.shape} of {array.dtype}")
        joined = array.reshape(-1).view(np.uint8)
        for plane, values in enumerate(raw.reshape(frame.planes, -1)):
            joined[plane :: frame.planes] = values
        return array
    except (ValueError, TypeError, zstandard.ZstdError) as error:
        raise DamagedError(f"{frame.name}: {error}") from error


class PartWriter:
    """Writes one part. `nbytes` are in the file so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
        self._frames: list[Frame] = []
        self._file.write(_MAGIC)
        self.nbytes = len(_MAGIC)

    def add(self, name: str, array: NDArray[np.generic], encoded: Encoded, page: int = -1) -> None:
        """Append a tensor, which `encode` has encoded."""
        stored = encoded.stored
        frame = Frame(
            name=name,
            page=page,
            dtype=array.dtype.str,
            shape=array.shape,
            planes=encoded.planes,
            codec=encoded.codec,
            offset=self.nbytes,
            stored=len(stored),
            digest=encoded.digest,
        )
        self._frames.append(frame)
        self._file.write(stored)
        self.nbytes += len(stored)

    def finish(self) -> PartInfo:
        """Write the index; everything is on the disk when this returns."""
        index = msgspec.json.encode(self._frames)
        self._file.write(index)
        self._file.write(_TRAILER.pack(len(index), bytes.fromhex(digest(index)), _MAGIC))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.nbytes += len(index) + _TRAILER.size
        return PartInfo(self._path.name, self.nbytes, digest(index))

    def close(self) -> None:
        """Give up. Idempotent."""
        self._file.close()


class PartReader:
    """Reads one part. Thread-safe. Raises OSError, or DamagedError if it is not the part that the manifest means."""

    def __init__(self, directory: Path, info: PartInfo) -> None:
        self._file: BinaryIO = open(directory / info.name, "rb")  # noqa: SIM115
        try:
            self.frames = self._index(info)
        except BaseException:
            self.close()
            raise

    def read(self, frame: Frame, into: NDArray[np.generic] | None = None) -> NDArray[np.generic]:
        """The tensor of a frame, in `into` if that is given. Raises DamagedError."""
        return decode(frame, os.pread(self._file.fileno(), frame.stored, frame.offset), into)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def _index(self, info: PartInfo) -> tuple[Frame, ...]:
        fd = self._file.fileno()
        size = os.fstat(fd).st_size
        begin, trailer = os.pread(fd, len(_MAGIC), 0), os.pread(fd, _TRAILER.size, max(0, size - _TRAILER.size))
        if size != info.bytes or size < len(_MAGIC) + _TRAILER.size:
            raise DamagedError(f"{info.name}: {size} bytes instead of {info.bytes}")
        length, found, end = _TRAILER.unpack(trailer)
        at = size - _TRAILER.size - length
        if begin != _MAGIC or end != _MAGIC or found.hex() != info.index or at < len(_MAGIC):
            raise DamagedError(f"{info.name}: not the part that the manifest names")
        index = os.pread(fd, length, at)
        if digest(index) != info.index:
            raise DamagedError(f"{info.name}: the checksum of the index is wrong")
        try:
            return msgspec.json.decode(index, type=tuple[Frame, ...])
        except msgspec.DecodeError as error:
            raise DamagedError(f"{info.name}: {error}") from error
