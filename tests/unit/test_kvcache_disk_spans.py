"""Spans of compressed prompts on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.compress.span_cache import SpanCache
from luce.kvcache.disk import spans as disk
from luce.kvcache.disk.spans import DIRECTORY, SpanFiles

SPANS = ((0, 5), (9, 1 << 20))
A, B = bytes(16), bytes(range(16))


def test_another_process_finds_them(tmp_path: Path) -> None:
    SpanFiles(tmp_path / "new").put(A, SPANS)
    other = SpanFiles(tmp_path / "new")
    assert other.get(A) == SPANS and other.get(B) is None
    other.put(A, ())
    assert SpanFiles(tmp_path / "new").get(A) == ()


def test_only_this_user_reads_them(tmp_path: Path) -> None:
    SpanFiles(tmp_path).put(A, SPANS)
    directory = tmp_path / DIRECTORY
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in directory.iterdir()] == [0o600]


def test_a_cache_that_starts_asks_the_disk_once(tmp_path: Path) -> None:
    SpanCache("", 1 << 20, SpanFiles(tmp_path)).put(A, SPANS)
    cache = SpanCache("", 1 << 20, SpanFiles(tmp_path))
    assert cache.get(A) == SPANS
    (tmp_path / DIRECTORY / A.hex()).unlink()
    assert cache.get(A) == SPANS and SpanCache("", 1 << 20, SpanFiles(tmp_path)).get(A) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "of another key"])
def test_damaged_files_do_not_count(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    SpanFiles(tmp_path).put(A, SPANS)
    file = tmp_path / DIRECTORY / A.hex()
    data = file.read_bytes()
    changed = {"cut": data[:-1], "changed": b"\x01" + data[1:], "empty": b"", "of another key": data}[damage]
    wanted = B if damage == "of another key" else A
    (tmp_path / DIRECTORY / wanted.hex()).write_bytes(changed)
    assert SpanFiles(tmp_path).get(wanted) is None
    assert f"{wanted.hex()} is damaged" in caplog.text


def test_the_least_recently_used_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_FILES", 4)
    monkeypatch.setattr(disk, "SPARE", 1)
    clock = iter(range(1 << 30, 1 << 31, 1000))
    monkeypatch.setattr("time.time", lambda: next(clock))
    files = SpanFiles(tmp_path)
    keys = [bytes([number]) * 16 for number in range(5)]
    for key in keys[:4]:
        files.put(key, SPANS)
        assert files.get(key) == SPANS
    # The first one is used again; then the second one is the oldest.
    assert files.get(keys[0]) == SPANS
    files.put(keys[4], SPANS)
    assert [files.get(key) is not None for key in keys] == [True, False, False, True, True]


@pytest.mark.parametrize("broken", ["a link", "a file"])
def test_a_directory_that_is_none_costs_no_prompt(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / DIRECTORY
    if broken == "a link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("")
    files = SpanFiles(tmp_path)
    files.put(A, SPANS)
    assert files.get(A) is None
    assert caplog.text.count("cannot store or read spans of compressed prompts") == 1
    assert not list(tmp_path.glob("elsewhere/*"))
