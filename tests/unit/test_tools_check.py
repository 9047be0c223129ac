"""tools/check."""

from __future__ import annotations

import configparser
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

CHECK = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "check"))


def step(code: str) -> list[str]:
    """A step that runs a line of Python."""
    return ["timeit", "-n", "1", "-r", "1", code]


def test_static_steps_run_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Each opens its end when the other one does.
    os.mkfifo(tmp_path / "meeting")
    ends = [step(f"open({str(tmp_path / 'meeting')!r}, {mode!r}).close(); print({mode!r})") for mode in "rw"]
    assert CHECK["together"](ends) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("1 loop")]
    assert lines == [f"== {' '.join(ends[0])}", "r", f"== {' '.join(ends[1])}", "w"]


def test_the_first_static_step_that_fails_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    absent, waiting = ["json.tool", "/nowhere/absent"], step("import signal; signal.pause()")
    assert CHECK["together"]([step("print('yes')"), absent, step("1 / 0"), waiting]) not in (0, None)
    out = capfd.readouterr().out
    assert "\nyes\n" in out and "/nowhere/absent" in out and out.endswith("\n== json.tool failed\n")


def test_without_the_real_model_the_other_tests_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert CHECK["together"]([["luce", "pull", "nowhere"], step("pass")]) == 0
    assert "could not be downloaded: its tests are skipped\n== timeit" in capfd.readouterr().out


def test_the_output_of_a_step_beside_another_follows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "meeting")
    shorter, longer = [step(f"print({mode!r}); open({str(tmp_path / 'meeting')!r}, {mode!r})") for mode in "rw"]
    assert CHECK["beside"](shorter, longer) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("1 loop")]
    assert lines == ["w", f"== {' '.join(shorter)}", "r"]


def test_a_step_beside_another_ends_it_by_failing(capfd: pytest.CaptureFixture[str]) -> None:
    absent = ["json.tool", "/nowhere/absent"]
    assert CHECK["beside"](absent, step("import signal; signal.pause()")) not in (0, None)
    assert capfd.readouterr().out.endswith("/nowhere/absent'\n== json.tool failed\n")


def test_the_longer_one_of_two_steps_may_fail(capfd: pytest.CaptureFixture[str]) -> None:
    assert CHECK["beside"](step("print('types')"), ["json.tool", "/nowhere/absent"]) not in (0, None)
    out = capfd.readouterr().out
    assert "types\n" in out and out.endswith("\n== json.tool failed\n")


def test_tests_run_in_two_processes_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 7})
    (tests,) = CHECK["steps"](SimpleNamespace(nightly=False, prove=False), ["-n", "0"])
    assert tests[:3] == ["pytest", "-n", "5"] and tests[-2:] == ["-n", "0"]


def test_the_nightly_check_runs_what_the_other_one_leaves_out() -> None:
    *_, tests = CHECK["steps"](SimpleNamespace(nightly=True, prove=False), [])
    left_out = configparser.ConfigParser(interpolation=None)
    left_out.read(CHECK["ROOT"] / "setup.cfg")
    assert left_out["tool:pytest"]["addopts"].endswith('-m "not slow and not repeated"')
    # The last -m counts.
    assert tests[-2:] == ["-m", "slow or not slow"] and "--skip-proved" not in tests


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
