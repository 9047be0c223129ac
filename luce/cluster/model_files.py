"""A model file by its fingerprint, wherever it lies on this machine and whatever its name is."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from luce.config.directories import user_cache_directory
from luce.errors import LuceError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.hub.installed import gguf_models, installed
from luce.profiles.cached_file import read_cached, write_cached

_log = logging.getLogger("luce.cluster")


class _Known(msgspec.Struct):
    """The fingerprint of a file as it was then."""

    inode: int
    size: int
    mtime_ns: int
    fingerprint: str


def find_model(wanted: str, folders: Sequence[Path]) -> Path | None:
    """The first part of the model with a fingerprint, None if it is not here.

    Looks below the folders, or where models of this machine usually lie if there are none. What has been looked at is
    kept in the cache directory, by path, inode, size and time of the last change.
    """
    index = user_cache_directory() / "fingerprints.json"
    known = read_cached(index, dict[str, _Known]) or {}
    found, seen = None, dict[str, _Known]()
    for path in _candidates(folders):
        entry = _look(path, known.get(str(path)))
        if entry is None:
            continue
        seen[str(path)] = entry
        if entry.fingerprint == wanted:
            found = path
            break
    merged = known | seen
    if merged != known:
        write_cached(index, merged)
    return found


def _candidates(folders: Sequence[Path]) -> Iterator[Path]:
    if not folders:
        yield from (model.files[0] for model in installed())
    for folder in folders:
        yield from (path for _, path in gguf_models(folder))


def _look(path: Path, known: _Known | None) -> _Known | None:
    """The fingerprint of a file; None if it is not a model that can be read."""
    try:
        status = path.stat()
        if known is not None:
            same = (known.inode, known.size, known.mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns)
            if same:
                return known
        with open_gguf(path) as file:
            return _Known(status.st_ino, status.st_size, status.st_mtime_ns, fingerprint(file))
    except (OSError, LuceError) as error:
        _log.debug("%s: %s", path, error)
        return None
