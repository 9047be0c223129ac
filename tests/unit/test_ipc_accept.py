"""Only peers with the key get to a daemon, and others do not keep them out."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from luce.errors import DeviceError
from luce.ipc import accept, tcp
from luce.ipc.accept import accept_servers
from luce.ipc.tcp import Connection, listen, open_key_file, parse_address
from tests.support.daemons import key_file, signed_key_file, within

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
        tls = open_key_file(keys[0], "--key-file", server=True)
        with accept_servers(listener, tls) as servers:
            yield f"127.0.0.1:{listener.getsockname()[1]}", servers
    assert not any(thread.name == "luce-accept" for thread in threading.enumerate())


def connected(where: str, key: Path) -> Connection:
    return Connection("shard", where, open_key_file(key, "--shard-key-file", server=False))


def met(ours: socket.socket, theirs: socket.socket) -> bool:
    """Whether these are the two ends of one connection."""
    ours.sendall(b"?")
    return theirs.recv(1) == b"?"


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
    tls = open_key_file(keys[0], "--shard-key-file", server=False)
    tokens = b"a" * 16, b"b" * 16
    # Each connection arrives before the next one begins: the daemon's end of the handshake is over by then.
    connections = [tcp.connect(where, tls, role + token) for role in (b"W", b"R") for token in tokens]
    for _ in tokens:
        requests, heartbeat = next(servers)
        with requests, heartbeat:
            (number,) = (n for n in range(2) if connections[2 + n].getsockname() == requests.getpeername())
            assert met(connections[2 + number], requests) and met(connections[number], heartbeat)
    for connection in connections:
        connection.close()


def test_unpaired_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "MAX_UNPAIRED", 1)
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
        arrivals.put(accept.Arrival(role, token, cast("ssl.SSLSocket", sock)))
    requests, heartbeat = next(accept.pair_up(arrivals))
    with requests, heartbeat, contextlib.ExitStack() as opened:
        for sock in others.values():
            opened.enter_context(sock)
        assert others["alone"].recv(1) == others["older"].recv(1) == b""
        assert met(others["ours"], requests) and met(others["heartbeat"], heartbeat)


@pytest.mark.parametrize("late", [False, True])
def test_connections_that_nobody_takes_end_with_the_listener(keys: list[Path], late: bool) -> None:
    """Those that are there when it closes, and one whose greeting is read later."""
    own = open_key_file(keys[0], "--key-file", server=True)
    admitted, goes_on = threading.Event(), threading.Event()

    class Gate:
        context = own.context

        def admit(self, sock: ssl.SSLSocket, host: str) -> bool:
            admitted.set()
            assert goes_on.wait(60)
            return True

    with listen("127.0.0.1:0") as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        with accept.accept_connections(listener, Gate()) as arrivals:
            tls = open_key_file(keys[0], "--shard-key-file", server=False)
            ours = tcp.connect(where, tls, b"R" + b"t" * 16)
            assert admitted.wait(60)
            if not late:
                goes_on.set()
                assert within(60, lambda: not arrivals.empty())
        goes_on.set()
        with ours:
            ours.settimeout(60)
            assert ours.recv(1) == b""


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
    monkeypatch.setattr(accept, "RETRY_INTERVAL", 0.01)
    caplog.set_level(logging.WARNING, logger="luce.ipc.accept")
    with listen("127.0.0.1:0") as plain, Short(fileno=plain.detach()) as listener:
        with accept_servers(listener, open_key_file(keys[0], "--key-file", server=True)) as servers:
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


def closed(sock: socket.socket) -> bool:
    """Whether the other end has closed a connection over which nothing was sent."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


