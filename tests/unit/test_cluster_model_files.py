"""Model files by their fingerprint, and the addresses that tokens name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from luce.cluster import model_files
from luce.cluster.addresses import reachable
from luce.cluster.model_files import find_model
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from tests.support.reference import Reference

MODEL, OTHER = Reference("qwen3-a-F32").path, Reference("gemma4-e-F32").path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "cache"


def of(path: Path) -> str:
    with open_gguf(path) as file:
        return fingerprint(file)


def test_a_file_is_found_under_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "below"
    folder.mkdir(parents=True)
    (folder / "damaged.gguf").write_bytes(b"GGUF")
    shutil.copy(OTHER, folder / "a.gguf")
    copy = Path(shutil.copy(MODEL, folder / "b.gguf"))
    assert find_model(of(MODEL), [tmp_path / "models"]) == copy
    assert find_model("0" * 32, [tmp_path / "models"]) is None
    assert find_model(of(MODEL), [tmp_path / "none"]) is None
    # Without folders, where models of this machine lie.
    own = tmp_path / "cache/huggingface/hub/models--org--repo/snapshots/1"
    own.mkdir(parents=True)
    shutil.copy(MODEL, own / "model-F32.gguf")
    assert find_model(of(MODEL), []) == own / "model-F32.gguf"


def test_a_fingerprint_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    copy = Path(shutil.copy(MODEL, folder / "b.gguf"))
    taken: list[Path] = []

    def opened(path: Path) -> object:
        taken.append(path)
        return open_gguf(path)

    monkeypatch.setattr(model_files, "open_gguf", opened)
    for _ in range(2):
        assert find_model(of(MODEL), [folder]) == copy
    assert taken == [copy]
    # Another file under the same path, and one that was written in place.
    os.replace(shutil.copy(OTHER, folder / "new"), copy)
    assert find_model(of(MODEL), [folder]) is None and find_model(of(OTHER), [folder]) == copy
    status = copy.stat()
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert find_model(of(OTHER), [folder]) == copy and len(taken) == 3


def test_addresses() -> None:
    assert reachable("10.0.0.7", 7443) == ("10.0.0.7:7443",)
    assert reachable("::1", 7443) == ("[::1]:7443",)
    # All interfaces: the loopback one comes last.
    for host in ("0.0.0.0", "::"):
        assert reachable(host, 7443)[-1] == "127.0.0.1:7443"
