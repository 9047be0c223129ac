"""Spans of compressed prompts on the disk: FORMAT.md."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import numpy as np

from luce.compress.selection import Spans
from luce.kvcache.disk.files import OpenDirectory, make_directory, open_directory

_log = logging.getLogger(__name__)

#: the directory below --kv-cache-dir
DIRECTORY = "spans-v1"
#: most files; beyond them the least recently used ones go, and as many more
MOST_FILES, SPARE = 4096, 256
_DIGEST = 16
#: most bytes of a file: a span of two tokens for each three of a context of 2^24
_MOST_BYTES = 64 << 20


class SpanFiles:
    """See luce.compress.span_cache.SpanStore. One file for each prompt, which any number of processes may share.

    A disk that fails costs time, and no prompt: a warning says so, once.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._failed = False

    def get(self, key: bytes) -> Spans | None:
        name = key.hex()
        try:
            with open_directory(self._root, DIRECTORY) as directory:
                data = directory.read(name, _MOST_BYTES)
                directory.touch(name, time.time())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        spans = _decoded(key, data)
        if spans is None:
            _log.warning("%s is damaged, and does not count", self._root / DIRECTORY / name)
        return spans

    def put(self, key: bytes, spans: Spans) -> None:
        try:
            make_directory(self._root)
            with open_directory(self._root) as root:
                root.make(DIRECTORY)
                with root.enter(DIRECTORY) as directory:
                    directory.replace(key.hex(), _encoded(key, spans))
                    _shorten(directory)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("cannot store or read spans of compressed prompts: %s", error)


def _shorten(directory: OpenDirectory) -> None:
    """Remove the least recently used files, so that others have room."""
    names = directory.names()
    if len(names) <= MOST_FILES:
        return
    used = []
    for name in names:
        try:
            used.append((directory.status(name).st_mtime_ns, name))
        except FileNotFoundError:
            continue
    for _, name in sorted(used)[: len(names) - MOST_FILES + SPARE]:
        try:
            directory.unlink(name)
        except FileNotFoundError:
            continue


def _encoded(key: bytes, spans: Spans) -> bytes:
    body = np.array(spans, "<i4").reshape(-1, 2).tobytes()
    return body + _digest(key, body)


def _decoded(key: bytes, data: bytes) -> Spans | None:
    """The spans of a file; None if it is damaged."""
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if digest != _digest(key, body):
        return None
    return tuple((int(begin), int(end)) for begin, end in np.frombuffer(body, "<i4").reshape(-1, 2))


def _digest(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(key + body, digest_size=_DIGEST).digest()
