"""Members that are lost for good, at any stage: the others get their layers, and streams go on with their tokens."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_processes import REFERENCE, TOKENS, Process, Streams, ask, members_of, serve, starting
from tests.support.daemons import within
from tests.support.network_namespaces import ADDRESS, HERE, NAMESPACE, cable, ip

__all__ = ["cable"]


def moves_to(port: int, count: int) -> bool:
    """Whether the model comes to be on so many devices."""

    def devices() -> int:
        status, answer = ask(port, "/props")
        return len(answer["runtime"]["target_sharding"]) if status == 200 else 0

    return within(60, lambda: devices() == count)


def joined(start: Any, name: str, folder: Path, token: str, prefix: Sequence[str] = ()) -> Process:
    models = folder / "models"
    models.mkdir(exist_ok=True)
    if not (models / "model.gguf").exists():
        (models / "model.gguf").symlink_to(REFERENCE.path)
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    return start(name, "join", token, *flags, prefix=prefix)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_streams_go_on_without_members_that_are_lost_for_good(how: signal.Signals, tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4", "--cluster-min", "2", "--cluster-on-loss", "replan")
        box = joined(start, "box", tmp_path, server.found(r"luce join (\S+)"))
        token = start("server", "cluster", "token")
        assert token.ended() == 0
        den = joined(start, "den", tmp_path, re.findall(r"luce join (\S+)", "".join(token.out))[0])
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log, den.log)
        expected = Streams(port).wait()
        assert all(len(ids) == TOKENS for ids in expected)

        # One while replies are generated, the other in their prompts or before.
        for left, (member, tokens) in enumerate([(box, 30), (den, 0)]):
            streams = Streams(port)
            streams.wait_begun(tokens)
            member.child.send_signal(how)
            assert streams.wait() == expected, server.log[-30:]
            assert moves_to(port, 2 - left), server.log[-30:]
            assert ask(port, "/health")[0] == 200
        assert {m["state"] for m in members_of(start).values()} == {"lost"}
        if how == signal.SIGSTOP:
            for member in (box, den):
                member.child.send_signal(signal.SIGCONT)
            # Woken, they have no layers any more, and are there for the next placement.
            assert within(120, lambda: {m["state"] for m in members_of(start).values()} == {"idle"})
            assert start("server", "cluster", "replan").ended() == 0
            assert moves_to(port, 3), server.log[-30:]
            assert Streams(port).wait() == expected


def test_a_member_that_dies_while_the_model_moves_to_it(tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4")
        box = joined(start, "box", tmp_path, server.found(r"luce join (\S+)"))
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)
        expected = Streams(port).wait()
        token = start("server", "cluster", "token")
        assert token.ended() == 0
        den = joined(start, "den", tmp_path, re.findall(r"luce join (\S+)", "".join(token.out))[0])
        assert within(60, lambda: sorted(m["state"] for m in members_of(start).values()) == ["idle", "serving"])
        streams = Streams(port)
        streams.wait_begun(5)
        # It is asked for its layers, and does not answer any more.
        den.child.send_signal(signal.SIGSTOP)
        assert start("server", "cluster", "replan").ended() == 0
        server.found("cluster placement epoch=2|the model cannot move")
        den.child.send_signal(signal.SIGKILL)
        assert streams.wait() == expected, server.log[-30:]
        assert moves_to(port, 2), server.log[-30:]
        box.child.send_signal(signal.SIGTERM)
        assert box.ended() == 0
        assert moves_to(port, 1)


def test_streams_go_on_without_a_member_that_is_removed(tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4")
        box = joined(start, "box", tmp_path, server.found(r"luce join (\S+)"))
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)
        expected = Streams(port).wait()
        streams = Streams(port)
        streams.wait_begun(20)
        assert start("server", "cluster", "remove", next(iter(members_of(start)))).ended() == 0
        assert streams.wait() == expected, server.log[-30:]
        assert box.ended() == 4 and moves_to(port, 1)


def test_a_member_behind_a_pulled_cable_frees_its_devices(cable: None, tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4", "--cluster-on-loss", "replan", listen=f"{ADDRESS}:0")
        token = server.found(r"luce join (\S+)")
        box = joined(start, "box", tmp_path, token, ["ip", "netns", "exec", NAMESPACE])
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)
        expected = Streams(port).wait()
        streams = Streams(port)
        streams.wait_begun(20)
        ip("link", "set", HERE, "down")
        assert streams.wait() == expected, server.log[-30:]
        assert moves_to(port, 1)
        # Still without a sign of life.
        assert "released epoch=1" in box.found("released epoch=1")
        ip("link", "set", HERE, "up")
        assert within(120, lambda: {m["state"] for m in members_of(start).values()} == {"idle"}), box.log
        streams = Streams(port)
        streams.wait_begun(20)
        assert start("server", "cluster", "replan").ended() == 0
        assert streams.wait() == expected, server.log[-30:]
        assert moves_to(port, 2)
        # Once its coordinator is gone, it frees them too, and is there for the next one.
        address = server.found(rf"address=({ADDRESS}:\d+)")
        server.child.send_signal(signal.SIGKILL)
        server.ended()
        assert box.found(r"released epoch=[2-9]")
        again, port = serve(start, "--parallel", "4", listen=address)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (again.log, box.log)
        assert moves_to(port, 2) and Streams(port).wait() == expected, again.log
