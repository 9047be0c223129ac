"""tests/support/shares.py: each process of xdist imports a share of the modules of tests, and keeps its bytecode."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import shares

MODULES = {
    "test_a": "",
    "test_b": "raise ValueError('as a mistake in a module of tests does')",
    "test_c": "import pytest; pytest.skip('without what it needs', allow_module_level=True)",
    "test_d": "",
    "test_e": "",
    "support": "",
    "left_out.test_f": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a package of those modules, of which nothing is imported yet."""
    for name, text in MODULES.items():
        file = tmp_path.joinpath("shared_out", *name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(shares, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "shared_out"


def collect(folder: Path, **of_worker: Any) -> set[str]:
    """The modules of that package that a process imports which is to collect it."""

    def left_out(collection_path: Path, config: object) -> bool | None:
        return True if collection_path.name == "left_out" else None

    config = SimpleNamespace(args=[str(folder)], hook=SimpleNamespace(pytest_ignore_collect=left_out), **of_worker)
    before = {*sys.modules}
    shares.pytest_collection(SimpleNamespace(config=config))  # type: ignore[arg-type]
    return {name for name in {*sys.modules} - before if name.startswith("shared_out.")}


def test_each_file_that_is_collected_is_in_one_share(folder: Path) -> None:
    told = [{"workerid": f"gw{number}", "workercount": 2} for number in range(2)]
    # What raises is imported in vain, and does not keep others from being imported.
    assert collect(folder, workerinput=told[0]) == {"shared_out.test_a", "shared_out.test_e"}
    assert collect(folder, workerinput=told[1]) == {"shared_out.test_d"}


def test_without_other_processes_nothing_is_imported_before(folder: Path) -> None:
    assert collect(folder) == set()
