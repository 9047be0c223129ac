"""A part: one file of tensors, in frames that are compressed and checked one by one. FORMAT.md shows the bytes.

The frames come first, then their index, then the trailer with the index's length and digest: a part with a trailer is
complete. Frames hold at most a few MiB, so that several threads can decode and memory stays bounded.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from luce.decoders import json_decoder
from luce.errors import LuceError
from luce.kvcache.disk.files import IrregularFileError, OpenDirectory
from luce.kvcache.disk.open_files import ReopenedFile

_MAGIC = b"LUCEPART"
_TRAILER = struct.Struct("<Q16s8s")
# Level 3 is a third slower than level 1 and no smaller; level -1 leaves half-precision floats as they are.
_LEVEL = 1
#: sizes in bytes of the values that are split into planes
_PLANES = (2, 4)
#: planes begin at multiples of this in memory
_ALIGNED = 64
#: sizes of reused buffers are multiples of this
_ROUND = 1 << 20
#: largest frame that a reader accepts: bytes before compression
_MOST = 1 << 30
#: largest index that a reader accepts: a million tokens of a model of a hundred layers have 16 MiB
_LARGEST_INDEX = 64 << 20
#: dtypes of tensors
_DTYPES = frozenset({"|u1", "|i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8"})
#: bytes that `check` decodes at once
_CHECKED = 1 << 20


class DamagedError(LuceError):
    """Bytes on the disk differ from those that were written."""


class Frame(msgspec.Struct, frozen=True):
    """A tensor in a part, or some pages of one."""

    name: str
    #: number of the first page, -1 if the tensor does not consist of pages
    page: int
    dtype: str
    shape: tuple[int, ...]
    #: position in the file, in bytes
    offset: int
    #: sizes in bytes of the zstd frames from there on, one for each plane; each ends with the XXH64 of its plane
    stored: tuple[int, ...]
    #: `word_sum` of each zstd frame: finds every flipped bit, even those that the decoder ignores
    sums: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class PartInfo(msgspec.Struct, frozen=True):
    """A part in a manifest."""

    #: of the file
    name: str
    bytes: int
    #: digest of the part's index
    index: str


def digest(data: bytes | memoryview) -> str:
    """BLAKE2b-128 in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def word_sum(data: bytes | bytearray | memoryview) -> int:
    """Sum of the little-endian 64-bit words modulo 2^64, the last word padded with zeros.

    Four times as fast as CRC-32. XXH64 checks the contents beside it.
    """
    whole = len(data) // 8
    words = np.frombuffer(data, "<u8", whole)
    return (int(np.add.reduce(words)) + int.from_bytes(data[8 * whole :], "little")) % (1 << 64)


