"""Daemons on other machines: the same two channels over TLS, where each side proves that it has the key file.

The key file is PEM: a private key and its self-signed certificate, the same file on both sides. Each side presents this
certificate and accepts no other one, so a peer without the key cannot send a message.

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

#: seconds for a connection, its TLS handshake and its greeting
HANDSHAKE_TIMEOUT = 10.0
#: seconds without a Ping after which a server counts as gone; it sends one each second
SERVER_TIMEOUT = 30.0
#: bytes of the token that the two connections of a server have in common
_TOKEN_BYTES = 16
#: most connections during their handshake, and most connections that wait for the other one of their server
_MAX_HANDSHAKES, MAX_UNPAIRED = 64, 8
#: seconds until the next attempt when a connection cannot be accepted
RETRY_INTERVAL = 1.0
#: the first byte of a greeting: which of the two connections this is
_REQUESTS, _HEARTBEAT = b"R", b"W"


def tls_context(key_file: Path, flag: str, *, server: bool) -> ssl.SSLContext:
    """The TLS settings for a key file that `flag` names.

    Logs a warning if other users can read the file. Raises UsageError if it is not a key with its certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The peer must have this very certificate; the names in it do not matter.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # The channel would take a session ticket for the beginning of a frame.
        context.num_tickets = 0
    try:
        context.load_cert_chain(key_file)
        context.load_verify_locations(key_file)
        if key_file.stat().st_mode & stat.S_IROTH:
            _log.warning("%s %s: every user of this machine can read the key: chmod o= it", flag, key_file)
    except OSError as error:
        raise UsageError(
            f"{flag} {key_file}: not a private key with its certificate: {error}", param="key_file"
        ) from None
    return context


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`; `[::1]:port` for IPv6. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """The reverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Connection:
    """A connected daemon on another machine. Raises DeviceError with its name if it cannot be connected to."""

    silence_hint = "; it serves one server at a time, and may be serving another one"

    def __init__(self, name: str, address: str, context: ssl.SSLContext) -> None:
        self.requests: socket.socket
        self.heartbeat: socket.socket
        token = secrets.token_bytes(_TOKEN_BYTES)
        with contextlib.ExitStack() as opened:
            try:
                self.requests = opened.enter_context(connect(address, context, _REQUESTS + token))
                self.heartbeat = opened.enter_context(connect(address, context, _HEARTBEAT + token))
            except (OSError, ValueError) as error:
                raise DeviceError(f"{name}: cannot connect to {address}: {error}") from error
            opened.pop_all()

    def kill(self) -> None:
        """Nothing to do: the caller closes the sockets, which ends the connection."""

    def join(self) -> str:
        """As in Peer."""
        return "its connection has ended"


def connect(address: str, context: ssl.SSLContext, greeting: bytes) -> ssl.SSLSocket:
    """A TLS connection after the greeting. Raises OSError, and ValueError for an address."""
    plain = socket.create_connection(parse_address(address), timeout=HANDSHAKE_TIMEOUT)
    with contextlib.ExitStack() as opened:
        opened.enter_context(plain)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = opened.enter_context(context.wrap_socket(plain))
        sock.sendall(greeting)
        opened.pop_all()
    return sock


def listen(address: str) -> socket.socket:
    """A listening socket. Raises UsageError or ListenError with the address."""
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise UsageError(f"--listen {address}: {error}", param="listen") from None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ListenError(f"--listen {address}: {error.strerror or error}") from error


@contextlib.contextmanager
def accept_servers(
    listener: socket.socket, context: ssl.SSLContext
) -> Iterator[Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]]:
    """The request and heartbeat connections of one server after another. The caller closes them.

    Each handshake runs on a thread of its own, so a peer that stays silent does not delay others.
    """
    arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
    closing = threading.Event()
    arguments = listener, context, arrivals, closing
    accepting = threading.Thread(target=_accept, args=arguments, name="luce-accept", daemon=True)
    accepting.start()
    try:
        yield pair_up(arrivals)
    finally:
        closing.set()
        # The thread must not wait on the listener any more when the caller closes it: its number may be used again.
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def pair_up(arrivals: queue.SimpleQueue[Arrival]) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Pairs of a request and a heartbeat connection with the same token. Closes the oldest of too many single ones."""
    waiting: dict[bytes, Arrival] = {}
    while True:
        arrival = arrivals.get()
        other = waiting.pop(arrival.token, None)
        if other is not None and {other.role, arrival.role} == {_REQUESTS, _HEARTBEAT}:
            first, second = (other, arrival) if other.role == _REQUESTS else (arrival, other)
            yield first.sock, second.sock
            continue
        if other is not None:
            other.sock.close()
        waiting[arrival.token] = arrival
        if len(waiting) > MAX_UNPAIRED:
            waiting.pop(next(iter(waiting))).sock.close()


@dataclass(frozen=True)
class Arrival:
    """A connection after its handshake: the peer has the key."""

    role: bytes
    token: bytes
    sock: ssl.SSLSocket


def _accept(
    listener: socket.socket, context: ssl.SSLContext, arrivals: queue.SimpleQueue[Arrival], closing: threading.Event
) -> None:
    handshakes = threading.Semaphore(_MAX_HANDSHAKES)
    refused = False
    while True:
        try:
            plain, peer = listener.accept()
        except OSError as error:
            if closing.is_set():
                return
            if not refused:
                # There may be no free descriptors, for example. Peers wait until the next attempt.
                _log.error("connections cannot be accepted at present: %s", error.strerror or error)
            refused = True
            closing.wait(RETRY_INTERVAL)
            continue
        refused = False
        if not handshakes.acquire(blocking=False):
            plain.close()
            continue

        def greet(plain: socket.socket = plain, host: str = peer[0]) -> None:
            try:
                arrival = _handshake(plain, host, context)
            finally:
                handshakes.release()
            if arrival is not None:
                arrivals.put(arrival)

        try:
            threading.Thread(target=greet, name="luce-greeting", daemon=True).start()
        except RuntimeError as error:
            _log.error("a connection from %s is refused: %s", peer[0], error)
            handshakes.release()
            plain.close()


def _handshake(plain: socket.socket, host: str, context: ssl.SSLContext) -> Arrival | None:
    """The connection, if the peer proves in time that it has the key; otherwise None, and it is closed."""
    sock: ssl.SSLSocket | None = None
    try:
        plain.settimeout(HANDSHAKE_TIMEOUT)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = context.wrap_socket(plain, server_side=True)
        return Arrival(_exactly(sock, 1), _exactly(sock, _TOKEN_BYTES), sock)
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
