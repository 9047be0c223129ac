"""tools/check."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "check"))


def test_interpreters_keep_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys; print(sys.dont_write_bytecode)"
    run = subprocess.run([sys.executable, "-c", code], env=CHECK["environment"](), capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr


def test_the_callers_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    kept = CHECK["environment"]()
    assert {name: kept[name] for name in CHECK["THREADS"]} == {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"}
