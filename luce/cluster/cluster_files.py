"""The directory of a cluster: keys, members and tokens, written whole or not at all, for this user's eyes alone.

coordinator.pem   its key and certificate          member.pem     a member's
members.json      its members, and the epoch       server.json    the addresses and certificates of a member's
tokens.json       digests of the join tokens                      coordinator
lock, socket      of the coordinator that runs     member.lock    of the member that runs
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from luce.cluster.identity import Identity, new_key_pair, read_identity
from luce.config.directories import user_data_directory
from luce.decoders import json_decoder
from luce.errors import UsageError

Value = TypeVar("Value")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}", re.ASCII)


def is_cluster_name(text: str) -> bool:
    """Whether a text can name a cluster, or a member of one: a directory has this name."""
    return _NAME.fullmatch(text) is not None


def clusters() -> list[str]:
    """The clusters of this machine's servers, by name."""
    with contextlib.suppress(OSError):
        return sorted(path.parent.name for path in _root().glob("*/coordinator.pem"))
    return []


def _root() -> Path:
    return user_data_directory() / "cluster"


class ClusterFiles:
    """The directory of the cluster `name`.

    Raises UsageError if it is not there, or cannot be made where `make` says so, or if other users can enter it.
    """

    def __init__(self, name: str, *, make: bool = True) -> None:
        if not is_cluster_name(name):
            raise UsageError(f"cluster {name!r}: a name has a..z, 0..9 and -, at most 32 of them", param="cluster")
        self.name = name
        self.path = _root() / name
        try:
            if make:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except OSError as error:
            raise UsageError(f"cluster {name}: {self.path}: {error.strerror}", param="cluster") from None
        if mode & 0o077:
            raise UsageError(f"{self.path}: other users can enter it (mode {mode:04o}): chmod 700 {self.path}")

    def identity(self, name: str) -> Identity:
        """The identity in a file of the directory, which is made if it is missing. Raises UsageError."""
        path = self.path / name
        if not path.exists():
            self.write(name, new_key_pair())
        return read_identity(path)

    def read(self, name: str, type: type[Value]) -> Value | None:
        """The JSON value of a file; None if there is none. Raises UsageError if it is not of the type."""
        path = self.path / name
        try:
            return json_decoder(type).decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"{path}: {error}", param="cluster") from None

    def write(self, name: str, content: object) -> None:
        """Write bytes, or a value as JSON: after a crash the file is the old one or the new one. Raises UsageError."""
        data = content if isinstance(content, bytes) else msgspec.json.format(msgspec.json.encode(content))
        temporary = ""
        try:
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".", delete=False) as file:
                temporary = file.name
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.replace(Path(temporary).name, name)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise UsageError(f"{self.path / name}: {error.strerror}", param="cluster") from None

    def replace(self, old: str, new: str) -> None:
        """Rename a file of the directory, durably. Raises OSError."""
        os.replace(self.path / old, self.path / new)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def lock(self, name: str, who: str) -> int:
        """The descriptor that keeps other processes from this lock until it is closed. Raises UsageError if one has it,
        which the message calls `who`."""
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise UsageError(f"cluster {self.name}: {who} of this cluster runs here", param="cluster") from None
        return fd
