"""Identifies the model of a snapshot: a digest of the model files, and the settings that change the cached bytes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from luce.decoders import json_decoder
from luce.kvcache.disk.files import OpenDirectory, open_directory
from luce.kvcache.disk.threads import Threads

_log = logging.getLogger(__name__)

_CHUNK = 32 << 20
_THREADS = 4
#: digests in a record
_RECORDED = 64
#: the record, in --kv-cache-dir
RECORD = "contents.json"
#: the fingerprint in a model's directory
_ABOUT = "about.json"
#: largest file of either that is read
_MOST_BYTES = 1 << 20


class Fingerprint(msgspec.Struct, frozen=True):
    """A model with its settings. Snapshots are valid for one fingerprint."""

    #: digest of the bytes of the model files
    contents: str
    #: by name, the settings on which the bytes of a snapshot depend
    settings: dict[str, str]
    #: of the model, for people; the same bytes under another name are the same model
    name: str = ""

    @classmethod
    def of(cls, contents: str, settings: Mapping[str, str], texts: Mapping[str, str], *, name: str = "") -> Fingerprint:
        """The fingerprint with these settings. `texts` are long ones, of which only digests are stored."""
        digests = {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}
        return cls(contents, {**settings, **digests}, name)

    @property
    def model(self) -> str:
        """Name of the model's directory: 32 hex digits."""
        meaning = {"contents": self.contents, "settings": self.settings}
        return hashlib.blake2b(msgspec.json.encode(meaning, order="sorted"), digest_size=16).hexdigest()

    def differences(self, other: Fingerprint) -> str:
        """The settings in which another fingerprint differs, for people."""
        names = sorted({*self.settings, *other.settings})
        return ", ".join(
            f"{name} is {self.settings.get(name, 'off')} here and {other.settings.get(name, 'off')} there"
            for name in names
            if self.settings.get(name) != other.settings.get(name)
        )


def write_about(directory: OpenDirectory, fingerprint: Fingerprint) -> None:
    """Write the fingerprint into a model's directory, for people. Raises OSError."""
    if read_about(directory) != fingerprint:
        directory.replace(_ABOUT, msgspec.json.encode(fingerprint))


def read_about(directory: OpenDirectory) -> Fingerprint | None:
    """The fingerprint in a model's directory, None if it cannot be read."""
    try:
        return json_decoder(Fingerprint).decode(directory.read(_ABOUT, _MOST_BYTES))
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def recorded_digest(paths: Sequence[Path], root: Path) -> str | None:
    """The digest that `content_digest` recorded for these files, None if there is none or the files have changed.

    `root`: --kv-cache-dir.
    """
    try:
        with open_directory(root) as directory:
            return _read_record(directory).get(_identity(paths))
    except OSError:
        return None


def content_digest(paths: Sequence[Path], root: Path) -> str:
    """A digest of the bytes of files, whatever their paths are. Reads all bytes, and records the result below `root`,
    which is --kv-cache-dir.

    Raises OSError if a file cannot be read. Goes on if the record cannot be written.
    """
    identity = _identity(paths)
    hashed = hashlib.blake2b(digest_size=32)
    threads = Threads(_THREADS, "luce-digest")
    try:
        for path in paths:
            size = path.stat().st_size
            hashed.update(size.to_bytes(8, "little"))
            for part in [threads.submit(_digest, path, at) for at in range(0, size, _CHUNK)]:
                hashed.update(part.result())
    finally:
        threads.close(0.0)
    digest = hashed.hexdigest()
    try:
        with open_directory(root) as directory:
            others = [(k, v) for k, v in _read_record(directory).items() if k != identity]
            directory.replace(RECORD, msgspec.json.encode(dict([*others[-_RECORDED:], (identity, digest)])))
    except OSError as error:
        _log.warning("the digest of the model is not recorded, so the next start reads all of its files: %s", error)
    return digest


def _digest(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.blake2b(os.pread(file.fileno(), _CHUNK, at), digest_size=32).digest()


def _identity(paths: Sequence[Path]) -> str:
    facts = [os.stat(path) for path in paths]
    return ";".join(f"{f.st_dev}:{f.st_ino}:{f.st_size}:{f.st_mtime_ns}" for f in facts)


def _read_record(directory: OpenDirectory) -> dict[str, str]:
    """The record in --kv-cache-dir, empty if there is none."""
    try:
        return json_decoder(dict[str, str]).decode(directory.read(RECORD, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        _log.warning("%s is not used: %s", directory.path / RECORD, error)
        return {}
