"""Shared libraries of vendors, wherever they are installed."""

from __future__ import annotations

import ctypes
from pathlib import Path


def open_library(names: tuple[str, ...], folders: tuple[str | Path, ...] = ()) -> tuple[ctypes.CDLL, str] | None:
    """The first library that loads, by the loader's own search, then from folders; with its path. None if none does."""
    for name in names:
        for candidate in (name, *(str(Path(folder) / name) for folder in folders)):
            try:
                return ctypes.CDLL(candidate), _loaded_path(name) or candidate
            except OSError:
                continue
    return None


def _loaded_path(name: str) -> str | None:
    """The file behind a library of this process; `libcuda.so.1` is a link to `libcuda.so.580.159.04`, say."""
    stem = name.split(".so")[0] + ".so"
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and Path(path[0]).name.startswith(stem):
                return path[0]
    return None
