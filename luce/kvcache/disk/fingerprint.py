"""Which model a snapshot is of: a digest of the files' contents and of whatever else gives its bytes their meaning."""

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
_REMEMBERED = 64
#: what a model's directory says of it
_ABOUT = "about.json"


class Fingerprint(msgspec.Struct, frozen=True):
    """What a snapshot is of: a digest of the files' bytes, and by name whatever else gives its own bytes meaning."""

    contents: str
    settings: dict[str, str]

    @classmethod
    def of(cls, contents: str, settings: Mapping[str, str], texts: Mapping[str, str]) -> Fingerprint:
        """`texts` are long ones: their digests count."""
        digests = {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}
        return cls(contents, {**settings, **digests})

    @property
    def model(self) -> str:
        """32 hex digits."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()

    def differences(self, other: Fingerprint) -> str:
        """In what another one differs, for people."""
        names = sorted({*self.settings, *other.settings})
        return ", ".join(
            f"{name} is {self.settings.get(name, 'off')} here and {other.settings.get(name, 'off')} there"
            for name in names
            if self.settings.get(name) != other.settings.get(name)
        )


def describe(directory: Path, fingerprint: Fingerprint) -> None:
    """Let a model's directory say what its snapshots are of. Raises OSError."""
    if described(directory) != fingerprint:
        write_file(directory / _ABOUT, msgspec.json.encode(fingerprint))


def described(directory: Path) -> Fingerprint | None:
    """What a model's directory says of itself, None if that cannot be read."""
    try:
        return msgspec.json.decode((directory / _ABOUT).read_bytes(), type=Fingerprint)
    except (OSError, msgspec.DecodeError):
        return None


def remembered(paths: Sequence[Path], record: Path) -> str | None:
    """The content digest of files if `content_digest` noted it in `record` and they did not change since."""
    try:
        known = json.loads(record.read_text())
        digest = known.get(_identity(paths))
    except (OSError, ValueError, AttributeError):
        return None
    return digest if isinstance(digest, str) else None


def content_digest(paths: Sequence[Path], record: Path) -> str:
    """A digest of the bytes of files, wherever they lie. Reads all of them, and notes the result in `record`.

    Raises OSError if a file cannot be read; a record that cannot be written is left out.
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
        _note(record, identity, digest)
    return digest


def _digest(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.blake2b(os.pread(file.fileno(), _CHUNK, at), digest_size=32).digest()


def _identity(paths: Sequence[Path]) -> str:
    facts = [os.stat(path) for path in paths]
    return ";".join(f"{f.st_dev}:{f.st_ino}:{f.st_size}:{f.st_mtime_ns}" for f in facts)


def _note(record: Path, identity: str, digest: str) -> None:
    try:
        known = json.loads(record.read_text())
        entries = [(str(k), str(v)) for k, v in known.items() if k != identity][-_REMEMBERED:]
    except (OSError, ValueError, AttributeError):
        entries = []
    new = record.with_name(f"{record.name}.{os.getpid()}")
    new.write_text(json.dumps(dict([*entries, (identity, digest)])))
    new.replace(record)
