"""Requests that come while a cluster's model moves wait; those beyond the queue get 503, as CL-A6 has it."""

from __future__ import annotations

import re
import threading
import urllib.request
from pathlib import Path

from tests.support.cluster_processes import (
    EXPECTED,
    REFERENCE,
    TOKENS,
    ask,
    greedy,
    members_of,
    refusal,
    serve,
    starting,
    stream,
)
from tests.support.daemons import within


def metrics(port: int) -> str:
    """GET /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def test_requests_beyond_the_queue_are_refused_while_the_model_moves(tmp_path: Path) -> None:
    models, empty = tmp_path / "models", tmp_path / "empty"
    models.mkdir()
    empty.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    with starting(tmp_path) as start:
        # A member without the file gets its weights so slowly that the model moves until it is killed.
        more = ["--parallel", "1", "--max-queue", "1", "--cluster-stream-rate", "0.002"]
        server, port = serve(start, *more)
        box = start("box", "join", server.found(r"luce join (\S+)"), "--model-dir", str(models), "--devices", "cpu:0")
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)
        expected: list[int] = []
        assert stream(port, TOKENS, expected) == "" and len(expected) == TOKENS
        token = start("server", "cluster", "token")
        assert token.ended() == 0
        command = re.findall(r"luce join (\S+)", "".join(token.out))[0]
        den = start("den", "join", command, "--model-dir", str(empty), "--devices", "cpu:0")
        assert within(60, lambda: sorted(m["state"] for m in members_of(start).values()) == ["idle", "serving"])

        ids: list[int] = []
        running = threading.Thread(target=stream, args=(port, TOKENS, ids))
        running.start()
        assert within(60, lambda: len(ids) >= 5)
        assert start("server", "cluster", "replan").ended() == 0
        assert server.found("cluster placement epoch=2") and ids == expected[: len(ids)] and len(ids) < TOKENS
        queued: list[int] = []
        waiting = threading.Thread(target=lambda: queued.extend(greedy(port)))
        waiting.start()
        # Only once the other one waits is there no room.
        assert within(60, lambda: "luce_queued_sequences 1.0" in metrics(port))
        assert refusal(port) == ("overloaded", "1 requests wait already (--max-queue)")
        den.child.kill()
        running.join(300)
        waiting.join(300)
        assert ids == expected and queued == EXPECTED, server.log[-30:]
