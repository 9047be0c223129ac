"""A member is killed, frozen and unplugged under streams: the streams go on, and no token comes twice or is lost."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.cluster_processes import (
    REFERENCE,
    TOKENS,
    Process,
    Streams,
    ask,
    member_of,
    metrics,
    processes_of,
    serve,
    serving_member,
    starting,
)
from tests.support.daemons import within
from tests.support.network_namespaces import ADDRESS, HERE, NAMESPACE, cable, ip

__all__ = ["cable"]


def test_streams_go_on_behind_kills_freezes_and_pulled_cables(cable: None, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    prefix = ["ip", "netns", "exec", NAMESPACE]
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4", listen=f"{ADDRESS}:0")
        member = start("member", "join", server.found(r"luce join (\S+)"), *flags, prefix=prefix)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        expected = Streams(port).wait()
        assert all(len(ids) == TOKENS for ids in expected)

        def kill(member: Process) -> Process:
            member.child.send_signal(signal.SIGKILL)
            member.ended()
            return start("member", "join", "--cluster", "home", *flags, prefix=prefix)  # type: ignore[no-any-return]

        def freeze(member: Process) -> Process:
            # Longer than the 15 s of silence behind which it is lost.
            member.child.send_signal(signal.SIGSTOP)
            assert within(60, lambda: member_of(start)["state"] == "lost"), server.log
            member.child.send_signal(signal.SIGCONT)
            return member

        def unplug(member: Process) -> Process:
            ip("link", "set", HERE, "down")
            assert within(60, lambda: member_of(start)["state"] == "lost"), server.log
            ip("link", "set", HERE, "up")
            return member

        rounds: list[tuple[Callable[[Process], Process], int]] = [(kill, 1), (kill, 60), (freeze, 20), (unplug, 30)]
        for losses, (disturb, tokens) in enumerate(rounds, 1):
            streams = Streams(port)
            streams.wait_begun(tokens)
            member = disturb(member)
            assert streams.wait() == expected, (disturb.__name__, server.log[-30:], member.log[-30:])
            assert serving_member(start)["losses"] == losses
        assert re.search(r"^luce_replies_resumed_total [1-9]", metrics(port), re.MULTILINE)
        member.child.send_signal(signal.SIGTERM)
        assert member.ended() == 0
        server.child.send_signal(signal.SIGTERM)
        assert server.ended() == 0, server.log
    assert within(10, lambda: processes_of(tmp_path) == set())
    listening = subprocess.run(["ss", "-tlnH"], capture_output=True, text=True).stdout
    assert f"{ADDRESS}:" not in listening
