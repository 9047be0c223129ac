"""The service manager's protocol (sd_notify(3)): datagrams of NAME=VALUE lines to `$NOTIFY_SOCKET`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable

from luce.config.environment import environment

_log = logging.getLogger(__name__)

#: variables for one process only; its children must not read them
_PRIVATE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class Notifier:
    """Reports the state of the process to the service manager; does nothing without one.

    `watchdog`: seconds after which the manager kills a silent process, 0 if it does not. Create one, after `inherited`
    has returned: the constructor removes the variables from the environment, so that no child inherits them.
    """

    def __init__(self) -> None:
        address = environment("NOTIFY_SOCKET")
        usec = environment("WATCHDOG_USEC")
        ours = environment("WATCHDOG_PID") in (None, str(os.getpid()))
        self.watchdog = int(usec) / 1e6 if usec and ours else 0.0
        for name in _PRIVATE:
            os.unsetenv(name)
        self._socket: socket.socket | None = None
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, **states: str | int) -> None:
        """One datagram, `READY=1` for `send(READY=1)`. A failure is logged and raises nothing."""
        if self._socket is None:
            return
        text = "\n".join(f"{name}={value}" for name, value in states.items())
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:
            _log.warning("service manager: %s", error.strerror)

    def reloading(self) -> None:
        """A reload begins; `send(READY=1)` ends it."""
        self.send(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)

    async def feed_watchdog(self, stalled: Callable[[], float]) -> None:
        """Notify the watchdog while the event loop runs and the engine makes progress; ends by cancellation.

        `stalled`: seconds without progress.
        """
        while True:
            if stalled() < self.watchdog:
                self.send(WATCHDOG=1)
            await asyncio.sleep(self.watchdog / 2)

    def close(self) -> None:
        """Release the socket."""
        if self._socket is not None:
            self._socket.close()
