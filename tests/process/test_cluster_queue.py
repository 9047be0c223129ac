"""Requests that come while a cluster's model moves wait; those beyond the queue get 503, as CL-A6 has it."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from luce.cluster import wire
from tests.support.cluster_processes import (
    REFERENCE,
    TOKENS,
    ask,
    command,
    members_of,
    metrics,
    refusal,
    serve,
    starting,
    stream,
)
from tests.support.daemons import within


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
        line = re.findall(r"luce join (\S+)", "".join(token.out))[0]
        den = start("den", "join", line, "--model-dir", str(empty), "--devices", "cpu:0")
        assert within(60, lambda: sorted(m["state"] for m in members_of(start).values()) == ["idle", "serving"])

        assert isinstance(command(start, wire.AskReplan()), wire.Done)
        server.found("cluster placement epoch=2")
        # As many as may run and wait.
        found = [list[int](), list[int]()]
        waiting = [threading.Thread(target=stream, args=(port, TOKENS, ids)) for ids in found]
        for thread in waiting:
            thread.start()
        assert within(60, lambda: "luce_queued_sequences 2.0" in metrics(port)), metrics(port)
        assert refusal(port) == ("overloaded", "1 requests wait already (--max-queue)")
        assert found == [[], []]
        den.child.kill()
        for thread in waiting:
            thread.join(300)
        assert found == [expected, expected], server.log[-30:]