#: where silent connections come from, and how many of them keep a place at most
FLOODS = {
    "the holder's address": (lambda number: "127.0.0.1", accept.PER_ADDRESS),
    "another address": (lambda number: "127.0.0.2", accept.PER_ADDRESS),
    "many addresses": (lambda number: f"127.0.1.{number + 1}", accept.PLACES),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_silent_connections_do_not_keep_the_holder_of_the_key_out(
    flood: str, served: Listener, keys: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their handshakes do not time out during this test.
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 1000.0)
    where, servers = served
    address, most = FLOODS[flood]
    with contextlib.ExitStack() as opened:
        silent = []
        for number in range(200):
            source = address(number), 0
            silent.append(opened.enter_context(socket.create_connection(parse_address(where), source_address=source)))
        for _ in range(2):
            ours = connected(where, keys[0])
            requests, heartbeat = next(servers)
            with ours.requests, ours.heartbeat, requests, heartbeat:
                assert met(ours.requests, requests) and met(ours.heartbeat, heartbeat)
        # The oldest ones went.
        assert within(60, lambda: sum(map(closed, silent)) >= 200 - most)
        assert all(map(closed, silent[: 200 - most])) and not closed(silent[-1])


def test_places() -> None:
    def take(count: int, host: str) -> list[socket.socket]:
        taken = []
        for _ in range(count):
            theirs, ours = socket.socketpair()
            ends.append((theirs, ours))
            places.take(cast("ssl.SSLSocket", ours), host)
            taken.append(theirs)
        return taken

    def lost(socks: list[socket.socket]) -> int:
        found = list(map(closed, socks))
        # The oldest.
        assert found == sorted(found, reverse=True)
        return sum(found)

    ends: list[tuple[socket.socket, socket.socket]] = []
    places = accept.Places()
    try:
        first = take(1, "10.0.0.1")
        flood = take(accept.PER_ADDRESS + 5, "10.0.0.2")
        assert lost(first) == 0 and lost(flood) == 5
        # An IPv6 host may have all addresses of its network; IPv4 addresses may be written as IPv6.
        network = take(5, "2001:db8::1") + take(5, "2001:db8::ffff:1%eth0")
        mapped = take(2, "::ffff:10.0.0.1")
        assert lost(network) == 10 - accept.PER_ADDRESS and lost(first + mapped) == 0
        # Beyond all places, the address with the most gives one up.
        many = [take(1, f"10.0.1.{n}") for n in range(accept.PLACES - 2 * accept.PER_ADDRESS - 3)]
        assert lost(flood) == 5
        late = take(2, "10.0.2.1")
        assert lost(late) == 0 and sum(map(lost, many)) == lost(first + mapped) == 0
        assert lost(flood) + lost(network) == 5 + 2 + 2
        places.give_back(cast("ssl.SSLSocket", ends[0][1]))
        with pytest.raises(ConnectionError, match="too many connections have not proved that they have the key"):
            places.give_back(cast("ssl.SSLSocket", ends[1][1]))
    finally:
        for pair in ends:
            for sock in pair:
                sock.close()


def test_a_certificate_that_the_key_has_signed(
    served: Listener, keys: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where, servers = served
    signed = open_key_file(signed_key_file(tmp_path / "signed", keys[0]), "--shard-key-file", server=False)
    # It takes the daemon's certificate for the right one.
    trusting = dataclasses.replace(signed, certificate=open_key_file(keys[0], "--key-file", server=False).certificate)
    with tcp.connect(where, trusting, b"R" + b"a" * 16) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(60)
        assert sock.recv(1) == b""
    why = "a connection from 127.0.0.1 is refused: its certificate is not that of the key file"
    assert within(60, lambda: [record.getMessage() for record in caplog.records] == [why])
    ours = connected(where, keys[0])
    requests, heartbeat = next(servers)
    with ours.requests, ours.heartbeat, requests, heartbeat:
        assert met(ours.requests, requests)


def test_a_greeting_that_drips(served: Listener, keys: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    where, _ = served
    tls = open_key_file(keys[0], "--shard-key-file", server=False)
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 0.5)
    with contextlib.suppress(OSError), tcp.connect(where, tls, b"R") as sock:
        sock.settimeout(60)
        for _ in range(16):
            time.sleep(0.2)
            sock.sendall(b"a")
        assert sock.recv(1) == b"", "each part had its own time"


def test_a_flood_does_not_fill_the_log(
    served: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where, _ = served

    def refused(count: int) -> None:
        for _ in range(count):
            with socket.create_connection(parse_address(where), timeout=60) as sock, contextlib.suppress(OSError):
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while sock.recv(100):
                    pass

    refused(20)
    monkeypatch.setattr(accept, "LOG_INTERVAL", 0.0)
    time_ = accept.time.monotonic
    monkeypatch.setattr(accept, "time", SimpleNamespace(monotonic=lambda: time_() + 100))
    refused(1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all(line.startswith("a connection from 127.0.0.1 is refused: ") for line in lines)
    assert lines[1].endswith(" (19 more since the last line)")
