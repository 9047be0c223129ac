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


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Any]:
    """A function that starts `luce` under a name, which has directories of its own."""
    needs_keys()
    with contextlib.ExitStack() as opened:

        def begin(name: str, *arguments: str, **options: Any) -> Process:
            process = Process(folder / name, *arguments, **options)
            opened.callback(process.close)
            return process

        yield begin


def serve(start: Any, *more: str, listen: str = "127.0.0.1:0") -> tuple[Process, int]:
    """A server of a cluster, and its port."""
    flags = ["--cluster", "home", "--cluster-listen", listen, "--cluster-wait", "300", "--devices", "cpu:0"]
    process = start("server", "serve", str(REFERENCE.path), *flags, *more, *FLAGS)
    return process, port_of(process)


def port_of(server: Process) -> int:
    """The port on which a server listens, once it does."""
    return int(server.found(r"listening url=http://127\.0\.0\.1:(\d+)"))


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


def members_of(start: Any) -> dict[str, dict[str, Any]]:
    """The members by name, as `luce cluster status` has them."""
    status = start("server", "cluster", "status", "--json")
    assert status.ended() == 0, status.log
    return {member["name"]: member for member in json.loads("".join(status.out))["members"]}


def member_of(start: Any) -> dict[str, Any]:
    """The only member."""
    (member,) = members_of(start).values()
    return member


def stream(port: int, tokens: int, ids: list[int], prompt: Sequence[int] = PROMPT) -> str:
    """The error of a streamed greedy reply, "" without one. Its tokens go to `ids` as they come."""
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    data = json.dumps({**body, "stream": True}).encode()
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
                    ids += event["tokens"]
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
