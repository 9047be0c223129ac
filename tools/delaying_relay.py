"""A relay that delays each direction, and what a byte takes through it: `netem` is not in every kernel."""

from __future__ import annotations

import contextlib
import queue
import socket
import statistics
import threading
import time
from collections.abc import Iterator

# Bytes of a ping, and round trips of which the median counts.
_PING, _TRIPS = 64, 50
#: most bytes that are passed on at a time
_READ = 1 << 18


class _Relay:
    """Passes connections on to a target, each byte `delay` seconds later, in both directions.

    A direction has two threads: one that reads, and one that sleeps until it may write. An event loop's timers would be
    up to a millisecond late.
    """

    def __init__(self, target: tuple[str, int], delay: float) -> None:
        self._target, self._delay = target, delay
        self._listening = socket.create_server((target[0], 0))
        self._ends = list[socket.socket]()
        self._threads = list[threading.Thread]()
        self._start(self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: on the target's host."""
        found: tuple[str, int] = self._listening.getsockname()
        return found

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._threads[0].join()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _start(self, run: object, *arguments: object) -> None:
        assert callable(run)
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self._ends.append(near)
                far = socket.create_connection(self._target)
                self._ends.append(far)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for source, end in ((near, far), (far, near)):
                    late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    self._start(self._read, source, late)
                    self._start(self._write, end, late)

    def _read(self, source: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"first"
        while data:
            try:
                data = source.recv(_READ)
            except OSError:
                data = b""
            late.put((time.perf_counter() + self._delay, data))

    def _write(self, target: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = late.get()
                time.sleep(max(0.0, due - time.perf_counter()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)


@contextlib.contextmanager
def delayed(target: tuple[str, int], delay: float) -> Iterator[tuple[str, int]]:
    """The address of a relay on the target's host, which delays each direction by so many seconds."""
    relay = _Relay(target, delay)
    try:
        yield relay.address
    finally:
        relay.close()


@contextlib.contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """The address of a server that sends back what it gets."""

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield "127.0.0.1", server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def ping(address: tuple[str, int]) -> float:
    """Half of the median round trip to an echo, in seconds."""
    found, data = [], bytes(_PING)
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TRIPS):
            began, left = time.perf_counter(), _PING
            connection.sendall(data)
            while left:
                left -= len(connection.recv(left))
            found.append(time.perf_counter() - began)
    return statistics.median(found) / 2
