"""A daemon in a thread of the test's process, whose code a test can change."""

from __future__ import annotations

import logging
import socket
import threading

from luce.remote import daemon


class ThreadedDaemon:
    """A Peer. The daemon sets the log level of this process; `join` sets it back."""

    silence_hint = ""

    def __init__(self, name: str) -> None:
        self.requests, requests = socket.socketpair()
        self.heartbeat, heartbeat = socket.socketpair()
        self._level = logging.getLogger("luce").level
        arguments = {"can_share": True, "server_timeout": 60.0}
        self._thread = threading.Thread(target=daemon.serve, args=(requests, heartbeat), kwargs=arguments, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Its sockets end."""

    def join(self) -> str:
        """As a process."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        logging.getLogger("luce").setLevel(self._level)
        return "it has lied"
