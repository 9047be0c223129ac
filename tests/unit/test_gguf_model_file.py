"""A model file that is read after or while it is closed. test_gguf_reader has files that change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luce.gguf.model_file import FileRows, ModelFile

READS: dict[str, Callable[[ModelFile], Any]] = {
    "read": lambda file: file.read(0, 4),
    "rows": lambda file: FileRows(file, 0, (2, 2))[:1],
    "check_path": lambda file: file.check_path(),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights.")
    return path


@pytest.mark.parametrize("read", READS)
def test_a_read_after_close_names_the_file_and_meets_no_other(read: str, path: Path) -> None:
    file = ModelFile(path)
    file.close()
    file.close()
    # The lowest number that is free is the one that the file had.
    with path.open("rb"), pytest.raises(ValueError, match=r"model\.gguf: is read after it was closed"):
        READS[read](file)


def test_close_waits_for_the_read_in_progress(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile(path)
    (path.parent / "other").write_bytes(b"another file's bytes")
    before, preadv, others = set(os.listdir("/proc/self/fd")), os.preadv, []

    def close_first(*args: Any) -> int:
        file.close()
        others.append((path.parent / "other").open("rb"))
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", close_first)
    assert file.read(0, 8).tobytes() == b"weights."
    others[0].close()
    # The number is free behind the read.
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1
