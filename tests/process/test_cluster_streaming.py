"""A member without a copy of the model: it is killed while the weights come, and goes on with what is there."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from tests.support.cluster_processes import EXPECTED, REFERENCE, ask, greedy, member_of, serve, serving_member, starting
from tests.support.daemons import within


def sent(start: Any) -> int:
    """Bytes of weights that the server has sent."""
    status = start("server", "cluster", "status", "--json")
    assert status.ended() == 0, status.log
    return int(json.loads("".join(status.out))["streamed_bytes"])


def test_a_member_that_is_killed_goes_on_with_what_is_there(tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        server, port = serve(start, "--cluster-stream-rate", "0.05")
        empty = tmp_path / "models"
        empty.mkdir()
        flags = ["--model-dir", str(empty), "--devices", "cpu:0"]
        member = start("member", "join", server.found(r"luce join (\S+)"), *flags)
        server.found("member joined")
        for share in (10, 25, 40, 55, 70):
            assert within(120, lambda least=share: _streamed(start) >= least), (server.log, member.log)
            member.child.send_signal(signal.SIGKILL)
            member.ended()
            member = start("member", "join", "--cluster", "home", *flags)
        assert within(120, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        assert greedy(port) == EXPECTED
        assert serving_member(start)["file"] == "streamed 100%"
        # The whole size, as the member may have had any layers.
        assert sent(start) < 1.1 * REFERENCE.path.stat().st_size
        assert "again without what is not there" in "".join(server.log)
        # Once it is there, a new start sends nothing.
        before = sent(start)
        member.child.send_signal(signal.SIGKILL)
        member.ended()
        member = start("member", "join", "--cluster", "home", *flags)
        assert within(120, lambda: member_of(start)["state"] == "serving"), (server.log, member.log)
        assert within(60, lambda: ask(port, "/health")[0] == 200) and greedy(port) == EXPECTED
        assert sent(start) == before


def _streamed(start: Any) -> float:
    """The share of its weights that the member has, in percent; 0 before it has said how many it needs."""
    match = re.fullmatch(r"streamed (\d+)%", member_of(start)["file"])
    return float(match[1]) if match else 0.0
