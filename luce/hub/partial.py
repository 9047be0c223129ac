"""A file that arrives over HTTP: resumed where it broke off, checked, and put in place in one step.

The bytes go to a file of their own beside the target, which stays when the download breaks off; the next one asks for
the rest. `hf_hub_download` does neither: its partial file goes with the process, and it compares sizes only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from luce.errors import ModelError
from luce.hub.reporting import Progress

#: ending of a file whose bytes are not all there
INCOMPLETE = ".luce.incomplete"
_CHUNK = 1 << 20
#: digits of a SHA-1
_SHA1_DIGITS = 40


@dataclass(frozen=True)
class Source:
    """Where the bytes of a file come from, and what they must be."""

    #: for the user
    name: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    #: in hexadecimal digits: SHA-256, or the SHA-1 of a git object; empty: not known
    digest: str = ""
    #: bytes; None: not known
    size: int | None = None


def receive(source: Source, target: Path, partial: Path, progress: Progress, report: Callable[[int], None]) -> None:
    """Download `source` to `target`, through `partial`; nothing happens if it is there by now. `report` gets the bytes
    that are there.

    Raises ModelError if the bytes do not have the digest, and then none of them stays; also what
    `huggingface_hub.file_download.http_get` raises, and then they stay.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(source, target, partial, progress) as file:
        if file is None:
            return
        if source.size is not None and os.fstat(file.fileno()).st_size > source.size:
            file.truncate(0)
        _get(source, file, report)
        file.flush()
        os.fsync(file.fileno())
        try:
            check(source, partial, progress)
        except ModelError:
            partial.unlink()
            raise
        os.replace(partial, target)
        sync_directory(target.parent)


@contextlib.contextmanager
def _locked(source: Source, target: Path, partial: Path, progress: Progress) -> Iterator[BinaryIO | None]:
    """The partial file, which no other process writes meanwhile; None if the target is complete by now."""
    while True:
        with open(partial, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.step(f"waiting for another process that downloads {source.name}")
                fcntl.flock(file, fcntl.LOCK_EX)
                progress.step(f"downloading {source.name}")
            # The other process may have renamed the file to the target, or removed it.
            if not _is_at(file, partial):
                continue
            if target.exists():
                partial.unlink()
                yield None
            else:
                yield file
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    own = os.fstat(file.fileno())
    try:
        return os.path.samestat(own, path.stat())
    except FileNotFoundError:
        return False


def _get(source: Source, file: BinaryIO, report: Callable[[int], None]) -> None:
    """Append what is missing. Goes on after a broken connection as long as each one brings bytes.

    http_get compares the size with the one that the server announces. It is not told the one of the source: the digest
    says more, and http_get refuses to begin a file of which it knows that it has more than 50 GB.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get

    while True:
        before = file.seek(0, os.SEEK_END)
        if before == source.size:
            report(before)
            return
        try:
            http_get(
                source.url,
                file,
                resume_size=before,
                headers=dict(source.headers),
                displayed_filename=source.name,
                tqdm_class=meter(report),
            )
        except HfHubHTTPError:
            raise
        except HTTPError:
            if file.seek(0, os.SEEK_END) == before:
                raise
            continue
        return


def meter(report: Callable[[int], None]) -> type[Any]:
    """A class with what huggingface_hub uses of tqdm's. `report` gets the bytes so far."""

    class Meter:
        def __init__(self, *, initial: int = 0, **_: Any) -> None:
            self._at = 0
            self.update(initial)

        def update(self, count: int) -> None:
            self._at += count
            report(self._at)

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Meter


def check(source: Source, path: Path, progress: Progress) -> None:
    """Raises ModelError if the bytes of `path` do not have the digest of the source, where one is known."""
    if not source.digest:
        return
    progress.step(f"checking {source.name}")
    size = path.stat().st_size
    git = len(source.digest) == _SHA1_DIGITS
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else hashlib.sha256()
    done = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress.update(done, size)
    if digest.hexdigest() != source.digest:
        kind = "SHA-1" if git else "SHA-256"
        raise ModelError(
            f"{source.name}: the bytes have the {kind} {digest.hexdigest()}, expected {source.digest}; nothing is kept"
        )


def sync_directory(path: Path) -> None:
    """Make the names in a directory last."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
