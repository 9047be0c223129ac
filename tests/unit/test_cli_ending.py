"""The end of a process that ran a command line: nothing that was to happen there is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest


def ended(text: str) -> subprocess.CompletedProcess[str]:
    start = "import atexit, sys, threading, time\nfrom luce.cli.ending import end_process\n"
    return subprocess.run([sys.executable, "-c", start + text], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("status", [0, 1, 130])
def test_the_status_and_what_was_printed(status: int) -> None:
    result = ended(f"print('out', end='')\nprint('err', end='', file=sys.stderr)\nend_process({status})")
    assert (result.returncode, result.stdout, result.stderr) == (status, "out", "err")


def test_what_is_registered_runs_once() -> None:
    assert ended("atexit.register(print, 'bye')\nend_process(0)").stdout == "bye\n"


def test_threads_that_are_no_daemons_finish() -> None:
    text = "threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()\nend_process(3)"
    result = ended(text)
    assert (result.returncode, result.stdout) == (3, "done\n")


def test_nothing_is_freed_object_by_object() -> None:
    """What the interpreter would do at its end does not happen."""
    text = "class Kept:\n    def __del__(self): print('freed')\nsys.kept = Kept()\nend_process(0)"
    assert ended(text).stdout == ""


def test_output_that_cannot_be_written() -> None:
    """The interpreter ends the process then, with its own status for that."""
    result = ended("sys.stdout = open('/dev/full', 'w')\nprint('x')\nend_process(0)")
    assert result.returncode == 120 and "No space left" in result.stderr
