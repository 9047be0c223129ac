"""The connections to a member's devices, as their supervisor sees them."""

from __future__ import annotations

import socket
import ssl


class MemberPeer:
    """The connections to a member's devices, as luce.ipc.supervisor.Peer."""

    silence_hint = ""

    def __init__(self, requests: ssl.SSLSocket, heartbeat: ssl.SSLSocket) -> None:
        self.requests: socket.socket = requests
        self.heartbeat: socket.socket = heartbeat

    def kill(self) -> None:
        """Nothing to do: the caller closes the sockets, which ends the connection."""

    def join(self) -> str:
        """As in Peer."""
        return "its connection has ended"
