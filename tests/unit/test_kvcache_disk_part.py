"""Frames and parts: what is read is what was written, or an error."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.kvcache.disk.files import open_directory
from luce.kvcache.disk.part import DamagedError, PartInfo, PartReader, PartWriter, word_sum


def part_writer(path: Path) -> PartWriter:
    with open_directory(path.parent) as directory:
        return PartWriter(directory, path.name)


def part_reader(directory: Path, info: PartInfo) -> PartReader:
    return PartReader(lambda: open_directory(directory), info)


DTYPES = st.sampled_from(["<f4", "<f2", "<u2", "u1", "<i4"])


def write(path: Path, arrays: list[np.ndarray]) -> tuple[PartReader, bytes]:  # type: ignore[type-arg]
    path.unlink(missing_ok=True)
    writer = part_writer(path)
    for number, array in enumerate(arrays):
        writer.add(f"blk.{number}.k", array, number)
    info = writer.finish()
    data = path.read_bytes()
    assert len(data) == info.bytes == writer.nbytes
    return part_reader(path.parent, info), data


@settings(max_examples=50)
@given(data=st.data())
def test_what_is_written_is_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    arrays = []
    for number in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
        dtype = np.dtype(data.draw(DTYPES))
        rng = np.random.default_rng(number)
        values = rng.standard_normal(shape) if data.draw(st.booleans()) else np.zeros(shape)
        arrays.append((values * 100).astype(dtype))
    reader, _ = write(tmp_path_factory.mktemp("parts") / "part", arrays)
    for frame, array in zip(reader.frames, arrays, strict=True):
        read = reader.read(frame)
        assert read.dtype == array.dtype and read.shape == array.shape and (read == array).all()
    reader.close()


def test_floats_from_a_normal_distribution_shrink(tmp_path: Path) -> None:
    # Measured 0.871 and 0.845; unsplit 0.92 both.
    values = np.random.default_rng(0).standard_normal(200_000)
    for dtype in (np.float16, np.float32):
        reader, data = write(tmp_path / "part", [values.astype(dtype)])
        reader.close()
        assert 0.8 < len(data) / (200_000 * np.dtype(dtype).itemsize) < 0.88


def test_noise_grows_little(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    reader, data = write(tmp_path / "part", [noise])
    assert len(data) < 10_400
    reader.close()


@settings(max_examples=200)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(place: float, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("parts") / "part"
    writer = part_writer(path)
    arrays = [np.arange(300, dtype=np.float32).reshape(3, 100), np.random.default_rng(0).integers(0, 256, 99, np.uint8)]
    for array in arrays:
        writer.add("blk.0.k", array)
    info = writer.finish()
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        reader = part_reader(path.parent, info)
        try:
            for frame in reader.frames:
                reader.read(frame)
        finally:
            reader.close()


def test_changes_with_equal_sums_are_found(tmp_path: Path) -> None:
    # Noise is stored as it is: its words can be changed without harm to the frame around them.
    noise = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    reader, data = write(tmp_path / "part", [noise])
    (frame,) = reader.frames
    stored = bytearray(data[frame.offset : frame.offset + frame.stored[0]])
    words = np.frombuffer(stored, "<u8", 100, offset=64)
    assert words[1:90].tobytes() in noise.tobytes()
    before = word_sum(stored)
    words[[7, 30]] = words[[30, 7]]
    assert word_sum(stored) == before
    (tmp_path / "part").write_bytes(data[: frame.offset] + stored + data[frame.offset + len(stored) :])
    with pytest.raises(DamagedError):
        reader.read(frame)
    reader.close()


@settings(max_examples=100)
@given(data=st.binary(max_size=40))
def test_sums_of_words(data: bytes) -> None:
    padded = data + bytes(-len(data) % 8)
    expected = sum(int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)) % 2**64
    assert word_sum(data) == word_sum(memoryview(data)) == expected


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_found(share: float, tmp_path: Path) -> None:
    writer = part_writer(tmp_path / "part")
    array = np.arange(300, dtype=np.float32)
    writer.add("blk.0.k", array)
    info = writer.finish()
    data = (tmp_path / "part").read_bytes()
    (tmp_path / "part").write_bytes(data[: int(share * len(data))])
    with pytest.raises(DamagedError):
        part_reader(tmp_path, info)


def test_a_file_stays_open_while_a_read_is_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A closed descriptor may name another file later, whose bytes would make a healthy snapshot look damaged.
    array = np.arange(300, dtype=np.float32)
    reader, _ = write(tmp_path / "part", [array])
    begun, go, read = threading.Event(), threading.Event(), os.preadv
    descriptors: list[int] = []

    def slow(fd: int, *arguments: Any) -> int:
        descriptors.append(fd)
        begun.set()
        assert go.wait(60)
        return read(fd, *arguments)

    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(reader.read, reader.frames[0])
        assert begun.wait(60)
        reader.close()
        os.fstat(descriptors[0])
        go.set()
        assert (found.result(60) == array).all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    with pytest.raises(ValueError, match="closed"):
        reader.read(reader.frames[0])
