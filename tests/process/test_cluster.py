"""`luce serve --cluster` and `luce join` as processes of their own: from the first start to the last."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_processes import EXPECTED, REFERENCE, ask, greedy, member_of, serve, serving_member, starting
from tests.support.daemons import within


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts `luce` under a name, which has directories of its own."""
    with starting(tmp_path) as begin:
        yield begin


def test_a_machine_joins_and_holds_layers(start: Any, tmp_path: Path) -> None:
    server, port = serve(start)
    command = server.found(r"luce join (\S+)")
    assert "a member sees activations" in server.found("The token lets one machine join.*")
    assert within(30, lambda: ask(port, "/health")[1].get("reason") == "waiting for members: 0 of 1")
    models = tmp_path / "models"
    models.mkdir()
    (models / "called-otherwise.gguf").symlink_to(REFERENCE.path)
    # The token is not on the command line, which every user of the machine can read.
    member = start("member", "join", "-", "--model-dir", str(models), "--devices", "cpu:0", stdin=command + "\n")
    assert within(200, lambda: ask(port, "/health") == (200, {"status": "ok"})), (server.log, member.log)
    lines = [Path(f"/proc/{process.child.pid}/cmdline").read_bytes() for process in (server, member)]
    assert b"--model-dir" in lines[1] and not any(command.encode() in line for line in lines)
    assert greedy(port) == EXPECTED
    shards = ask(port, "/props")[1]["runtime"]["target_sharding"]
    found = serving_member(start)
    status = start("server", "cluster", "status", "--json")
    assert status.ended() == 0, status.log
    assert [(m["name"], m["layers"]) for m in json.loads("".join(status.out))["members"]] == [
        (found["name"], found["layers"])
    ]
    name, layers = found["name"], shards[1]["layers"]
    assert found["layers"] == [f"{layers[0]}..{layers[1]}"]
    assert [shard["device"] for shard in shards] == ["cpu:0", f"member://{name}/cpu:0"]
    assert command not in "".join(server.log + member.log)

    # Killed, it is lost; started again without a token, it holds the same layers.
    member.child.send_signal(signal.SIGKILL)
    member.ended()
    assert within(30, lambda: member_of(start)["state"] == "lost")
    again = start("member", "join", "--cluster", "home", "--model-dir", str(models), "--devices", "cpu:0")
    assert within(120, lambda: member_of(start)["state"] == "serving"), (server.log, again.log)
    assert member_of(start)["losses"] == 1
    assert within(30, lambda: ask(port, "/health")[0] == 200) and greedy(port) == EXPECTED

    # The token has been used.
    second = start("other", "join", command)
    assert second.ended() == 4 and "the token is refused" in "".join(second.log)

    again.child.send_signal(signal.SIGTERM)
    assert again.ended() == 0
    assert within(10, lambda: member_of(start)["state"] == "gone")
    server.child.send_signal(signal.SIGTERM)
    assert server.ended() == 0, server.log
    events = re.findall(r"(?:info|warning) member (\w+)", "".join(server.log))
    # The server may connect anew before it knows that the member is lost.
    stations = [event for event in events if event not in ("loading", "assigned", "measured")]
    assert stations == ["joined", "connected", "serving", "lost", "back", "serving", "draining", "gone"]


def test_a_machine_that_comes_late_is_used_by_a_new_placement(start: Any, tmp_path: Path) -> None:
    server, port = serve(start, "--cluster-wait", "0.1")
    assert within(200, lambda: ask(port, "/health")[0] == 200)
    command, models = server.found(r"luce join (\S+)"), tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    member = start("member", "join", command, "--model-dir", str(models), "--devices", "cpu:0")
    server.found("member connected")
    assert member_of(start)["state"] == "idle"

    def devices() -> int:
        """On how many devices the model is; 0 while it is loaded."""
        status, props = ask(port, "/props")
        return len(props["runtime"]["target_sharding"]) if status == 200 else 0

    replanned = start("server", "cluster", "replan")
    assert replanned.ended() == 0, replanned.log
    assert greedy(port) == EXPECTED
    assert within(60, lambda: devices() == 2) and serving_member(start), server.log
    # Without the machine, the model comes back to what is there.
    member.child.send_signal(signal.SIGKILL)
    member.ended()
    assert within(30, lambda: member_of(start)["state"] == "lost")
    assert start("server", "cluster", "replan").ended() == 0
    assert within(60, lambda: devices() == 1), server.log
    assert greedy(port) == EXPECTED


def test_a_removed_machine_and_a_new_token(start: Any, tmp_path: Path) -> None:
    server, _ = serve(start)
    text = start("server", "cluster", "token", "--expires", "5", "--label", "attic")
    assert text.ended() == 0 and "within 5 minutes" in "".join(text.out)
    models = tmp_path / "models"
    models.mkdir()
    member = start("member", "join", text.found(r"luce join (\S+)"), "--model-dir", str(models), "--devices", "cpu:0")
    server.found(r"member connected")
    found = member_of(start)
    assert found["label"] == "attic"
    removed = start("server", "cluster", "remove", found["name"])
    assert removed.ended() == 0 and "".join(removed.out) == f"{found['name']} is removed\n"
    assert member.ended() == 4 and "the coordinator has dismissed this machine: removed" in "".join(member.log)
    again = start("member", "join", "--cluster", "home", "--model-dir", str(models), "--devices", "cpu:0")
    assert again.ended() == 4 and "does not know this machine" in "".join(again.log)
    # Waiting for members does not keep a server from ending.
    server.child.send_signal(signal.SIGTERM)
    assert server.ended() == 0, server.log
