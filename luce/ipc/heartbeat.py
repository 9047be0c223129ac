"""A daemon's heartbeat as the server sees it: a Ping each second, and a daemon that does not respond counts as lost."""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Callable
from typing import Any

from luce.ipc.channel import Channel, ChannelTimeoutError, ProtocolError
from luce.ipc.lifecycle import Ping, Pong
from luce.runtime.device import Memory

_log = logging.getLogger(__name__)

#: seconds between two Pings
INTERVAL = 1.0
#: seconds without a Pong until the log warns, and until the daemon counts as lost
WARN_AFTER = 5.0
LOST_AFTER = 15.0
#: seconds until a daemon without any Pong counts as lost: an interpreter may take long to import its packages
FIRST_WITHIN = 60.0
#: most letters of Pong.request
_NAME_LIMIT = 40


class Heartbeat:
    """Pings a daemon of `devices` devices. For one thread; any thread may read `memory`.

    `name` returns what messages call the daemon; `on_progress` gets the share of its layers that it has loaded, each
    time the share grows.
    """

    def __init__(
        self, name: Callable[[], str], channel: Channel[Pong], devices: int, on_progress: Callable[[float], None]
    ) -> None:
        self._name = name
        self._channel = channel
        self._devices = devices
        self._on_progress = on_progress
        self._last: Pong | None = None
        #: memory of each device as the daemon reported it last; empty before that
        self.memory: tuple[Memory, ...] = ()
        self._warned = False
        #: time.monotonic of the last Pong, or of the start
        self.heard_at = time.monotonic()
        self._next = self.heard_at

    def wait(self, other: Channel[Any] | None) -> bool:
        """Wait up to one interval for a Pong, or for something to receive on the other channel.

        Returns whether the other channel has something. Raises ChannelError if the daemon is lost.
        """
        self.ping()
        poller = select.poll()
        for channel in (self._channel, other):
            if channel is not None:
                poller.register(channel.socket, select.POLLIN)
        poller.poll(1000 * self.due())
        self.receive()
        return other is not None and other.ready()

    def due(self) -> float:
        """Seconds until the next Ping."""
        return max(0.0, self._next - time.monotonic())

    def ping(self) -> None:
        """Send a Ping if one is due. Raises ChannelError if the daemon is lost."""
        now = time.monotonic()
        silence, limit = now - self.heard_at, FIRST_WITHIN if self._last is None else LOST_AFTER
        if silence > limit:
            raise ChannelTimeoutError(f"it has sent no heartbeat for {limit:g} s")
        if silence > WARN_AFTER and self._last is not None and not self._warned:
            self._warned = True
            _log.warning(
                "%s: no heartbeat for %.1f s; the daemon counts as lost after %g s", self._name(), silence, limit
            )
        if now >= self._next:
            self._next = now + INTERVAL
            self._channel.send(0, Ping(), timeout=LOST_AFTER)

    def receive(self) -> None:
        """Receive a Pong if there is one. Raises ChannelError if the daemon is lost."""
        if not self._channel.ready():
            return
        _, pong = self._channel.receive(timeout=LOST_AFTER)
        if not self._is_valid(pong):
            raise ProtocolError("it sent a malformed heartbeat")
        before, self._last, self.heard_at = self._last, pong, time.monotonic()
        self.memory = tuple(Memory(free, total) for free, total in pong.memory)
        if self._warned:
            self._warned = False
            _log.warning("%s: the heartbeat is back", self._name())
        if pong.loaded > (0.0 if before is None else before.loaded):
            self._on_progress(pong.loaded)

    def _is_valid(self, pong: Pong) -> bool:
        valid = pong.requests >= 0 and 0 <= pong.seconds < math.inf and 0 <= pong.loaded <= 1
        valid &= len(pong.memory) in (0, self._devices) and min(map(min, pong.memory), default=0) >= 0
        return valid and len(pong.request) <= _NAME_LIMIT and pong.request.isprintable()

    def last_activity(self) -> str:
        """What the daemon was doing at its last heartbeat, as the end of an error message; empty without any."""
        pong = self._last
        if pong is None:
            return ""
        before = f"; at its last heartbeat, {time.monotonic() - self.heard_at:.1f} s before, it "
        if not pong.requests:
            return f"{before}waited for requests"
        more = f", {100 * pong.loaded:.0f} % of its layers loaded" if 0 < pong.loaded < 1 else ""
        more += f", {pong.requests - 1} more requests waiting" if pong.requests > 1 else ""
        return f"{before}had worked on {pong.request} for {pong.seconds:.1f} s{more}"
