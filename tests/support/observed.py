"""What provable tests read, beside what their files' digests cover: of the run that proves them.

A digest covers what sources say (tools/dependencies.py). Here the interpreter tells which files the tests of each file
open, which modules they import late and which they start; one that the digest does not cover leaves the file unproved.
What an earlier test of the process has read and kept is not seen, nor what other processes open.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tools import proofs

#: in the repository: what is made of sources, and what tools keep
_MADE = (".venv", ".git", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".clients")
#: what is the system's
_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/bin", "/run", "/memfd:")


class Observer:
    """The files that tests open, by the file of the test."""

    def __init__(self) -> None:
        self._file = ""
        self._opened: dict[str, set[str]] = defaultdict(set)
        sys.addaudithook(self._audit)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._file = item.nodeid.partition("::")[0] if item.get_closest_marker("provable") else ""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        self._file = ""

    def uncovered(self) -> dict[str, list[str]]:
        """By file of tests: what its tests have read that its digest does not cover."""
        found = {file: sorted(not_covered(file, opened)) for file, opened in self._opened.items()}
        return {file: paths for file, paths in found.items() if paths}

    def _audit(self, event: str, details: tuple[Any, ...]) -> None:
        if not self._file:
            return
        if event == "open" and isinstance(details[0], str | bytes | os.PathLike):
            self._opened[self._file].add(os.path.abspath(os.fsdecode(details[0])))
        elif event == "subprocess.Popen" and isinstance(details[1], list | tuple):
            self._opened[self._file] |= started([os.fsdecode(word) for word in details[1]])


def started(words: Sequence[str]) -> set[str]:
    """The files of this repository that a command runs as Python."""
    names = [after for word, after in pairwise(words) if word == "-m"]
    modules = (proofs.ROOT.joinpath(*name.split(".")) for name in names)
    files = (file for place in modules for file in (place.with_suffix(".py"), place / "__main__.py") if file.is_file())
    return {*map(str, files), *(word for word in words if word.endswith(".py") and Path(word).is_file())}


def not_covered(file: str, opened: Iterable[str]) -> set[str]:
    """Those of the files that tests of a file opened which its digest does not cover."""
    left_out = (proofs.ROOT / name for name in proofs.UNCOVERED)
    covered = {*map(str, (*proofs.covered(proofs.ROOT / file), *left_out))}
    return {path for path in map(_source, opened) if not _explained(path)} - covered


def _source(path: str) -> str:
    """The module of a file of bytecode."""
    folder, name = os.path.split(path)
    if os.path.basename(folder) != "__pycache__":
        return path
    return os.path.join(os.path.dirname(folder), f"{name.partition('.')[0]}.py")


@cache
def _elsewhere() -> tuple[str, ...]:
    return (sys.prefix, sys.base_prefix, tempfile.gettempdir(), os.path.expanduser("~/.cache/luce"), *_SYSTEM)


def _explained(path: str) -> bool:
    """Whether no digest needs to cover a file: it is of the system or of packages, or tests have made it."""
    if "/site-packages/" in path or not os.path.isfile(path):
        return True
    if path.startswith(f"{proofs.ROOT}/"):
        return path.removeprefix(f"{proofs.ROOT}/").partition("/")[0] in _MADE
    return path.startswith(_elsewhere())
