"""`luce serve --cluster` and `luce join` as processes, each with directories of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from luce.cluster import admin, wire
from luce.cluster.cluster_files import ClusterFiles
from tests.support.clusters import needs_keys
from tests.support.daemons import within
from tests.support.reference import Reference

REFERENCE = Reference("qwen3-a-F32")
PROMPT = REFERENCE.expected["prompt_17"].tolist()
EXPECTED = REFERENCE.expected["greedy_17"][:8].tolist()
#: tokens of each of the streams, and their prompts
TOKENS = 200
PROMPTS = [PROMPT[: 17 - n] for n in range(4)]
#: settings of a server that starts soon
FLAGS = ("--port", "0", "--max-ctx", "256", "--kv-cache-dir", "off", "--no-warmup")

_ENVIRONMENT = threading.Lock()


class Process:
    """`luce` with directories of its own, and what it writes."""

    def __init__(self, home: Path, *arguments: str, stdin: str | None = None, prefix: Sequence[str] = ()) -> None:
        environment = {**os.environ, "XDG_DATA_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        command = [*prefix, sys.executable, "-P", "-m", "luce", *arguments]
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

    def found(self, pattern: str, seconds: float = 120) -> str:
        """The first group of a pattern in what it has written, which it does in time."""

        def search() -> re.Match[str] | None:
            return re.search(pattern, "".join([*self.out, *self.log]))

        assert within(seconds, lambda: search() is not None or self.child.poll() is not None)
        match = search()
        assert match is not None, (pattern, self.out, self.log)
        return match[1] if match.groups() else match[0]

    def ended(self) -> int:
        """Its exit status, once it has ended by itself."""
        status = self.child.wait(120)
        for reader in self._readers:
            reader.join()
        return status

    def close(self) -> None:
        """Kill it if it still runs."""
        self.child.kill()
        self.ended()


class Start:
    """Starts `luce` under a name, which has directories of its own below `folder`."""

    def __init__(self, folder: Path, opened: contextlib.ExitStack) -> None:
        self.folder = folder
        self._opened = opened

    def __call__(self, name: str, *arguments: str, **options: Any) -> Process:
        process = Process(self.folder / name, *arguments, **options)
        self._opened.callback(process.close)
        return process


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """What starts the processes of a test, which end with it."""
    needs_keys()
    with contextlib.ExitStack() as opened:
        yield Start(folder, opened)


def serve(
    start: Any, *more: str, listen: str = "127.0.0.1:0", model: Path = REFERENCE.path, **options: Any
) -> tuple[Process, int]:
    """A server of a cluster, and its port; of a flag that comes twice the one of `more` counts."""
    flags = ["--cluster", "home", "--cluster-listen", listen, "--cluster-wait", "300", "--cluster-drain", "0"]
    process = start("server", "serve", str(model), *flags, "--devices", "cpu:0", *FLAGS, *more, **options)
    return process, port_of(process)


def port_of(server: Process) -> int:
    """The port on which a server listens, once it does."""
    return int(server.found(r"listening url=http://127\.0\.0\.1:(\d+)"))


def resident(process: Process) -> float:
    """MiB of a process's resident memory."""
    status = Path(f"/proc/{process.child.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


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


def metrics(port: int) -> str:
    """GET /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def refusal(port: int) -> tuple[str, str]:
    """The code and the message of the 503 that a request for a token gets, which says when to try again."""
    data = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=60):
        pass
    with caught.value as answer:
        assert answer.code == 503 and int(answer.headers["Retry-After"]) >= 1
        error = json.load(answer)["error"]
    assert "\n" not in error["message"]
    return error["code"], error["message"]


def greedy(port: int) -> list[int]:
    """The tokens that the server generates."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    status, answer = ask(port, "/completion", {**body, "n_predict": 8})
    assert status == 200, answer
    return list(answer["tokens"])


def command(start: Start, asked: wire.Command) -> wire.Status | wire.Done:
    """What the coordinator answers to a command: asked for as by `luce cluster`, but by this process. An interpreter
    takes half a second until it asks, in which a reply may end."""
    # Several threads may ask.
    with _ENVIRONMENT, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(start.folder / "server"))
        files = ClusterFiles("home", make=False)
    return admin.ask(files, asked)


def members_of(start: Start) -> dict[str, dict[str, Any]]:
    """The members by name, as `luce cluster status` has them."""
    status = command(start, wire.AskStatus())
    assert isinstance(status, wire.Status)
    return {member["name"]: member for member in json.loads(msgspec.json.encode(status))["members"]}


def processes_of(folder: Path) -> set[int]:
    """Processes of a test with this folder, by their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder).encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found - {os.getpid()}


def member_of(start: Start) -> dict[str, Any]:
    """The only member."""
    (member,) = members_of(start).values()
    return member


def serving_member(start: Start) -> dict[str, Any]:
    """The only member, that serves: the model may answer a moment before the coordinator says so."""
    assert within(30, lambda: member_of(start)["state"] == "serving"), member_of(start)
    return member_of(start)


def stream(port: int, tokens: int, ids: list[int], prompt: Sequence[int] = PROMPT, **fields: Any) -> str:
    """The error of a streamed reply, "" without one. It is greedy unless `fields` say otherwise; its tokens go to `ids`
    as they come."""
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    data = json.dumps({**body, "stream": True, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event["error"])
                if not event.get("stop"):
                    ids.extend(event["tokens"])
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    return ""


class Streams:
    """Streams of greedy replies, each on a thread."""

    def __init__(self, port: int) -> None:
        self.ids: list[list[int]] = [[] for _ in PROMPTS]
        self.errors = [""] * len(PROMPTS)

        def run(number: int) -> None:
            try:
                self.errors[number] = stream(port, TOKENS, self.ids[number], PROMPTS[number])
            except Exception as error:
                self.errors[number] = repr(error)

        self.threads = [threading.Thread(target=run, args=(number,)) for number in range(len(PROMPTS))]
        for thread in self.threads:
            thread.start()

    def wait(self) -> list[list[int]]:
        """The tokens of all, once they have ended without an error."""
        for thread in self.threads:
            thread.join(300)
        assert self.errors == [""] * len(PROMPTS), self.errors
        return self.ids

    def wait_begun(self, tokens: int) -> None:
        """Wait until each has so many tokens."""
        assert within(60, lambda: all(len(ids) >= tokens for ids in self.ids)), (self.errors, self.ids)
