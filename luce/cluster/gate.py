"""Who gets through the coordinator's port: members by their certificate, and hosts that join by a token.

Everybody whose token is refused gets the same answer after the same time; the log has the reason.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import time
from collections.abc import Callable

from luce.cluster.identity import JOIN_PROTOCOL, MEMBER_PROTOCOL, flaw
from luce.cluster.join_token import RefusalLimit, TokenRefusedError
from luce.cluster.wire import Hello, Join, Joined, Refused
from luce.errors import UsageError
from luce.ipc import tcp
from luce.ipc.accept import network_of
from luce.ipc.channel import Channel, ChannelError
from luce.log import event

_log = logging.getLogger("luce.cluster")
#: seconds until a refusal is answered
REFUSAL_DELAY = 0.5
#: most bytes of a certificate, and letters of a version
_LONGEST_CERTIFICATE, _LONGEST_VERSION = 4096, 64
#: most devices that a member may have
_MOST_DEVICES = 64
_DEVICE = re.compile(r"(cuda|hip|cpu):(0|[1-9][0-9]{0,2})", re.ASCII)


class ClusterGate:
    """As luce.ipc.accept.Gate. `context` returns the TLS settings with the members' certificates, `is_member` whether a
    certificate (DER) is that of a member; `admit_host` makes a member of a host, and raises TokenRefusedError. Their
    callers hold no lock.
    """

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        is_member: Callable[[bytes], bool],
        admit_host: Callable[[Join, str], None],
    ) -> None:
        self._context = context
        self._is_member = is_member
        self._admit_host = admit_host
        self._limit = RefusalLimit()
        self._lock = threading.Lock()

    @property
    def context(self) -> ssl.SSLContext:
        """As in Gate."""
        return self._context()

    def admit(self, sock: ssl.SSLSocket, host: str) -> bool:
        """As in Gate: a member's connection goes on; that of a host that joins is over with its answer."""
        protocol, certificate = sock.selected_alpn_protocol(), sock.getpeercert(binary_form=True)
        if protocol == MEMBER_PROTOCOL:
            # The handshake also accepts what a member's key has signed.
            if certificate is None or not self._is_member(certificate):
                raise ConnectionError("its certificate is not that of a member")
            return True
        if protocol != JOIN_PROTOCOL:
            raise ConnectionError("it speaks neither the protocol of members nor that of joining")
        with self._lock:
            if self._limit.blocks(network_of(host), time.monotonic()):
                raise ConnectionError("tokens from this address have been refused too often")
        self._answer(sock, host)
        return False

    def _answer(self, sock: ssl.SSLSocket, host: str) -> None:
        """Receive Join, and answer it. Raises OSError."""
        channel: Channel[Join] = Channel(sock, Join)
        try:
            number, join = channel.receive(timeout=tcp.HANDSHAKE_TIMEOUT, limit=0)
            try:
                _check(join)
                self._admit_host(join, host)
            except TokenRefusedError as error:
                with self._lock:
                    self._limit.note(network_of(host), time.monotonic())
                event(_log, "join refused", logging.WARNING, address=host, reason=str(error))
                time.sleep(REFUSAL_DELAY)
                channel.send(number, Refused(), timeout=tcp.HANDSHAKE_TIMEOUT)
            else:
                channel.send(number, Joined(), timeout=tcp.HANDSHAKE_TIMEOUT)
        except (ChannelError, UsageError) as error:
            raise ConnectionError(str(error)) from error


def _check(join: Join) -> None:
    """Raises TokenRefusedError for a request that no `luce join` sends."""
    if len(join.certificate) > _LONGEST_CERTIFICATE or len(join.luce) > _LONGEST_VERSION:
        raise TokenRefusedError("the request is too large")
    if reason := flaw(join.certificate):
        raise TokenRefusedError(reason)


def check_hello(hello: Hello) -> None:
    """Raises ChannelError for what no member says of itself."""
    if len(hello.devices) > _MOST_DEVICES or not all(map(_DEVICE.fullmatch, hello.devices)):
        raise ChannelError("it sent devices that are none")
    if len(set(hello.devices)) < len(hello.devices):
        raise ChannelError("it sent a device twice")
    if len(hello.luce) > _LONGEST_VERSION:
        raise ChannelError("it sent a version that is none")


def member_name(hostname: str) -> str:
    """The name of a member by what its host calls itself."""
    name = re.sub(r"[^a-z0-9-]+", "-", hostname.partition(".")[0].lower()).strip("-")[:24]
    return name or "member"
