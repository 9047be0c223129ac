"""A cluster over a cable: the member is in a network namespace of its own, behind a veth pair."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.cluster_processes import (
    EXPECTED,
    PROMPT,
    REFERENCE,
    ask,
    greedy,
    member_of,
    serve,
    serving_member,
    starting,
)
from tests.support.daemons import within
from tests.support.network_namespaces import ADDRESS, HERE, NAMESPACE, NETWORK, cable, ip

__all__ = ["cable"]


def test_a_pulled_cable_and_a_coordinator_that_is_killed(cable: None, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    prefix = ["ip", "netns", "exec", NAMESPACE]
    with starting(tmp_path) as start:
        server, port = serve(start, "--cluster-resume", "0", listen=f"{ADDRESS}:0")
        flags = ["--model-dir", str(models), "--devices", "cpu:0"]
        member = start("member", "join", server.found(r"luce join (\S+)"), *flags, prefix=prefix)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        assert greedy(port) == EXPECTED
        found = serving_member(start)
        assert found["address"] == f"{NETWORK}2"

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
        assert greedy(port) == EXPECTED and serving_member(start)
        member.child.send_signal(signal.SIGTERM)
        assert member.ended() == 0
