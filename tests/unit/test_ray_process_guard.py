"""No child outlives its actor, no actor its node, and `down` ends only what `up` wrote down."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from luce.errors import UsageError
from luce.ray import process_list
from luce.ray.process_guard import Nursery, Watch, stop, watch
from luce.ray.process_list import Process
from tests.support.daemons import within

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
ACTOR = f"""
import os, sys, threading, time
from luce.ray.process_guard import Nursery, watch, end_now
nursery, started = Nursery(), []
thread = threading.Thread(target=lambda: started.append(nursery.start({SLEEP!r}, dict(os.environ))))
thread.start()
thread.join()
print(started[0].pid, flush=True)
if "watch" in sys.argv:
    watch(lambda: True, 0, end_now)
time.sleep(600)
"""


@pytest.fixture
def begin() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed in the end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def known(pid: int) -> Process:
    found = process_list.process(pid)
    assert found is not None
    return found


def test_a_child_outlives_the_thread_that_asked_for_it_and_not_the_process(
    begin: list[subprocess.Popen[bytes]],
) -> None:
    actor = subprocess.Popen([sys.executable, "-c", ACTOR], env=ENVIRONMENT, stdout=subprocess.PIPE)
    begin.append(actor)
    assert actor.stdout is not None
    child = known(int(actor.stdout.readline()))
    # Its thread has ended; it is a program of its own by now, in a group of its own.
    assert within(30, lambda: b"luce.ray.guarded" not in Path(f"/proc/{child.pid}/cmdline").read_bytes())
    assert process_list.runs(child) and os.getpgid(child.pid) == child.pid
    actor.send_signal(signal.SIGKILL)
    assert within(30, lambda: not process_list.runs(child))


def test_an_actor_and_its_child_end_with_the_raylet(begin: list[subprocess.Popen[bytes]]) -> None:
    raylet = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {ACTOR!r}, 'watch']); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", raylet], env=ENVIRONMENT, stdout=subprocess.PIPE)
    begin.append(process)
    assert process.stdout is not None
    child = known(int(process.stdout.readline()))
    (_, actor, *_) = process_list.descendants([process.pid])
    assert process_list.runs(actor) and actor.pid != child.pid
    process.kill()
    assert within(30, lambda: not process_list.runs(actor) and not process_list.runs(child))


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    command = [sys.executable, "-m", "luce.ray.guarded", "1", *SLEEP]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=60)
    assert done.returncode == 1 and done.stdout == b""


def test_when_to_end() -> None:
    guard = Watch(parent=7, timeout=15.0, now=100.0)
    assert guard.reason(7, 114.0, []) == ""
    assert guard.reason(7, 114.5, [True]) == ""
    assert guard.reason(7, 129.5, []) == ""
    assert guard.reason(7, 129.6, []) == "the control store has not answered for 15 s"
    assert guard.reason(1, 100.0, [True]) == "the raylet that started this process is gone"


def test_a_silent_control_store_ends_nothing_and_one_that_has_given_the_node_up_does() -> None:
    guard = Watch(parent=7, timeout=0.0, now=100.0)
    assert guard.reason(7, 1e9, []) == ""
    assert guard.reason(7, 1e9, [True, True]) == ""
    # What it has said once stands, whatever follows.
    for answers in ([False], [True, False], [False, True]):
        assert guard.reason(7, 1e9, answers) == "the control store has given this node up"
    assert guard.reason(1, 1e9, []) == "the raylet that started this process is gone"


@pytest.mark.parametrize("answer, timeout, says", [(None, 0.1, "has not answered"), (False, 0.0, "given this node up")])
def test_a_process_asks_the_control_store_and_ends_by_what_it_says(
    answer: bool | None, timeout: float, says: str
) -> None:
    ended, reasons = threading.Event(), list[str]()

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    watch(lambda: answer, timeout, end)
    assert ended.wait(60) and says in reasons[0]


def test_a_control_store_that_hangs_ends_the_process() -> None:
    ended, hangs = threading.Event(), threading.Event()
    reasons = []

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    watch(lambda: hangs.wait(60), 0.1, end)
    assert ended.wait(60) and "control store" in reasons[0]
    hangs.set()


def test_a_child_is_stopped_and_killed_if_it_does_not_listen() -> None:
    nursery = Nursery()
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    for code, status in (("import time; print('up', flush=True); time.sleep(600)", -15), (deaf, -9)):
        child = nursery.start([sys.executable, "-c", code], ENVIRONMENT, output=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == b"up\n"
            assert stop(child, 0.5 if status == -9 else 60) == status
    with pytest.raises(OSError, match="Bad file descriptor"):
        nursery.start(SLEEP, ENVIRONMENT, output=99999)


def test_down_ends_what_is_written_down_and_no_later_process_with_its_id(
    tmp_path: Path, begin: list[subprocess.Popen[bytes]]
) -> None:
    begin += [subprocess.Popen(SLEEP, stdout=subprocess.PIPE) for _ in range(2)]
    mine, other = (known(process.pid) for process in begin)
    path = tmp_path / "state" / "processes.json"
    assert process_list.read(path) == []
    process_list.write(path, [mine, Process(other.pid, other.started - 1)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert process_list.end(process_list.read(path), 30) == 1
    assert begin[0].wait(30) == -15 and begin[1].poll() is None
    assert not process_list.runs(mine) and process_list.runs(other)
    path.write_text("[3]")
    with pytest.raises(UsageError, match=r"processes\.json: no list"):
        process_list.read(path)


def test_a_process_that_does_not_listen_is_killed(begin: list[subprocess.Popen[bytes]]) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    begin.append(process)
    assert process.stdout is not None and process.stdout.readline()
    assert process_list.end([known(process.pid)], 0.2) == 1
    assert process.wait(30) == -9
