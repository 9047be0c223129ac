"""Connections to the devices of members, awaited and open. Under the coordinator's lock, but for Call.done."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from dataclasses import dataclass, field

from luce.cluster.member_peer import MemberPeer
from luce.errors import DeviceError
from luce.ipc.tcp import HEARTBEAT, REQUESTS


@dataclass
class Call:
    """A connection to a member's devices that the server waits for."""

    member: str
    #: it is there, or cannot be had
    done: threading.Event = field(default_factory=threading.Event)
    sockets: dict[bytes, ssl.SSLSocket] = field(default_factory=dict)
    error: str = ""


class DeviceCalls:
    """Connections by the token that names them, while they are awaited, and the last one of each member."""

    def __init__(self) -> None:
        self._calls: dict[bytes, Call] = {}
        self._open: dict[str, list[socket.socket]] = {}

    def expect(self, token: bytes, member: str) -> Call:
        """Wait for the two connections that a token names."""
        self._calls[token] = call = Call(member)
        return call

    def take(self, token: bytes, label: str) -> MemberPeer:
        """The connections that a token names, which is awaited no longer. Raises DeviceError if they are not there."""
        call = self._calls.pop(token)
        if call.error or len(call.sockets) < 2:
            for sock in call.sockets.values():
                sock.close()
            raise DeviceError(f"{label}: member {call.member}: {call.error or 'it does not connect'}")
        requests, heartbeat = call.sockets[REQUESTS], call.sockets[HEARTBEAT]
        # Descriptors of their own: those of the sockets may be closed, and used again, at any time.
        self._open[call.member] = [socket.socket(fileno=os.dup(sock.fileno())) for sock in (requests, heartbeat)]
        return MemberPeer(requests, heartbeat)

    def arrive(self, token: bytes, role: bytes, sock: ssl.SSLSocket) -> bool:
        """One of the connections that a token names has arrived; False if nobody waits for it."""
        call = self._calls.get(token)
        if call is None or role in call.sockets:
            return False
        call.sockets[role] = sock
        if len(call.sockets) == 2:
            call.done.set()
        return True

    def fail(self, token: bytes, reason: str) -> None:
        """The connections that a token names cannot be had."""
        if (call := self._calls.get(token)) is not None:
            call.error = reason
            call.done.set()

    def end(self, member: str, reason: str, beside: bytes = b"") -> None:
        """End the connections to a member's devices, open or awaited, but not those that the token `beside` names."""
        for token, call in self._calls.items():
            if call.member == member and token != beside:
                self.fail(token, reason)
        for sock in self._open.pop(member, ()):
            with sock, contextlib.suppress(OSError):
                # Wakes the threads that use the connection.
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def members(self) -> list[str]:
        """The members with open connections."""
        return list(self._open)
