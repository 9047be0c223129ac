"""A writer that is killed leaves whole snapshots and nothing else that counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.crash.writer", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_before_each_call(tmp_path: Path) -> None:
    found = re.fullmatch(r"steps (\d+) snapshots (\d+)\.\.(\d+)\n", run("steps", str(tmp_path)))
    assert found is not None
    steps, fewest, most = map(int, found.groups())
    # Before anything was written, and with several snapshots there.
    assert steps > 100 and fewest == 0 and most >= 3


def test_killed_at_random_times(tmp_path: Path) -> None:
    found = re.fullmatch(r"rounds 200 snapshots (\d+)\.\.(\d+)\n", run("times", str(tmp_path), "200"))
    assert found is not None
    assert int(found[2]) >= 3
