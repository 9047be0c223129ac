"""Threads that wait for a disk."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from luce.kvcache.disk.threads import Threads

HANGING = """
import threading
from luce.kvcache.disk.threads import Threads

begun = threading.Event()
threads = Threads(1, "hangs")
threads.submit(lambda: (begun.set(), threading.Event().wait()))
threads.submit(print, "never")
begun.wait()
threads.close(0.01)
print("over")
"""


def test_a_task_that_hangs_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


def test_futures_get_results_and_exceptions() -> None:
    threads = Threads(2, "test")
    assert [future.result(60) for future in [threads.submit(pow, 2, n) for n in range(20)]] == [2**n for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(60)
    threads.close(60)


def test_tasks_that_have_not_begun_are_cancelled() -> None:
    gate, begun = threading.Event(), threading.Event()
    threads = Threads(1, "test")
    first = threads.submit(lambda: (begun.set(), gate.wait(60))[1])
    others = [threads.submit(int) for _ in range(3)]
    assert begun.wait(60)
    threads.close(0.0)
    assert all(other.cancelled() for other in others) and not first.done()
    gate.set()
    assert first.result(60)
