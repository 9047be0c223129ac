"""A member that comes and goes: the placement changes once, and requests go on. CL-A6 of the acceptance tests.

FLAP_SECONDS says how long (60); the acceptance test has 300.
"""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest

from tests.support.cluster_processes import REFERENCE, ask, serve, starting
from tests.support.cluster_streams import Client, replies
from tests.support.daemons import within

SECONDS = float(os.environ.get("FLAP_SECONDS", "60"))
#: seconds that it is there, and that it is away
EACH = 10.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
@pytest.mark.parametrize("loss", ["wait", "replan"])
def test_a_member_that_flaps(loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4", "--cluster-replan", "auto", "--cluster-on-loss", loss)
        member = start("box", "join", server.found(r"luce join (\S+)"), *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        expected, ending, end = replies(port), threading.Event(), time.monotonic() + SECONDS
        clients = [Client(port, number, expected, ending) for number in range(4)]
        flaps = 0
        while time.monotonic() < end:
            member.close()
            time.sleep(EACH)
            member = start("box", "join", "--cluster", "home", *flags)
            time.sleep(EACH)
            flaps += 1
        ending.set()
        for client in clients:
            client.thread.join()
        taken = re.findall("plan taken .*", "".join(server.log))
        done, pause = sum(client.done for client in clients), max(client.pause for client in clients)
        with capsys.disabled():
            print(f"\n{loss}: {flaps} flaps, {done} replies, longest pause {pause:.1f} s", *taken, sep="\n")
        assert [client.wrong for client in clients] == [[]] * 4
        # A reply fails only at its third loss.
        assert [error for client in clients for error in client.failed if "member://" not in error] == []
        assert len(taken) <= 2
