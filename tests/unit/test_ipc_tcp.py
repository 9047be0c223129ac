"""Only peers with the key connect, and others do not delay them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from luce.errors import DeviceError
from luce.ipc import tcp
from luce.ipc.tcp import Connection, accept_servers, format_address, listen, parse_address, tls_context
from tests.support.daemons import key_file

Listener = tuple[str, Iterator[tuple[socket.socket, socket.socket]]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two key files."""
    folder = tmp_path_factory.mktemp("keys")
    return [key_file(folder / name) for name in ("one", "other")]


@pytest.fixture
def served(keys: list[Path]) -> Iterator[Listener]:
    """An address, and the servers that connect to it."""
    with listen("127.0.0.1:0") as listener:
        context = tls_context(keys[0], "--key-file", server=True)
        with accept_servers(listener, context) as servers:
            yield f"127.0.0.1:{listener.getsockname()[1]}", servers
    assert not any(thread.name == "luce-accept" for thread in threading.enumerate())


def connected(where: str, key: Path) -> Connection:
    return Connection("shard", where, tls_context(key, "--shard-key-file", server=False))


def met(ours: socket.socket, theirs: socket.socket) -> bool:
    """Whether these are the two ends of one connection."""
    ours.sendall(b"?")
    return theirs.recv(1) == b"?"


@pytest.mark.parametrize(("text", "host"), [("[::1]:9000", "::1"), ("far.example:9000", "far.example")])
def test_addresses(text: str, host: str) -> None:
    assert parse_address(text) == (host, 9000) and format_address(host, 9000) == text


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_can_read(
    keys: list[Path], mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys[1].chmod(mode)
    tls_context(keys[1], "--shard-key-file", server=False)
    warning = f"--shard-key-file {keys[1]}: every user of this machine can read the key: chmod o= it"
    assert [record.getMessage() for record in caplog.records] == [warning] * warned


def test_a_silent_peer_delays_nobody(served: Listener, keys: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 1000.0)
    where, servers = served
    host, _, port = where.partition(":")
    with socket.create_connection((host, int(port))) as silent:
        ours = connected(where, keys[0])
        requests, heartbeat = next(servers)
        with ours.requests, ours.heartbeat, requests, heartbeat:
            assert met(ours.requests, requests) and met(ours.heartbeat, heartbeat)
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.recv(1)


def test_connections_of_two_servers_do_not_mix(served: Listener, keys: list[Path]) -> None:
    where, servers = served
    context = tls_context(keys[0], "--shard-key-file", server=False)
    tokens = b"a" * 16, b"b" * 16
    # Each connection arrives before the next one begins: the daemon's end of the handshake is over by then.
    connections = [tcp.connect(where, context, role + token) for role in (b"W", b"R") for token in tokens]
    for _ in tokens:
        requests, heartbeat = next(servers)
        with requests, heartbeat:
            (number,) = (n for n in range(2) if connections[2 + n].getsockname() == requests.getpeername())
            assert met(connections[2 + number], requests) and met(connections[number], heartbeat)
    for connection in connections:
        connection.close()


def test_unpaired_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_UNPAIRED", 1)
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    others = {}
    # Real connections may arrive in another order than they were made in.
    for name, role, token in (
        ("alone", b"R", b"1"),
        ("older", b"R", b"2"),
        ("ours", b"R", b"3"),
        ("heartbeat", b"W", b"3"),
    ):
        others[name], sock = socket.socketpair()
        arrivals.put(tcp.Arrival(role, token, cast("ssl.SSLSocket", sock)))
    requests, heartbeat = next(tcp.pair_up(arrivals))
    with requests, heartbeat, contextlib.ExitStack() as opened:
        for sock in others.values():
            opened.enter_context(sock)
        assert others["alone"].recv(1) == others["older"].recv(1) == b""
        assert met(others["ours"], requests) and met(others["heartbeat"], heartbeat)


def test_another_key_gets_nowhere(served: Listener, keys: list[Path]) -> None:
    where, servers = served
    try:
        stranger = connected(where, keys[1])
    except DeviceError as error:
        assert str(error).startswith(f"shard: cannot connect to {where}: ")
    else:
        # With TLS 1.3 a client learns only when it reads that it is refused.
        for sock in (stranger.requests, stranger.heartbeat):
            with sock, pytest.raises(OSError, match=r"certificate|alert|reset"):
                sock.recv(1)
    ours = connected(where, keys[0])
    requests, heartbeat = next(servers)
    with ours.requests, ours.heartbeat, requests, heartbeat:
        assert met(ours.requests, requests)


class Short(socket.socket):
    """A listening socket that first fails to accept for lack of descriptors."""

    left = 3

    def accept(self) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_no_descriptor_for_a_connection(
    keys: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "RETRY_INTERVAL", 0.01)
    caplog.set_level(logging.WARNING, logger="luce.ipc.tcp")
    with listen("127.0.0.1:0") as plain, Short(fileno=plain.detach()) as listener:
        with accept_servers(listener, tls_context(keys[0], "--key-file", server=True)) as servers:
            ours = connected(f"127.0.0.1:{listener.getsockname()[1]}", keys[0])
            requests, heartbeat = next(servers)
            with ours.requests, ours.heartbeat, requests, heartbeat:
                assert met(ours.requests, requests)
        assert not listener.left
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["connections cannot be accepted at present: Too many open files"]


def test_no_thread_for_a_connection(
    served: Listener, keys: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, names = threading.Thread.start, []

    def started(self: threading.Thread) -> None:
        if self.name == "luce-greeting" and not names:
            names.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    where, servers = served
    host, _, port = where.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as refused:
        assert refused.recv(1) == b""
    assert "a connection from 127.0.0.1 is refused: can't start new thread" in caplog.text
    ours = connected(where, keys[0])
    requests, heartbeat = next(servers)
    with ours.requests, ours.heartbeat, requests, heartbeat:
        assert met(ours.requests, requests)
