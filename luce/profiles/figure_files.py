"""Files of one kind of figures in the user's cache folder, each named by all that its figures depend on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from luce.profiles.cached_file import counts, read_cached, write_cached
from luce.profiles.profile_cache import profile_folder


class Checked(Protocol):
    """Figures that say what of them cannot be."""

    @property
    def flaw(self) -> str:
        """The first figure that cannot be; empty if all can."""


Figures = TypeVar("Figures", bound=Checked)


class _Stored(msgspec.Struct, Generic[Figures]):
    format: int
    #: seconds since 1970
    measured: float
    figures: Figures


class FigureFiles(Generic[Figures]):
    """The files of one kind of figures. A change of what they mean needs another `format`."""

    def __init__(self, kind: str, format: int, type: Any) -> None:
        self._kind, self._format = kind, format
        self._stored: Any = _Stored[type]

    def path(self, facts: Sequence[object], folder: Path | None = None) -> Path:
        """The file of the figures that depend on these facts, which are what JSON has."""
        key = hashlib.sha256(json.dumps([self._kind, *facts]).encode()).hexdigest()
        return (folder or profile_folder()) / f"{key}.json"

    def read(self, path: Path) -> Figures | None:
        """The figures in a file; None if there are none, if they are too old, or if they cannot be, which the log
        says."""
        stored: _Stored[Figures] | None = read_cached(path, self._stored)
        if stored is None:
            return None
        flaw = stored.figures.flaw if stored.format == self._format else f"format is {stored.format}"
        return stored.figures if counts(path, flaw, stored.measured) else None

    def write(self, path: Path, figures: Figures) -> None:
        """Keep figures in a file. Where that cannot be written, the log says why."""
        write_cached(path, _Stored(self._format, time.time(), figures))
