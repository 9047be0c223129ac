"""A daemon in a thread of this process, the server's end of it, and what it is asked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from luce import __version__
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc.channel import Channel
from luce.ipc.lifecycle import Failed, Open, Ping, Pong
from luce.remote.daemon import serve
from luce.remote.messages import Announce, Load, Response
from luce.remote.shared_layout import shared_size
from luce.runtime.step import PageView, Span, Step
from luce.shard.sizes import activation_widths
from tests.support.reference import Reference

REFERENCE = Reference("qwen3-a-F32")
ROWS = 8
OPEN = Open(__version__, ("cpu:0",), "info", 0, "float32")


class Server:
    """The server's end of a daemon in a thread of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        heartbeat, their_heartbeat = socket.socketpair()
        self.heartbeat: Channel[Pong] = Channel(heartbeat, Pong)
        self.channel: Channel[Response] = Channel(ours, Response)
        self.number = 0
        arguments = {"can_share": True, "server_timeout": 600.0}
        self.thread = threading.Thread(target=serve, args=(theirs, their_heartbeat), kwargs=arguments)
        self.thread.start()

    def send(self, message: Any) -> None:
        self.number += 1
        self.channel.send(self.number, message, timeout=60)

    def ask(self, message: Any, fd: int | None = None) -> Response:
        self.send(message)
        if fd is not None:
            self.channel.send_descriptor(fd, timeout=60)
        number, reply = self.channel.receive(timeout=60, limit=1 << 26)
        assert number == self.number
        return reply

    def announce(self, step: Step, source: int, target: int) -> None:
        self.channel.send(0, Announce(step, source, target), timeout=60)

    def pong(self) -> Pong:
        """A heartbeat."""
        self.heartbeat.send(0, Ping(), timeout=60)
        return self.heartbeat.receive(timeout=60)[1]

    def refused(self, message: Any, why: str, error: str = "BackendError") -> None:
        reply = self.ask(message)
        assert isinstance(reply, Failed) and reply.error == error and why in reply.message, reply

    def close(self) -> None:
        self.channel.close()
        self.heartbeat.close()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def load_of(begin: int, end: int) -> Load:
    spec = REFERENCE.spec
    size = shared_size(ROWS, activation_widths(spec, begin), activation_widths(spec, end))
    with open_gguf(REFERENCE.path) as file:
        mark = fingerprint(file)
    pages = (4,) * len(spec.page_groups)
    kv = ("auto", "auto")
    return Load(str(REFERENCE.path), mark, ((begin, end),), pages, 2, kv, 0, (), True, (0,), ROWS, True, size, False)


def changed(message: Load, **fields: Any) -> Load:
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return Load(**{**values, **fields})


LAYERS = len(REFERENCE.spec.layers)
WHOLE = load_of(0, LAYERS)
STEP = Step.of_spans(
    [Span(1, 0, 3, 0)],
    [1, 2, 3],
    (
        PageView(
            np.array([[2]], np.int32),
            np.zeros((1, 1), np.int32),
            np.ones(1, np.int32),
            np.arange(128, 131, dtype=np.int32),
        ),
    ),
    [2],
    needs_logits=True,
)