class _Tools(threading.local):
    """A thread's codecs and buffers. New memory for each frame would cost as much as decoding it."""

    def __init__(self) -> None:
        self.packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self.opener = zstandard.ZstdDecompressor()
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def buffer(self, use: str, size: int) -> NDArray[np.uint8]:
        """`size` bytes of memory, valid until the next call for the same use."""
        found = self._buffers.get(use)
        if found is None or size > len(found):
            # Not filled, which would hold the interpreter. Rounded up, as sizes of frames differ a little.
            found = self._buffers[use] = np.empty(-(-size // _ROUND) * _ROUND, np.uint8)
        return found[:size]


_tools = _Tools()


def decode(frame: Frame, stored: Sequence[memoryview], into: NDArray[np.generic] | None = None) -> NDArray[np.generic]:
    """The array of a frame from its stored planes. Raises DamagedError.

    `into`: where to put it, C-contiguous and of the frame's shape and dtype; by default a new array.
    """
    try:
        dtype = np.dtype(frame.dtype)
        array = np.empty(frame.shape, dtype) if into is None else into
        if (array.shape, array.dtype) != (frame.shape, dtype):
            raise ValueError(f"{frame.shape} of {dtype} instead of {array.shape} of {array.dtype}")
        planes = _tools.buffer("planes", frame.nbytes).reshape(len(stored), -1)
        for plane, data, expected in zip(planes, stored, frame.sums, strict=True):
            if word_sum(data) != expected:
                raise ValueError("wrong checksum")
            _open(data, plane.data)
        _join(planes, array)
        return array
    except (ValueError, TypeError, zstandard.ZstdError) as error:
        raise DamagedError(f"{frame.name}: {error}") from error


def check(frame: Frame, stored: Sequence[memoryview]) -> None:
    """Decode the planes of a frame without keeping them. Raises DamagedError."""
    try:
        memory = _tools.buffer("checked", _CHECKED).data
        for data, expected in zip(stored, frame.sums, strict=True):
            if word_sum(data) != expected:
                raise ValueError("wrong checksum")
            left = _plane_size(data, frame.nbytes // len(stored))
            with _tools.opener.stream_reader(data) as reader:
                while left and (count := reader.readinto(memory[: min(left, len(memory))])):
                    left -= count
            if left:
                raise ValueError("a plane ends too early")
    except (ValueError, zstandard.ZstdError) as error:
        raise DamagedError(f"{frame.name}: {error}") from error


def _open(stored: memoryview, plane: memoryview) -> None:
    """Decode a zstd frame that holds exactly one plane. zstd writes straight to memory that is large enough."""
    if not _plane_size(stored, len(plane)):
        return
    with _tools.opener.stream_reader(stored) as reader:
        if reader.readinto(plane) != len(plane):
            raise ValueError("a plane ends too early")


def _plane_size(stored: memoryview, expected: int) -> int:
    """The bytes of a plane, which must be the expected ones."""
    size = zstandard.frame_content_size(stored)
    if size != expected:
        raise ValueError(f"a plane of {size} bytes instead of {expected}")
    return expected


def _split(values: NDArray[np.generic]) -> Iterator[memoryview]:
    """The planes of values, each valid until the next one is requested."""
    size = values.dtype.itemsize
    if size not in _PLANES:
        yield values.view(np.uint8).data
        return
    # Casts are twice as fast as reading every second byte; a reused buffer is twice as fast as a new one.
    words, plane = values.view(f"<u{size}"), _tools.buffer("plane", len(values))
    for number in range(size):
        np.right_shift(words, 8 * number, out=plane, dtype=words.dtype, casting="unsafe")
        yield plane.data


def _join(planes: NDArray[np.uint8], array: NDArray[np.generic]) -> None:
    """Write the values of an array from its planes."""
    if len(planes) == 2:
        # Twice as fast as writing every second byte.
        values = array.reshape(-1).view("<u2")
        np.left_shift(planes[1], 8, out=values, dtype=np.uint16, casting="unsafe")
        np.bitwise_or(values, planes[0], out=values)
        return
    joined = array.reshape(-1).view(np.uint8)
    for number, plane in enumerate(planes):
        joined[number :: len(planes)] = plane


class PartWriter:
    """Writes one part. Raises OSError, FileExistsError if there is anything of its name."""

    def __init__(self, directory: OpenDirectory, name: str) -> None:
        self._name = name
        self._file = directory.create(name)
        self._frames: list[Frame] = []
        self._file.write(_MAGIC)
        #: bytes in the file so far
        self.nbytes = len(_MAGIC)

    def add(self, name: str, array: NDArray[np.generic], page: int = -1) -> None:
        """Append a tensor, compressed.

        The bytes of floats are split into planes: the bytes with signs and exponents shrink when they are together, and
        the bytes of mantissas, which do not shrink, take little time to encode and decode.
        """
        values = np.ascontiguousarray(array).reshape(-1)
        packed = [_tools.packer.compress(plane) for plane in _split(values)]
        stored, sums = tuple(map(len, packed)), tuple(map(word_sum, packed))
        self._frames.append(Frame(name, page, array.dtype.str, array.shape, self.nbytes, stored, sums))
        for plane in packed:
            self._file.write(plane)
        self.nbytes += sum(stored)

    def finish(self) -> PartInfo:
        """Write the index and synchronise the file: all of it is on the disk when this returns."""
        index = msgspec.json.encode(self._frames)
        self._file.write(index)
        self._file.write(_TRAILER.pack(len(index), bytes.fromhex(digest(index)), _MAGIC))
        self._file.sync()
        self._file.close()
        self.nbytes += len(index) + _TRAILER.size
        return PartInfo(self._name, self.nbytes, digest(index))

    def close(self) -> None:
        """Stop writing. Idempotent."""
        self._file.close()


class PartReader:
    """Reads one part. Thread-safe. Raises OSError, DamagedError if the file is not the part of the manifest, and
    ValueError after `close`. `place` opens the directory of the part."""

    def __init__(self, place: Callable[[], OpenDirectory], info: PartInfo) -> None:
        def open_part() -> int:
            with place() as directory:
                return directory.open(info.name)

        try:
            self._file = ReopenedFile(open_part)
        except IrregularFileError as error:
            raise DamagedError(str(error)) from error
        try:
            self.frames = self._index(info)
        except BaseException:
            self.close()
            raise

    def read(self, frame: Frame, into: NDArray[np.generic] | None = None) -> NDArray[np.generic]:
        """The tensor of a frame, in `into` if that is given. Raises DamagedError or OSError."""
        return decode(frame, self._stored(frame), into)

    def check(self, frame: Frame) -> None:
        """Read a frame without its tensor: takes little memory, whatever its size. Raises DamagedError or OSError."""
        check(frame, self._stored(frame))

    def close(self) -> None:
        """Idempotent. Reads in progress finish first."""
        self._file.close()

    def _stored(self, frame: Frame) -> list[memoryview]:
        """The planes of a frame as they are stored, valid until the thread reads the next ones."""
        # Planes are aligned for `word_sum`.
        places = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in frame.stored)]
        memory = _tools.buffer("stored", places[-1]).data
        stored = [memory[at : at + size] for at, size in zip(places, frame.stored, strict=False)]
        # A descriptor that is closed during a read may name another file afterwards: its bytes would make a healthy
        # snapshot look damaged. This one stays open.
        with self._file.descriptor() as fd:
            read = os.preadv(fd, stored, frame.offset)
        if read != sum(frame.stored):
            raise DamagedError(f"{frame.name}: the file ends too early")
        return stored

    def _index(self, info: PartInfo) -> tuple[Frame, ...]:
        with self._file.descriptor() as fd:
            size = self._file.size
            begin, trailer = os.pread(fd, len(_MAGIC), 0), os.pread(fd, _TRAILER.size, max(0, size - _TRAILER.size))
            if size != info.bytes or size < len(_MAGIC) + _TRAILER.size:
                raise DamagedError(f"{info.name}: {size} bytes instead of {info.bytes}")
            length, found, end = _TRAILER.unpack(trailer)
            at = size - _TRAILER.size - length
            if begin != _MAGIC or end != _MAGIC or found.hex() != info.index or at < len(_MAGIC):
                raise DamagedError(f"{info.name}: not the part of the manifest")
            if length > _LARGEST_INDEX:
                raise DamagedError(f"{info.name}: an index of {length} bytes; the largest have {_LARGEST_INDEX}")
            index = os.pread(fd, length, at)
        if digest(index) != info.index:
            raise DamagedError(f"{info.name}: wrong checksum of the index")
        try:
            frames = json_decoder(tuple[Frame, ...]).decode(index)
        except (msgspec.DecodeError, RecursionError) as error:
            raise DamagedError(f"{info.name}: {error}") from error
        for frame in frames:
            if problem := _problem(frame, at):
                raise DamagedError(f"{info.name}: {frame.name[:100]}: {problem}")
        return frames


def _problem(frame: Frame, end: int) -> str:
    """Why no writer has made a frame, "" if one may have. `end`: of all frames of its file."""
    if frame.dtype not in _DTYPES or any(length < 0 for length in frame.shape):
        return f"{frame.shape} of {frame.dtype[:20]!r}"
    size, count = frame.nbytes, len(frame.stored)
    if size > _MOST or count not in (1, np.dtype(frame.dtype).itemsize) or count not in (1, *_PLANES):
        return f"{size} bytes in {count} planes"
    if len(frame.sums) != count or any(not 0 <= stored <= _most_stored(size // count) for stored in frame.stored):
        return f"{sum(frame.stored)} stored bytes for {size}"
    if not len(_MAGIC) <= frame.offset <= end - sum(frame.stored):
        return "it lies outside its file"
    return ""


def _most_stored(size: int) -> int:
    """The most bytes of a zstd frame of `size` bytes: noise grows by blocks' headers."""
    return size + (size >> 7) + 1024
