"""What a coordinator with eight members takes beside a server without a cluster, and what a member takes that has no
layers: CL-A13 of the acceptance tests. The figures are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.cluster import wire
from tests.support.cluster_processes import (
    EXPECTED,
    FLAGS,
    REFERENCE,
    ask,
    command,
    greedy,
    port_of,
    resident,
    serve,
    starting,
)
from tests.support.daemons import within

MEMBERS = 8
#: most MiB that the members may add to the server, and that one of them may take
ADDED, OWN = 30, 80


@pytest.mark.slow
def test_the_memory_of_a_coordinator_and_of_members_without_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with starting(tmp_path) as start:
        plain = start("plain", "serve", str(REFERENCE.path), "--devices", "cpu:0", *FLAGS)
        server, port = serve(start, "--cluster-min", "0")
        for each in (port_of(plain), port):
            assert within(200, lambda each=each: ask(each, "/health")[0] == 200), (plain.log, server.log)
            assert greedy(each) == EXPECTED
        members = []
        for number in range(MEMBERS):
            made = command(start, wire.AskToken(300, f"shelf {number}"))
            assert isinstance(made, wire.Done)
            token = made.text.split()[2]
            members.append(start(f"box{number}", "join", "-", "--devices", "cpu:0", stdin=token + "\n"))

        def seen() -> list[str]:
            status = command(start, wire.AskStatus())
            assert isinstance(status, wire.Status)
            return [member.state for member in status.members if member.round_trip_ms is not None]

        assert within(200, lambda: seen() == ["idle"] * MEMBERS), [member.log for member in members]
        added, own = resident(server) - resident(plain), [resident(member) for member in members]
        with capsys.disabled():
            print(f"\na server {resident(plain):.0f} MiB, with {MEMBERS} members {added:+.1f} MiB")
            print(f"members without layers {min(own):.1f} to {max(own):.1f} MiB")
        assert added < ADDED and max(own) < OWN
