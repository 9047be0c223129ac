"""Identifies the model of a snapshot: a digest of the model files, and the settings that change the cached bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from luce.kvcache.disk.files import write_file
from luce.kvcache.disk.threads import Threads

_CHUNK = 32 << 20
_THREADS = 4
#: digests in a record
_RECORDED = 64
#: the fingerprint in a model's directory
_ABOUT = "about.json"


class Fingerprint(msgspec.Struct, frozen=True):
    """A model with its settings. Snapshots are valid for one fingerprint."""

    #: digest of the bytes of the model files
    contents: str
    #: by name, the settings on which the bytes of a snapshot depend
    settings: dict[str, str]

    @classmethod
    def of(cls, contents: str, settings: Mapping[str, str], texts: Mapping[str, str]) -> Fingerprint:
        """The fingerprint with these settings. `texts` are long ones, of which only digests are stored."""
        digests = {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}
        return cls(contents, {**settings, **digests})

    @property
    def model(self) -> str:
        """Name of the model's directory: 32 hex digits."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()

    def differences(self, other: Fingerprint) -> str:
        """The settings in which another fingerprint differs, for people."""
        names = sorted({*self.settings, *other.settings})
        return ", ".join(
            f"{name} is {self.settings.get(name, 'off')} here and {other.settings.get(name, 'off')} there"
            for name in names
            if self.settings.get(name) != other.settings.get(name)
        )


def write_about(directory: Path, fingerprint: Fingerprint) -> None:
    """Write the fingerprint into a model's directory, for people. Raises OSError."""
    if read_about(directory) != fingerprint:
        write_file(directory / _ABOUT, msgspec.json.encode(fingerprint))


def read_about(directory: Path) -> Fingerprint | None:
    """The fingerprint in a model's directory, None if it cannot be read."""
    try:
        return msgspec.json.decode((directory / _ABOUT).read_bytes(), type=Fingerprint)
    except (OSError, msgspec.DecodeError):
        return None


def recorded_digest(paths: Sequence[Path], record: Path) -> str | None:
    """The digest that `content_digest` recorded for these files, None if there is none or the files have changed."""
    try:
        known = json.loads(record.read_text())
        digest = known.get(_identity(paths))
    except (OSError, ValueError, AttributeError):
        return None
    return digest if isinstance(digest, str) else None


def content_digest(paths: Sequence[Path], record: Path) -> str:
    """A digest of the bytes of files, whatever their paths are. Reads all bytes, and writes the result to `record`.

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
    with contextlib.suppress(OSError):
        _write_record(record, identity, digest)
    return digest


def _digest(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.blake2b(os.pread(file.fileno(), _CHUNK, at), digest_size=32).digest()


def _identity(paths: Sequence[Path]) -> str:
    facts = [os.stat(path) for path in paths]
    return ";".join(f"{f.st_dev}:{f.st_ino}:{f.st_size}:{f.st_mtime_ns}" for f in facts)


def _write_record(record: Path, identity: str, digest: str) -> None:
    try:
        known = json.loads(record.read_text())
        entries = [(str(k), str(v)) for k, v in known.items() if k != identity][-_RECORDED:]
    except (OSError, ValueError, AttributeError):
        entries = []
    new = record.with_name(f"{record.name}.{os.getpid()}")
    new.write_text(json.dumps(dict([*entries, (identity, digest)])))
    new.replace(record)
