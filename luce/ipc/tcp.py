"""Daemons of other machines: the same two channels over TLS, where each side proves that it has the key file.

The key file is PEM: one private key and its self-signed certificate, the same file on both sides. Each shows this
certificate and accepts no other one, so nobody without the key gets as far as a first message.

    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=luce -keyout k -out c
    cat k c > FILE && chmod 600 FILE
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from luce.errors import DeviceError, ListenError, UsageError

_log = logging.getLogger(__name__)

#: seconds for a connection, its handshake and its greeting
_PATIENCE = 10.0
#: seconds without a sign of life after which a server counts as gone; it gives one each second
SILENCE = 30.0
_TOKEN = 16
#: connections that may be about to prove themselves, and connections that may wait for their other half
_STRANGERS, _HALVES = 64, 8
#: seconds until the next try when a connection cannot be accepted
_AGAIN = 1.0
_REQUESTS, _WATCH = b"R", b"W"


def tls(key_file: Path, flag: str, *, server: bool) -> ssl.SSLContext:
    """Raises UsageError, with the flag that named the file, if it is not a key with its certificate.

    The log says if other users can read it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate is known as a whole; names in it mean nothing.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # Records that are no data would look like a frame that begins.
        context.num_tickets = 0
    try:
        context.load_cert_chain(key_file)
        context.load_verify_locations(key_file)
        if key_file.stat().st_mode & stat.S_IROTH:
            _log.warning("%s %s: every user of this machine can read the key: chmod o= it", flag, key_file)
    except OSError as error:
        raise UsageError(f"{flag} {key_file}: no private key with its certificate: {error}", param="key_file") from None
    return context


def address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[::1]:port` for IPv6. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return host.strip("[]"), int(port)


def spelled(host: str, port: int) -> str:
    """The reverse of `address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Connection:
    """A daemon of another machine, connected to. Raises DeviceError naming it."""

    silent = "; it serves one server at a time, and perhaps another one now"

    def __init__(self, name: str, where: str, context: ssl.SSLContext) -> None:
        self.requests: socket.socket
        self.watch: socket.socket
        token = secrets.token_bytes(_TOKEN)
        with contextlib.ExitStack() as opened:
            try:
                self.requests = opened.enter_context(_connect(where, context, _REQUESTS + token))
                self.watch = opened.enter_context(_connect(where, context, _WATCH + token))
            except (OSError, ValueError) as error:
                raise DeviceError(f"{name}: cannot connect to {where}: {error}") from error
            opened.pop_all()

    def kill(self) -> None:
        """The connection ends with its sockets."""

    def end(self) -> str:
        """As in Peer."""
        return "its connection has ended"


def _connect(where: str, context: ssl.SSLContext, greeting: bytes) -> ssl.SSLSocket:
    plain = socket.create_connection(address(where), timeout=_PATIENCE)
    with contextlib.ExitStack() as opened:
        opened.enter_context(plain)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = opened.enter_context(context.wrap_socket(plain))
        sock.sendall(greeting)
        opened.pop_all()
    return sock


def listening(where: str) -> socket.socket:
    """A listening socket. Raises UsageError or ListenError naming the address."""
    try:
        host, port = address(where)
    except ValueError as error:
        raise UsageError(f"--listen {where}: {error}", param="listen") from None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ListenError(f"--listen {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def sessions(
    listener: socket.socket, context: ssl.SSLContext
) -> Iterator[Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]]:
    """The two connections of each server that comes, one server after the other. The caller closes them.

    Strangers who say nothing keep nobody waiting: each connection proves itself on a thread of its own.
    """
    arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
    over = threading.Event()
    arguments = listener, context, arrivals, over
    accepting = threading.Thread(target=_accept, args=arguments, name="luce-accept", daemon=True)
    accepting.start()
    try:
        yield _pairs(arrivals)
    finally:
        over.set()
        # The caller closes the listener, whose number must not name another socket while the thread waits on it.
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def _pairs(arrivals: queue.SimpleQueue[_Arrival]) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    waiting: dict[bytes, _Arrival] = {}
    while True:
        arrival = arrivals.get()
        other = waiting.pop(arrival.token, None)
        if other is not None and {other.role, arrival.role} == {_REQUESTS, _WATCH}:
            first, second = (other, arrival) if other.role == _REQUESTS else (arrival, other)
            yield first.sock, second.sock
            continue
        if other is not None:
            other.sock.close()
        waiting[arrival.token] = arrival
        if len(waiting) > _HALVES:
            waiting.pop(next(iter(waiting))).sock.close()


@dataclass(frozen=True)
class _Arrival:
    """A connection whose peer has the key."""

    role: bytes
    token: bytes
    sock: ssl.SSLSocket


def _accept(
    listener: socket.socket, context: ssl.SSLContext, arrivals: queue.SimpleQueue[_Arrival], over: threading.Event
) -> None:
    places = threading.Semaphore(_STRANGERS)
    refused = False
    while True:
        try:
            plain, peer = listener.accept()
        except OSError as error:
            if over.is_set():
                return
            if not refused:
                # Of descriptors, for example: who connects waits until there are some.
                _log.error("no connection is accepted for now: %s", error.strerror or error)
            refused = True
            over.wait(_AGAIN)
            continue
        refused = False
        if not places.acquire(blocking=False):
            plain.close()
            continue

        def prove(plain: socket.socket = plain, host: str = peer[0]) -> None:
            try:
                arrival = _proven(plain, host, context)
            finally:
                places.release()
            if arrival is not None:
                arrivals.put(arrival)

        try:
            threading.Thread(target=prove, name="luce-greeting", daemon=True).start()
        except RuntimeError as error:
            _log.error("a connection from %s is refused: %s", peer[0], error)
            places.release()
            plain.close()


def _proven(plain: socket.socket, host: str, context: ssl.SSLContext) -> _Arrival | None:
    """The connection, if its peer proves in time that it has the key; else it is closed."""
    sock: ssl.SSLSocket | None = None
    try:
        plain.settimeout(_PATIENCE)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = context.wrap_socket(plain, server_side=True)
        return _Arrival(_exactly(sock, 1), _exactly(sock, _TOKEN), sock)
    except OSError as error:
        _log.warning("a connection from %s is refused: %s", host, error)
        (plain if sock is None else sock).close()
        return None


def _exactly(sock: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data
