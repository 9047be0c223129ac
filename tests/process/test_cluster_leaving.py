"""Members leave and join under streams, which go on with their tokens."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from tests.support.cluster_processes import (
    EXPECTED,
    REFERENCE,
    TOKENS,
    Streams,
    ask,
    greedy,
    members_of,
    serve,
    starting,
)
from tests.support.clusters import coordinator
from tests.support.daemons import within


def devices(port: int) -> int:
    """On how many devices the model is; 0 while it moves."""
    return len(ask(port, "/props")[1]["runtime"]["target_sharding"])


def command(start: Any, *words: str) -> str:
    """What a `luce cluster` command prints, once it has succeeded."""
    done = start("server", "cluster", *words)
    assert done.ended() == 0, done.log
    return "".join(done.out)


def test_streams_go_on_while_members_leave_and_join(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4", "--cluster-min", "2")
        box = start("box", "join", server.found(r"luce join (\S+)"), *flags)
        den = start("den", "join", re.findall(r"luce join (\S+)", command(start, "token"))[0], *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log, den.log)
        assert devices(port) == 3
        expected = Streams(port).wait()
        assert all(len(ids) == TOKENS for ids in expected)

        # SIGTERM: its layers go elsewhere, then it ends.
        streams = Streams(port)
        streams.wait_begun(10)
        box.child.send_signal(signal.SIGTERM)
        assert box.ended() == 0 and "cut off" not in "".join(box.log)
        assert devices(port) == 2 and ask(port, "/health")[0] == 200
        assert streams.wait() == expected, server.log[-30:]

        # It comes back, and gets layers when it is asked for.
        again = start("box", "join", "--cluster", "home", *flags)
        assert within(60, lambda: sorted(m["state"] for m in members_of(start).values()) == ["idle", "serving"])
        streams = Streams(port)
        streams.wait_begun(10)
        assert "placed anew" in command(start, "replan")
        assert streams.wait() == expected, server.log[-30:]
        assert within(60, lambda: devices(port) == 3), server.log[-30:]

        # The coordinator lets both leave, one while the other does.
        streams = Streams(port)
        streams.wait_begun(10)
        for name in members_of(start):
            assert f"{name} leaves once" in command(start, "drain", name)
        assert (again.ended(), den.ended()) == (0, 0)
        assert streams.wait() == expected, server.log[-30:]
        found = members_of(start)
        assert {(m["state"], m["losses"]) for m in found.values()} == {("gone", 0)}
        assert devices(port) == 1 and greedy(port) == EXPECTED
        away = start("server", "cluster", "drain", next(iter(found)))
        assert away.ended() != 0 and "no such member is connected; those that are: none" in "".join(away.log)
        server.child.send_signal(signal.SIGTERM)
        assert server.ended() == 0, server.log
    log = "".join(server.log)
    assert "replies go on count=4" in log and "read again" not in log


def test_a_member_that_nobody_can_do_without_is_cut_off(tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        server, port = serve(start, "--cluster-replan", "never")
        models = tmp_path / "models"
        models.mkdir()
        (models / "model.gguf").symlink_to(REFERENCE.path)
        flags = ["--model-dir", str(models), "--devices", "cpu:0"]
        member = start("member", "join", server.found(r"luce join (\S+)"), *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        refused = start("server", "cluster", "replan")
        assert refused.ended() != 0 and "--cluster-replan never" in "".join(refused.log)
        # Nothing moves: it leaves at once, and its layers wait for it.
        member.child.send_signal(signal.SIGTERM)
        assert member.ended() == 0
        again = start("member", "join", "--cluster", "home", *flags)
        assert within(120, lambda: next(iter(members_of(start).values()))["state"] == "serving"), again.log
        assert within(30, lambda: ask(port, "/health")[0] == 200) and greedy(port) == EXPECTED


def test_a_member_that_is_not_dismissed_in_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "server"))
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    with starting(tmp_path) as start, coordinator() as home, contextlib.ExitStack() as opened:
        flags = ["--model-dir", str(models), "--devices", "cpu:0", "--leave-timeout", "0.5"]
        member = start("box", "join", "-", *flags, stdin=home.new_token(60))
        assert home.wait_for_members(1, 60) == 1, member.log
        # It has layers, and nobody places the model anew.
        with open_gguf(REFERENCE.path) as file:
            (place, connect), *_ = home.plan(fingerprint(file))[1].items()
        peer = connect("shard 1")
        for sock in (peer.requests, peer.heartbeat):
            opened.enter_context(sock)
        home.keep({f"{place}cpu:0": range(1)})
        member.child.send_signal(signal.SIGTERM)
        assert member.ended() == 0
        assert "not dismissed within 0.5 s (--leave-timeout)" in member.found("cut off reason=.*")
