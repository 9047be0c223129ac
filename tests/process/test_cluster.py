"""`luce serve --cluster` and `luce join` as processes of their own: from the first start to the last."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.clusters import needs_keys
from tests.support.daemons import within
from tests.support.reference import Reference

REFERENCE = Reference("qwen3-a-F32")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
EXPECTED = REFERENCE.expected["greedy_17"][:8].tolist()


class Process:
    """`luce` with directories of its own, and what it writes."""

    def __init__(self, home: Path, *arguments: str, stdin: str | None = None) -> None:
        environment = {**os.environ, "XDG_DATA_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        command = [sys.executable, "-P", "-m", "luce", *arguments]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=Path(__file__).parents[2]
        )
        self.out, self.log = list[str](), list[str]()
        self._readers = []
        for stream, lines in ((self.child.stdout, self.out), (self.child.stderr, self.log)):
            assert stream is not None
            self._readers.append(threading.Thread(target=self._read, args=(stream, lines)))
            self._readers[-1].start()
        assert self.child.stdin is not None
        with self.child.stdin as given:
            given.write(stdin or "")

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        with stream:
            lines.extend(iter(stream.readline, ""))

    def found(self, pattern: str) -> str:
        """The first group of a pattern in what it has written, which it does in time."""

        def search() -> re.Match[str] | None:
            return re.search(pattern, "".join([*self.out, *self.log]))

        assert within(120, lambda: search() is not None or self.child.poll() is not None)
        match = search()
        assert match is not None, (pattern, self.out, self.log)
        return match[1] if match.groups() else match[0]

    def ended(self) -> int:
        """Its exit status, once it has ended by itself."""
        status = self.child.wait(60)
        for reader in self._readers:
            reader.join()
        return status

    def close(self) -> None:
        """Kill it if it still runs."""
        self.child.kill()
        self.ended()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts `luce` under a name, which has directories of its own."""
    needs_keys()
    with contextlib.ExitStack() as opened:

        def begin(name: str, *arguments: str, stdin: str | None = None) -> Process:
            process = Process(tmp_path / name, *arguments, stdin=stdin)
            opened.callback(process.close)
            return process

        yield begin


def serve(start: Any, *more: str) -> tuple[Process, int]:
    """A server of a cluster, and its port."""
    flags = ["--cluster", "home", "--cluster-listen", "127.0.0.1:0", "--cluster-wait", "300", "--devices", "cpu:0"]
    flags += [*more, "--port", "0", "--max-ctx", "256", "--kv-cache-dir", "off", "--no-warmup"]
    process = start("server", "serve", str(REFERENCE.path), *flags)
    return process, int(process.found(r"listening url=http://127\.0\.0\.1:(\d+)"))


def ask(port: int, path: str, body: Any = None) -> Any:
    """The status and the JSON answer of a server."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def greedy(port: int) -> list[int]:
    """The tokens that the server generates."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    status, answer = ask(port, "/completion", {**body, "n_predict": 8})
    assert status == 200, answer
    return list(answer["tokens"])


def test_a_machine_joins_and_holds_layers(start: Any, tmp_path: Path) -> None:
    server, port = serve(start)
    command = server.found(r"luce join (\S+)")
    assert "whoever joins sees activations" in server.found("The token lets one machine join.*")
    assert within(30, lambda: ask(port, "/health")[1].get("reason") == "waiting for members: 0 of 1")
    models = tmp_path / "models"
    models.mkdir()
    (models / "called-otherwise.gguf").symlink_to(REFERENCE.path)
    # The token is not on the command line, which every user of the machine can read.
    member = start("member", "join", "-", "--model-dir", str(models), "--devices", "cpu:0", stdin=command + "\n")
    assert within(200, lambda: ask(port, "/health") == (200, {"status": "ok"})), (server.log, member.log)
    assert greedy(port) == EXPECTED
    shards = ask(port, "/props")[1]["runtime"]["target_sharding"]
    name = member_of(start)["name"]
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
    stations = [event for event in events if event != "loading"]
    assert stations == ["joined", "connected", "serving", "lost", "back", "serving", "gone"]


def member_of(start: Any) -> dict[str, Any]:
    """The only member, as `luce cluster status` has it."""
    status = start("server", "cluster", "status", "--json")
    assert status.ended() == 0, status.log
    (member,) = json.loads("".join(status.out))["members"]
    return dict(member)


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
    assert within(60, lambda: devices() == 2) and member_of(start)["state"] == "serving", server.log
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
