"""A cluster over a cable: the member is in a network namespace of its own, behind a veth pair."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster_processes import EXPECTED, PROMPT, REFERENCE, ask, greedy, member_of, serve, starting
from tests.support.daemons import within

#: names of the namespace and of the ends of the cable; a name has at most 15 letters
NAMESPACE, HERE, THERE = (f"luce{os.getpid()}{suffix}" for suffix in ("n", "a", "b"))
ADDRESS, NETWORK = "10.213.77.1", "10.213.77."


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """A namespace and its cable. Skips the test where they cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("makes a network namespace, which only root can, with the program ip")
    with contextlib.ExitStack() as made:
        try:
            ip("netns", "add", NAMESPACE)
            made.callback(ip, "netns", "del", NAMESPACE)
            ip("link", "add", HERE, "type", "veth", "peer", "name", THERE)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        made.callback(subprocess.run, ["ip", "link", "del", HERE], capture_output=True)
        ip("link", "set", THERE, "netns", NAMESPACE)
        ip("addr", "add", f"{ADDRESS}/24", "dev", HERE)
        ip("link", "set", HERE, "up")
        ip("-n", NAMESPACE, "addr", "add", f"{NETWORK}2/24", "dev", THERE)
        ip("-n", NAMESPACE, "link", "set", THERE, "up")
        yield


def test_a_pulled_cable_and_a_coordinator_that_is_killed(cable: None, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    prefix = ["ip", "netns", "exec", NAMESPACE]
    with starting(tmp_path) as start:
        server, port = serve(start, listen=f"{ADDRESS}:0")
        flags = ["--model-dir", str(models), "--devices", "cpu:0"]
        member = start("member", "join", server.found(r"luce join (\S+)"), *flags, prefix=prefix)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        assert greedy(port) == EXPECTED
        found = member_of(start)
        assert (found["state"], found["address"]) == ("serving", f"{NETWORK}2")

        ip("link", "set", HERE, "down")
        # Nothing arrives any more, not even the end of the connection: it is missed.
        status, answer = ask(port, "/completion", {"prompt": PROMPT, "n_predict": 8})
        assert status == 500 and f"member://{found['name']}/cpu:0" in answer["error"]["message"], answer
        assert within(60, lambda: member_of(start)["state"] == "lost")
        ip("link", "set", HERE, "up")
        assert within(120, lambda: member_of(start)["state"] == "serving"), (server.log, member.log)
        assert within(60, lambda: ask(port, "/health")[0] == 200) and greedy(port) == EXPECTED
        assert member_of(start)["losses"] == 1

        address = server.found(rf"address=({ADDRESS}:\d+)")
        server.child.send_signal(signal.SIGKILL)
        server.ended()
        again, port = serve(start, listen=address)
        # The member connects by itself, with the key that the coordinator still knows.
        assert within(200, lambda: ask(port, "/health")[0] == 200), (again.log, member.log)
        assert greedy(port) == EXPECTED and member_of(start)["state"] == "serving"
        member.child.send_signal(signal.SIGTERM)
        assert member.ended() == 0
