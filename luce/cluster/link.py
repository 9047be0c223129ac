"""One end of a member's control connection."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from luce.cluster.wire import DeviceMemory, Dismissed, Ping, Pong
from luce.ipc.channel import Channel, ChannelError, ChannelTimeoutError
from luce.ipc.heartbeat import INTERVAL, LOST_AFTER

Answer = TypeVar("Answer", bound=msgspec.Struct)
#: longest seconds until a message of another thread is sent
_POLL_INTERVAL = 0.05
#: seconds that the peer has to close the connection behind the last message
CLOSE_SECONDS = 0.5
#: seconds behind which a connection that this side ends is closed in any case
DISMISS_SECONDS = 0.9


class Link:
    """One thread runs it; any thread may post messages and close it. `incoming`: the union of the peer's messages;
    `memory`: what a Pong of this side says."""

    def __init__(
        self, sock: socket.socket, incoming: Any, memory: Callable[[], tuple[DeviceMemory, ...]] = lambda: ()
    ) -> None:
        self.channel: Channel[Any] = Channel(sock, incoming)
        self._outgoing: queue.SimpleQueue[msgspec.Struct] = queue.SimpleQueue()
        #: seconds from the last Ping to its Pong; None before that
        self.round_trip: float | None = None
        #: as the peer's last Pong has it
        self.memory: tuple[DeviceMemory, ...] = ()
        self._own_memory = memory

    def receive(self, kind: type[Answer], timeout: float) -> Answer:
        """The first message, of a type. Raises ChannelError."""
        _, message = self.channel.receive(timeout=timeout)
        if not isinstance(message, kind):
            raise ChannelError(f"it sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def post(self, message: msgspec.Struct) -> None:
        """Let the link's thread send a message soon. Dismissed ends the connection."""
        self._outgoing.put(message)

    def dismiss(self, message: Dismissed) -> None:
        """As `post`; the connection ends in time also if the peer does not let this side read or send."""
        self.post(message)
        timer = threading.Timer(DISMISS_SECONDS, self.close)
        timer.daemon = True
        timer.start()

    def flush(self) -> None:
        """Send what has been posted. Raises ChannelError."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._outgoing.get_nowait()
                self.channel.send(0, message, timeout=LOST_AFTER)
                if isinstance(message, Dismissed):
                    self._let_close()

    def _let_close(self) -> None:
        """Wait a moment for the peer to close the connection: closed here with bytes unread, it would be reset, and a
        peer that sends before it reads would not get the last message."""
        end = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(ChannelError):
            while time.monotonic() < end:
                if self.channel.ready(_POLL_INTERVAL):
                    self.channel.receive(timeout=CLOSE_SECONDS)
        self.close()

    def run(self, handle: Callable[[Any], None], *, silence: float, pings: bool) -> None:
        """Send what is posted, and handle what arrives, until the connection ends, which raises ChannelError.

        `silence`: seconds without a message after which the peer counts as lost. `pings`: whether this side sends Ping.
        """
        heard = time.monotonic()
        due = heard if pings else float("inf")
        pinged = heard
        while True:
            now = time.monotonic()
            if now >= due:
                due, pinged = now + INTERVAL, now
                self.channel.send(0, Ping(), timeout=LOST_AFTER)
            self.flush()
            if self.channel.ready(_POLL_INTERVAL):
                _, message = self.channel.receive(timeout=silence)
                heard = time.monotonic()
                if isinstance(message, Pong):
                    self.round_trip, self.memory = heard - pinged, message.memory
                elif isinstance(message, Ping):
                    self.post(Pong(self._own_memory()))
                else:
                    handle(message)
            elif now - heard > silence:
                raise ChannelTimeoutError(f"it has been silent for {silence:g} s")

    def close(self) -> None:
        """End the connection, which ends `run`."""
        self.channel.shutdown()
