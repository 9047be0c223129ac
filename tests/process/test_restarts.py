"""A service that is killed, stopped, restarted and rebooted while clients retry: every request gets its reply, and old
prompts come from the disk."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from luce.runtime.step import PAGE
from tests.support.daemons import within
from tests.support.service_manager import Child, StartServer, service_manager

TOKENS = 12
#: what a client sees where a server ends, or is not there yet
LOST = (ConnectionError, http.client.HTTPException, TimeoutError)
WAYS = ("kill", "stop", "restart", "reboot")


class Service:
    """A server, the socket that is held for it, and what ends it."""

    def __init__(self, start: StartServer, folder: Path, *flags: str) -> None:
        self._start = start
        self._flags = (
            "--kv-cache-dir",
            str(folder / "cache"),
            "--kv-cache-min-tokens",
            "16",
            "--parallel",
            "4",
            *flags,
        )
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self.child = self.begin()
        self.child.notified("READY=1")

    def begin(self) -> Child:
        """A new process, which loads the model."""
        self.child = self._start(*self._flags, inherit=self._socket)
        return self.child

    def end(self, way: str) -> None:
        """One round: the process ends in this way, and the next one is ready."""
        daemons = children(self.child.process.pid)
        if way == "kill":
            self.child.send(signal.SIGKILL)
            self.child.wait()
        else:
            self.child.send(signal.SIGTERM)
            assert self.child.wait() == 0, self.child.log
        assert "Traceback" not in self.child.log, self.child.log
        assert within(30, lambda: not any(os.path.exists(f"/proc/{pid}") for pid in daemons))
        if way == "reboot":
            # Clients are refused until the socket is there again, long before the service is.
            self._socket.close()
            time.sleep(0.1)
            self._socket = socket.create_server(("127.0.0.1", self.port), backlog=1024)
        if way in ("stop", "reboot"):
            with socket.create_connection(("127.0.0.1", self.port), timeout=10):
                time.sleep(0.1)
        self.begin().notified("READY=1")

    def close(self) -> None:
        self._socket.close()


def children(pid: int) -> list[str]:
    """The processes that a server has started: its daemons, and that of the chat template."""
    return [pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()]


def complete(port: int, prompt: list[int] | list[list[int]], *, stream: bool) -> dict[str, Any] | None:
    """The last object of a reply with its text; None if the server refused it for now, or ended it for its own end.
    Raises what LOST names if the connection broke."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status == 503:
            assert response.getheader("Retry-After")
            return None
        assert response.status == 200, text
    finally:
        connection.close()
    if not stream:
        reply: dict[str, Any] = json.loads(text)
        return None if reply["choices"][0]["finish_details"]["cause"] == "shutdown" else reply
    events = text.decode().split("\n\n")
    if "data: [DONE]" not in events:
        raise http.client.IncompleteRead(text)
    parts = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    choices = [choice for part in parts for choice in part.get("choices", ())]
    if not choices or choices[-1].get("finish_details", {}).get("cause") != "length":
        return None
    last = parts[-1]
    last["choices"] = [{**choices[-1], "text": "".join(choice["text"] for choice in choices)}]
    return last


def reply_to(port: int, prompt: list[int] | list[list[int]], *, stream: bool) -> dict[str, Any]:
    """The reply to a prompt, however often a client must ask for it."""
    for _ in range(600):
        try:
            if reply := complete(port, prompt, stream=stream):
                return reply
        except LOST:
            pass
        time.sleep(0.1)
    raise AssertionError("no reply")


def ask_until(port: int, number: int, stop: threading.Event) -> int:
    """A client: asks prompts of its own again and again, and compares each reply with the first to the same prompt."""
    chosen = random.Random(number)
    first: dict[int, str] = {}
    for done in itertools.count():
        if stop.is_set():
            return done
        which = chosen.randrange(6)
        prompt = [3 + (which + number * 7 + n * 5) % 60 for n in range(40 + 64 * which)]
        reply = reply_to(port, prompt, stream=bool(done % 2))
        assert reply["usage"]["completion_tokens"] == TOKENS
        text = reply["choices"][0]["text"]
        assert first.setdefault(which, text) == text
        # Not as fast as the server is: three clients would have it compute for all the time of every restart.
        stop.wait(0.05)
    raise AssertionError


def rounds(service: Service, ways: Sequence[str]) -> None:
    """End the service in each of these ways while three clients ask."""
    stop = threading.Event()
    with ThreadPoolExecutor(3) as threads:
        clients = [threads.submit(ask_until, service.port, number, stop) for number in range(3)]
        try:
            saved: list[tuple[list[int], str]] = []
            for number, way in enumerate(ways):
                # Several at once: some are not on the disk yet when the end begins.
                prompts = [[3 + (number * 11 + n * 3 + k) % 60 for n in range(400 + number)] for k in range(4)]
                replies = reply_to(service.port, prompts, stream=False)["choices"]
                service.end(way)
                if way != "kill":
                    saved = [(prompt, reply["text"]) for prompt, reply in zip(prompts, replies, strict=True)]
                # Also after a kill: what the last drain has saved stays.
                for prompt, text in saved:
                    again = reply_to(service.port, prompt, stream=False)
                    assert again["choices"][0]["text"] == text
                    assert again["choices"][0]["finish_details"]["cache"] == {"tier": "disk"}, (number, way)
                    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert cached >= len(prompt) // PAGE * PAGE
        finally:
            stop.set()
        assert all(client.result(120) for client in clients)


DAEMON = ("--target-devices", "cpu:1", "--target-shard-ipc-bin", sys.executable)


# A restart and a reboot differ from a stop by the socket, of which daemons know nothing.
@pytest.mark.parametrize(("flags", "ways"), [((), WAYS), (DAEMON, ("stop", "kill"))], ids=["here", "in a daemon"])
def test_every_way_to_end(flags: tuple[str, ...], ways: tuple[str, ...], tmp_path: Path) -> None:
    with service_manager(tmp_path) as start:
        service = Service(start, tmp_path, *flags)
        try:
            rounds(service, ways)
        finally:
            service.close()


@pytest.mark.slow
def test_fifty_rounds(tmp_path: Path) -> None:
    with service_manager(tmp_path) as start:
        service = Service(start, tmp_path)
        try:
            rounds(service, random.Random(1).choices(WAYS, k=50))
        finally:
            service.close()
