"""Each process of xdist imports a share of the modules of tests before it collects all: a pytest plugin.

Where no bytecode is kept yet, as in CI, all processes would rewrite the asserts of every module at the same time, which
takes 6 of the 16 s of CPU that each needs until its tests begin. Of the shares of others, it finds what these keep.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# Inside the plugins that wrap the collection: one of them sets the filter of warnings.
@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    told = getattr(session.config, "workerinput", None)
    if told is None:
        return
    number, processes = int(told["workerid"].removeprefix("gw")), told["workercount"]
    found = [file for place in session.config.args for file in files(session.config, Path(place).resolve())]
    for file in found[number::processes]:
        # What a module raises, its collection reports.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def files(config: pytest.Config, folder: Path) -> Iterator[Path]:
    """The files of tests below a folder that a run of pytest collects."""
    for path in sorted(folder.iterdir()) if folder.is_dir() and folder.is_relative_to(ROOT) else ():
        if not config.hook.pytest_ignore_collect(collection_path=path, config=config):
            if path.is_dir():
                yield from files(config, path)
            elif path.match("test_*.py"):
                yield path
