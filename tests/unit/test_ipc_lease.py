"""A process ends when the one that lends it its time is gone or stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.ipc.lease import hold, renew
from luce.ray import process_list
from tests.support.daemons import within

ROOT = Path(__file__).parents[2]


def ends(fd: int, seconds: float) -> tuple[list[str], threading.Thread]:
    reasons: list[str] = []
    return reasons, hold(fd, reasons.append, seconds)


def test_silence_and_the_end_of_the_pipe_end_the_lease() -> None:
    for silent, says in ((True, "no sign of life for 0.05 s"), (False, "is gone")):
        reader, writer = os.pipe()
        if not silent:
            os.close(writer)
        reasons, thread = ends(reader, 0.05 if silent else 60)
        thread.join(60)
        assert len(reasons) == 1 and says in reasons[0]
        os.close(reader)
        if silent:
            os.close(writer)


def test_a_lease_is_renewed_until_nobody_reads_it() -> None:
    reader, writer = os.pipe()
    renewal = renew(writer, 0.01)
    reasons, thread = ends(reader, 20)
    assert not thread.join(0.3) and not reasons and thread.is_alive()
    # The other side's end of the pipe is closed when its process ends; here only the reader can be.
    other, copy = os.pipe()
    os.dup2(other, reader)
    os.close(copy)
    thread.join(60)
    renewal.join(60)
    assert "is gone" in reasons[0] and not renewal.is_alive()
    os.close(reader)
    os.close(other)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_shard_ends_with_the_process_that_lends_it_its_time(number: int, tmp_path: Path) -> None:
    # The shard's own main never comes that far: its lease is held first.
    code = """
import os, subprocess, sys
from luce.ipc.lease import renew
reader, writer = os.pipe()
shard = "import sys, time, luce.cli.shard as s, luce.ipc.lease as l; l.hold.__defaults__ = (1.0,); " \\
    "s._serve_network = lambda arguments: time.sleep(600); " \\
    "from luce.cli.main import main; main(['shard', '--lease', sys.argv[1]])"
child = subprocess.Popen([sys.executable, "-c", shard, str(reader)], pass_fds=[reader])
os.close(reader)
print(child.pid, flush=True)
renew(writer, 0.1).join()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    lender = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert lender.stdout is not None
    try:
        shard = process_list.process(int(lender.stdout.readline()))
        assert shard is not None
        assert within(60, lambda: Path(f"/proc/{shard.pid}/task").exists() and threads(shard.pid) > 1)
        lender.send_signal(number)
        assert within(60, lambda: not process_list.runs(shard))
    finally:
        lender.kill()
        lender.communicate()


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_descriptor_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("x", "99999"):
        assert main(["shard", "--lease", text]) == 2
        assert f"--lease {text}: expected the descriptor" in capsys.readouterr().err
