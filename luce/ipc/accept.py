"""The end of connections over a network that listens: who gets a place until it has proved that it has its key.

A connection holds one of a few places until the gate has let it in, which looks at the certificate of the handshake.
Places are never refused: a newcomer takes the place of the oldest connection of its own address, or of the address that
has most. So a peer without a key displaces itself, and others only from more addresses than there are places.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from luce.ipc import tcp
from luce.ipc.tcp import HEARTBEAT, REQUESTS, TOKEN_BYTES, Tls

_log = logging.getLogger(__name__)

#: most connections that have not proved that they have the key, of one address and of all
PER_ADDRESS, PLACES = 8, 32
#: most connections that wait for the other one of their server
MAX_UNPAIRED = 8
#: seconds until the next attempt when a connection cannot be accepted
RETRY_INTERVAL = 1.0
#: seconds between two lines of the log about refused connections
LOG_INTERVAL = 10.0
#: bits of an IPv6 address that name a network: a host may have all the others
_NETWORK_BITS = 64


class Gate(Protocol):
    """Decides which connections get in."""

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS settings of the next connection."""

    def admit(self, sock: ssl.SSLSocket, host: str) -> bool:
        """Whether a connection from `host` goes on after its handshake; if not, it has been answered.

        Raises OSError to refuse it. Called on a thread of the connection, while it holds a place.
        """


@contextlib.contextmanager
def accept_servers(listener: socket.socket, tls: Tls) -> Iterator[Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]]:
    """The request and heartbeat connections of one server after another. The caller closes them."""
    with accept_connections(listener, tls) as arrivals:
        yield pair_up(arrivals)


@contextlib.contextmanager
def accept_connections(listener: socket.socket, gate: Gate) -> Iterator[queue.SimpleQueue[Arrival]]:
    """The connections that the gate lets in. The caller closes those that it takes; the context closes the others.

    Each handshake runs on a thread of its own, so a peer that stays silent does not delay others.
    """
    arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
    closing = threading.Event()
    arguments = listener, gate, arrivals, closing
    accepting = threading.Thread(target=_accept, args=arguments, name="luce-accept", daemon=True)
    accepting.start()
    try:
        yield arrivals
    finally:
        closing.set()
        # The thread must not wait on the listener any more when the caller closes it: its number may be used again.
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        _close_all(arrivals)


def _close_all(arrivals: queue.SimpleQueue[Arrival]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            arrivals.get_nowait().sock.close()


def pair_up(arrivals: queue.SimpleQueue[Arrival]) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Pairs of a request and a heartbeat connection with the same token. Closes the oldest of too many single ones."""
    waiting: dict[bytes, Arrival] = {}
    while True:
        arrival = arrivals.get()
        other = waiting.pop(arrival.token, None)
        if other is not None and {other.role, arrival.role} == {REQUESTS, HEARTBEAT}:
            first, second = (other, arrival) if other.role == REQUESTS else (arrival, other)
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


class Places:
    """The connections that have not proved that they have the key, the oldest first. Any thread may call it."""

    def __init__(self) -> None:
        self._taken: dict[ssl.SSLSocket, str] = {}
        self._lock = threading.Lock()

    def take(self, sock: ssl.SSLSocket, host: str) -> None:
        """Give a connection from `host` a place; that of another one if there is none, whose connection ends."""
        network = network_of(host)
        with self._lock:
            counts = Counter(self._taken.values())
            if counts[network] >= PER_ADDRESS:
                self._drop_oldest(network)
            elif len(self._taken) >= PLACES:
                self._drop_oldest(counts.most_common(1)[0][0])
            self._taken[sock] = network

    def give_back(self, sock: ssl.SSLSocket) -> None:
        """The connection is about to be closed, or has shown the certificate.

        Raises ConnectionError if the place has been given to another one.
        """
        with self._lock:
            if self._taken.pop(sock, None) is None:
                raise ConnectionError("too many connections have not proved that they have the key")

    def _drop_oldest(self, network: str) -> None:
        sock = next(sock for sock, of in self._taken.items() if of == network)
        del self._taken[sock]
        with contextlib.suppress(OSError):
            # Wakes the thread of its handshake. Not SSLSocket.shutdown, which would let that thread read on without
            # TLS.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def network_of(host: str) -> str:
    """The address that places are counted by: that of an IPv6 network, as one host may have all of it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))
    return str(address)


class _Refusals:
    """Logs refused connections, but not each of a flood. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0
        self._unsaid = 0

    def say(self, host: str, why: object) -> None:
        with self._lock:
            if time.monotonic() < self._next:
                self._unsaid += 1
                return
            self._next = time.monotonic() + LOG_INTERVAL
            more, self._unsaid = f" ({self._unsaid} more since the last line)" if self._unsaid else "", 0
        _log.warning("a connection from %s is refused: %s%s", host, why, more)


def _accept(
    listener: socket.socket, gate: Gate, arrivals: queue.SimpleQueue[Arrival], closing: threading.Event
) -> None:
    places, refusals = Places(), _Refusals()
    failed = False
    while True:
        try:
            plain, peer = listener.accept()
        except OSError as error:
            if closing.is_set():
                return
            if not failed:
                # There may be no free descriptors, for example. Peers wait until the next attempt.
                _log.error("connections cannot be accepted at present: %s", error.strerror or error)
            failed = True
            closing.wait(RETRY_INTERVAL)
            continue
        failed = False
        host: str = peer[0]
        try:
            sock = _wrap(plain, gate.context)
        except OSError as error:
            # It is gone already.
            refusals.say(host, error)
            plain.close()
            continue
        places.take(sock, host)

        def greet(sock: ssl.SSLSocket = sock, host: str = host) -> None:
            try:
                if (arrival := _greet(sock, host, gate, places)) is None:
                    sock.close()
                else:
                    arrivals.put(arrival)
                    if closing.is_set():
                        # Nobody may take it any more.
                        _close_all(arrivals)
            except OSError as error:
                refusals.say(host, error)
                sock.close()

        try:
            threading.Thread(target=greet, name="luce-greeting", daemon=True).start()
        except RuntimeError as error:
            refusals.say(host, error)
            places.give_back(sock)
            sock.close()


def _wrap(plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """The connection before its handshake. Raises OSError."""
    plain.settimeout(tcp.HANDSHAKE_TIMEOUT)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)


def _greet(sock: ssl.SSLSocket, host: str, gate: Gate, places: Places) -> Arrival | None:
    """The connection, if the gate lets it in, and it says in time who it is; None if it is over. Raises OSError."""
    deadline = time.monotonic() + tcp.HANDSHAKE_TIMEOUT
    try:
        sock.do_handshake()
        goes_on = gate.admit(sock, host)
    except OSError:
        # Its own error is dropped if it has lost its place, which is the reason then.
        places.give_back(sock)
        raise
    places.give_back(sock)
    if not goes_on:
        return None
    greeting = b""
    while len(greeting) < 1 + TOKEN_BYTES:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        part = sock.recv(1 + TOKEN_BYTES - len(greeting))
        if not part:
            raise ConnectionError("it closed the connection")
        greeting += part
    return Arrival(greeting[:1], greeting[1:], sock)
