"""Files of which a part is there: what a journal says, and which models go for others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.cluster import partial_model as module
from luce.cluster.partial_model import Parts, Ranges, make_room
from luce.errors import DeviceError

pairs = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(pairs, max_size=12), pairs)
def test_ranges_are_a_set_of_numbers(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    ranges, numbers = Ranges(), set[int]()
    for begin, end in added:
        ranges.add(begin, end)
        numbers |= set(range(begin, end))
    assert {n for begin, end in ranges for n in range(begin, end)} == numbers
    missing = ranges.missing(*asked)
    assert [n for begin, end in missing for n in range(begin, end)] == sorted(set(range(*asked)) - numbers)
    assert all(begin < end for begin, end in missing)


def filled(root: Path, name: str, size: int = 1 << 20) -> None:
    """A model of which all is there."""
    one = Parts(root, name, [size])
    one.write(0, 0, np.full(size, 7, np.uint8))
    one.close()


def test_what_is_there_is_there_in_the_next_process(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "f", [100, 50])
    assert [path.name for path in parts.paths] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    parts.write(1, 10, np.arange(20, dtype=np.uint8))
    parts.note_compared("a")
    parts.close()
    again = Parts(tmp_path, "f", [100, 50])
    assert again.there[1].missing(0, 50) == [(0, 10), (30, 50)] and again.compared == {"a"}
    assert again.paths[1].read_bytes()[10:30] == bytes(range(20)) and again.paths[0].stat().st_size == 100
    again.close()
    # Another layout is another file.
    other = Parts(tmp_path, "f", [100, 51])
    assert other.there[1].missing(0, 51) == [(0, 51)] and other.compared == set()
    other.close()


def test_a_torn_line_is_not_believed(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "f", [100])
    parts.write(0, 0, np.zeros(10, np.uint8))
    parts.close()
    with open(tmp_path / "f" / "journal", "ab") as journal:
        journal.write(b"[0, 10, 20]")
    again = Parts(tmp_path, "f", [100])
    assert again.there[0].missing(0, 100) == [(10, 100)]
    again.write(0, 20, np.zeros(10, np.uint8))
    again.close()
    last = Parts(tmp_path, "f", [100])
    assert last.there[0].missing(0, 100) == [(10, 20), (30, 100)]
    last.close()


def test_the_journal_never_says_more_than_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(tmp_path, "f", [100])
    order: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    parts.write(0, 0, np.zeros(10, np.uint8))
    assert not order and (tmp_path / "f" / "journal").read_bytes() == b""
    parts.sync()
    assert order == ["model.gguf", "journal"]
    parts.close()


def test_the_files_have_one_user(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "f", [100])
    with pytest.raises(DeviceError, match="another luce join uses it"):
        Parts(tmp_path, "f", [100])
    parts.close()
    Parts(tmp_path, "f", [100]).close()


def test_the_least_recently_used_model_makes_room(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new", "own")):
        filled(tmp_path, name)
        os.utime(tmp_path / name / "lock", (number, number))
    used = Parts(tmp_path, "old", [1 << 20])
    os.utime(tmp_path / "old" / "lock", (0, 0))
    make_room(tmp_path, "own", 1 << 20, 4 << 20)
    # One in use stays.
    assert (tmp_path / "old" / "model.gguf").exists() and not (tmp_path / "new").exists()
    used.close()
    filled(tmp_path, "own")
    make_room(tmp_path, "own", 1 << 20, (2 << 20) + 100_000)
    assert not (tmp_path / "old").exists() and (tmp_path / "own" / "model.gguf").exists()
    with pytest.raises(DeviceError, match="need 2097152 more bytes, --cache-size allows 2097152 in all"):
        make_room(tmp_path, "own", 2 << 20, 2 << 20)


def test_a_full_disk_is_told_with_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=module.SPARE + 500)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    make_room(tmp_path, "own", 500, 0)
    with pytest.raises(DeviceError, match="need 501 more bytes, 500 are free"):
        make_room(tmp_path, "own", 501, 0)


@pytest.mark.parametrize("name", ["", ".", "..", "../own", "own/..", "own\0"])
def test_a_fingerprint_names_no_folder_elsewhere(tmp_path: Path, name: str) -> None:
    own = tmp_path / "own" / "model.gguf"
    own.parent.mkdir()
    own.write_bytes(b"model")
    with pytest.raises(DeviceError, match="no fingerprint"):
        Parts(tmp_path / "parts", name, [1])
    with pytest.raises(DeviceError, match="no fingerprint"):
        Parts(tmp_path / "parts", str(own.parent), [1])
    assert own.read_bytes() == b"model" and not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    "line",
    [
        "[-1, 0, 10]",
        "[1, 0, 10]",
        "[0, -5, 10]",
        "[0, 10, 10]",
        "[0, 10, 5]",
        "[0, 0, 101]",
        "[0, 0.5, 10]",
        "[false, 0, 10]",
        '[0, "a", "b"]',
        "[0, 10]",
        '{"0": 1, "1": 2, "2": 3}',
        "null",
    ],
)
def test_a_line_that_no_writing_made_is_not_believed(tmp_path: Path, line: str) -> None:
    filled(tmp_path, "f", 100)
    (tmp_path / "f" / "journal").write_text(f"[0, 40, 50]\n{line}\n[0, 60, 70]\n")
    again = Parts(tmp_path, "f", [100])
    assert again.there[0].missing(0, 100) == [(0, 40), (50, 100)]
    again.close()
    assert (tmp_path / "f" / "journal").read_text() == "[0, 40, 50]\n"


def test_what_the_disk_has_not_kept_is_not_claimed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(tmp_path, "f", [100])
    fsync, failures = os.fsync, ["once"]

    def fail(fd: int) -> None:
        # The kernel reports a lost page once; the next fsync of the file succeeds without it.
        if failures and Path(os.readlink(f"/proc/self/fd/{fd}")).name == "model.gguf":
            failures.pop()
            raise OSError(5, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    parts.write(0, 0, np.zeros(10, np.uint8))
    parts.note_compared("a")
    with pytest.raises(DeviceError, match="Input/output error"):
        parts.sync()
    parts.write(0, 50, np.zeros(10, np.uint8))
    parts.close()
    again = Parts(tmp_path, "f", [100])
    assert again.there[0].missing(0, 100) == [(0, 50), (60, 100)] and not again.compared
    again.close()


def test_a_journal_that_is_written_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, pwrite = Parts(tmp_path, "f", [100]), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    for begin in (0, 20, 40):
        parts.write(0, begin, np.ones(10, np.uint8))
    parts.sync()
    parts.close()
    again = Parts(tmp_path, "f", [100])
    assert again.there[0].missing(0, 100) == [(10, 20), (30, 40), (50, 100)]
    assert again.paths[0].read_bytes()[:10] == b"\1" * 10
    again.close()


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, pwrite, room = Parts(tmp_path, "f", [100]), os.pwrite, [7]

    def write(fd: int, data: memoryview, at: int) -> int:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name != "journal" or not room:
            return pwrite(fd, data, at)
        if not room[0]:
            room.pop()
            raise OSError(28, "No space left on device")
        room[0] -= (written := pwrite(fd, data[: room[0]], at))
        return written

    monkeypatch.setattr(os, "pwrite", write)
    parts.write(0, 0, np.ones(10, np.uint8))
    with pytest.raises(DeviceError, match="No space left on device"):
        parts.sync()
    parts.write(0, 20, np.ones(10, np.uint8))
    parts.close()
    again = Parts(tmp_path, "f", [100])
    assert again.there[0].missing(0, 100) == [(0, 20), (30, 100)]
    again.close()
