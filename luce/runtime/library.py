"""Shared libraries of the vendors, in the loader's path or elsewhere."""

from __future__ import annotations

import ctypes
from pathlib import Path


def open_library(names: tuple[str, ...], folders: tuple[str | Path, ...] = ()) -> tuple[ctypes.CDLL, str] | None:
    """The first library that loads, by the loader's own search, then from `folders`, with its path; or None."""
    for name in names:
        for candidate in (name, *(str(Path(folder) / name) for folder in folders)):
            try:
                return ctypes.CDLL(candidate), _loaded_path(name) or candidate
            except OSError:
                continue
    return None


def _loaded_path(name: str) -> str | None:
    """The file of a library in this process: `libcuda.so.1` may be a link to `libcuda.so.580.159.04`."""
    stem = name.split(".so")[0] + ".so"
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and Path(path[0]).name.startswith(stem):
                return path[0]
    return None
