"""A host's side of a cluster: it joins with a token, stays connected, and serves layers on its devices.

One thread keeps the control connection; the main thread serves one placement after another. The member connects, also
for its devices' connections, so it needs no open port.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from luce import __version__
from luce.cluster import wire
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.discovery import find
from luce.cluster.identity import Identity, flaw, join_context, member_context, pin
from luce.cluster.join_token import JoinToken
from luce.cluster.lent_memory import lent_memory
from luce.cluster.link import Link
from luce.cluster.member_weights import Storage, Weights, locate
from luce.errors import DeviceError, LuceError, UnreachableError, UsageError
from luce.ipc import tcp
from luce.ipc.channel import Channel, ChannelError
from luce.ipc.tcp import HEARTBEAT, REQUESTS, SERVER_TIMEOUT
from luce.log import event
from luce.remote.daemon import Locate
from luce.remote.messages import Load

_log = logging.getLogger("luce.cluster")
#: longest seconds between two attempts to connect, and the share by which they vary: members are back within 5 s once
#: their coordinator has started again
_LONGEST_DELAY, _JITTER = 4.0, 0.2
#: seconds that whoever was found on the local network has to show its certificate: anybody may keep a host waiting
_LAN_SECONDS = 2.0
#: members of a process that has seeded the global generator would come back in step
_SYSTEM = random.SystemRandom()
#: seconds that a member serves its layers when it leaves, unless its user says otherwise
LEAVE_SECONDS = 60.0
#: seconds that its control connection has to end
_END_SECONDS = 2.0
#: reasons of a TLS error with which a coordinator refuses a certificate that it does not know
_UNKNOWN = ("TLSV1_ALERT_UNKNOWN_CA", "TLSV13_ALERT_CERTIFICATE_REQUIRED")


class _Server(msgspec.Struct):
    """The content of server.json: a member's coordinator."""

    addresses: tuple[str, ...]
    #: DER; those that it will have follow the one that it has
    certificates: list[bytes]


class Serve(Protocol):
    """Serves layers of a file over connections until they end; calls `on_loaded` once it has them."""

    def __call__(
        self, requests: socket.socket, heartbeat: socket.socket, locate: Locate, on_loaded: Callable[[], None], /
    ) -> None: ...


@dataclass(frozen=True)
class PinnedCoordinator:
    """The TLS settings of a member, as luce.ipc.tcp.PeerCheck."""

    context: ssl.SSLContext
    #: of the coordinator, DER
    certificates: tuple[bytes, ...]

    @classmethod
    def of(cls, identity: Identity, certificates: Sequence[bytes]) -> PinnedCoordinator:
        """Those with which a member connects to the coordinator with one of these certificates."""
        return cls(member_context(identity, certificates), tuple(certificates))

    def check_peer(self, sock: ssl.SSLSocket) -> None:
        """As in PeerCheck."""
        # The handshake also accepts what the coordinator's key has signed.
        if sock.getpeercert(binary_form=True) not in self.certificates:
            raise ConnectionError("its certificate is not that of the coordinator")


def join(token: JoinToken, files: ClusterFiles, hostname: str) -> None:
    """Make this host a member, and keep the coordinator's certificate. Raises DeviceError and UsageError."""
    identity = files.identity("member.pem")
    problems, seconds = list[str](), tcp.HANDSHAKE_TIMEOUT if token.addresses else _LAN_SECONDS
    for addresses in [token.addresses] if token.addresses else _found(token.pin):
        for address in addresses:
            try:
                certificate = _ask(address, token, identity, hostname, seconds)
            except (OSError, ValueError, ChannelError) as error:
                problems.append(f"{address}: {error}")
            except _ImpostorError as error:
                # It keeps the right server, which may answer by mDNS behind it, from nothing.
                problems.append(str(error))
            else:
                others = tuple(other for other in addresses if other != address)
                files.write("server.json", _Server((address, *others), [certificate]))
                return
    raise DeviceError(f"cannot join cluster {token.cluster}: {'; '.join(problems)}")


class _ImpostorError(Exception):
    """Somebody with another key answers at an address."""


def _found(pin: bytes) -> Iterator[tuple[str, ...]]:
    """As luce.cluster.discovery.find."""
    _log.info("looking for the server on the local network")
    for addresses in find(pin):
        event(_log, "server found", address=",".join(addresses))
        yield addresses


def _ask(address: str, token: JoinToken, identity: Identity, hostname: str, seconds: float) -> bytes:
    """The certificate of the coordinator, which has let this host in. `seconds`: longest until it shows that.

    Raises DeviceError if the token is refused, _ImpostorError, OSError and ChannelError."""
    plain = socket.create_connection(tcp.parse_address(address), timeout=seconds)
    with contextlib.ExitStack() as opened:
        opened.enter_context(plain)
        sock = opened.enter_context(join_context().wrap_socket(plain))
        certificate = sock.getpeercert(binary_form=True) or b""
        if pin(certificate) != token.pin:
            theirs, expected = pin(certificate).hex()[:8], token.pin.hex()[:8]
            raise _ImpostorError(f"{address}: somebody else answers there: key {theirs}, the token says {expected}")
        channel: Channel[wire.Joined | wire.Refused] = Channel(sock, wire.Joined | wire.Refused)
        request = wire.Join(token.id, token.secret, identity.certificate, __version__, hostname)
        channel.send(0, request, timeout=tcp.HANDSHAKE_TIMEOUT)
        _, answer = channel.receive(timeout=tcp.HANDSHAKE_TIMEOUT, limit=0)
        if isinstance(answer, wire.Refused):
            raise DeviceError(f"{address}: the token is refused; `luce cluster token` on that machine makes a new one")
    return certificate


def delays(vary: Callable[[float, float], float] = _SYSTEM.uniform) -> Iterator[float]:
    """Seconds before each attempt to connect: 0, 1, 2, 4, 4 ..., each varied by 20 %."""
    yield 0.0
    delay = 1.0
    while True:
        yield delay * vary(1 - _JITTER, 1 + _JITTER)
        delay = min(2 * delay, _LONGEST_DELAY)


class MemberHost:
    """A member that stays connected and serves layers of models, which `storage` has or gets.

    `leave_seconds`: how long it serves its layers when it leaves, until others have them. `release` frees the weights
    that stay on its devices from one placement to the next one. Raises UsageError if this host has not joined the
    cluster of `files`.
    """

    def __init__(
        self,
        files: ClusterFiles,
        devices: tuple[str, ...],
        storage: Storage,
        serve: Serve,
        leave_seconds: float = LEAVE_SECONDS,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        server = files.read("server.json", _Server)
        if server is None or not server.certificates:
            raise UsageError(f"this machine has not joined cluster {files.name}: give a TOKEN", param="token")
        self._files = files
        self._server = server
        self._identity = files.identity("member.pem")
        self._devices = devices
        self._memory = lent_memory(devices)
        self._storage = storage
        self._serve = serve
        self._release = release
        self._link: Link | None = None
        self._address = server.addresses[0]
        #: whether it leaves, once it is dismissed, and whether it ends
        self._leaving, self._ending = threading.Event(), threading.Event()
        self._leave_seconds = leave_seconds
        self._patience: threading.Timer | None = None
        #: the last that it was assigned to
        self._epoch = 0
        #: those to the devices that the main thread serves
        self._connections: tuple[ssl.SSLSocket, ...] = ()
        #: what the main thread has to do, or the error with which it ends; None: to end
        self._work: queue.SimpleQueue[wire.Find | wire.Assign | wire.Release | DeviceError | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until `leave` or `stop`.

        Raises DeviceError once the coordinator has removed this host, and UsageError if another process serves for it.
        """
        with open(self._files.lock("member.lock", "another luce join"), "rb", buffering=0):
            self._run()

    def _run(self) -> None:
        thread = threading.Thread(target=self._stay_connected, name="luce-control", daemon=True)
        thread.start()
        try:
            while True:
                work = self._work.get()
                if work is None:
                    return
                if isinstance(work, DeviceError):
                    raise work
                if isinstance(work, wire.Release):
                    self._release()
                elif isinstance(work, wire.Find):
                    path, problem = self._storage.find(work.fingerprint, work.streams)
                    if problem:
                        _log.warning("%s", problem)
                    self._post(wire.Found(work.fingerprint, problem, streamed=path is None and not problem))
                else:
                    self._fulfil(work)
        finally:
            self.stop()
            if self._patience is not None:
                self._patience.cancel()
            thread.join(_END_SECONDS)

    def leave(self) -> None:
        """Tell the coordinator that this host leaves, and end `run` once it is dismissed, or can wait no longer. Any
        thread, and a signal handler. Idempotent."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        if self._link is None:
            self.stop()
            return
        self._post(wire.Leaving())
        reason = f"not dismissed within {self._leave_seconds:g} s (--leave-timeout)"
        self._patience = threading.Timer(self._leave_seconds, self._cut_off, (reason,))
        self._patience.daemon = True
        self._patience.start()

    def stop(self) -> None:
        """End all connections, and `run`. Any thread."""
        self._ending.set()
        self._end_connections()
        if (link := self._link) is not None:
            link.close()
        self._work.put(None)

    def _cut_off(self, reason: str) -> None:
        """End although the coordinator may still need this host."""
        if not self._ending.is_set():
            event(_log, "cut off", logging.WARNING, reason=reason)
            self.stop()

    def _end_connections(self) -> None:
        for sock in self._connections:
            with contextlib.suppress(OSError):
                # Not SSLSocket.shutdown, which would let the thread that serves read on without TLS.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _fulfil(self, assigned: wire.Assign) -> None:
        """Serve what the coordinator asks for, until that connection ends."""
        if assigned.epoch < self._epoch:
            # A later placement has begun while this one waited.
            return
        path, problem = self._storage.find(assigned.fingerprint, assigned.streams)
        if problem:
            self._post(wire.Unable(assigned.token, problem))
            return
        event(_log, "assigned", epoch=assigned.epoch, model=str(path or "from the server"))
        pinned = PinnedCoordinator.of(self._identity, self._server.certificates)
        with contextlib.ExitStack() as opened:
            try:
                requests, heartbeat = (
                    opened.enter_context(tcp.connect(self._address, pinned, role + assigned.token))
                    for role in (REQUESTS, HEARTBEAT)
                )
            except OSError as error:
                self._post(wire.Unable(assigned.token, f"it cannot connect: {error}"))
                return
            self._connections = requests, heartbeat
            if self._ending.is_set():
                self._end_connections()

            def is_over() -> bool:
                return _is_over(requests)

            def connect() -> Weights:
                sock = tcp.connect(self._address, pinned, wire.WEIGHTS + assigned.token)
                return Weights(Channel(sock, wire.Weights), is_over)

            def find(load: Load, on_progress: Callable[[float], None]) -> Path:
                try:
                    return locate(path, self._storage, connect, load, on_progress, is_over)
                except UnreachableError:
                    raise
                except LuceError as error:
                    self._post(wire.Unfit(load.fingerprint, str(error)))
                    raise

            self._serve(requests, heartbeat, find, lambda: self._post(wire.Loaded(assigned.epoch)))
        self._connections = ()
        event(_log, "released", epoch=assigned.epoch)

    def _post(self, message: msgspec.Struct) -> None:
        if (link := self._link) is not None:
            link.post(message)

    def _stay_connected(self) -> None:
        try:
            self._reconnect()
        except Exception as error:
            _log.exception("the control connection stopped")
            self._work.put(DeviceError(f"the control connection stopped: {type(error).__name__}: {error}"))

    def _reconnect(self) -> None:
        """One control connection after another, until this member ends."""
        attempts, said = delays(), ""
        while not self._ending.wait(next(attempts)):
            begun = time.monotonic()
            try:
                self._connect_once()
            except (OSError, ValueError, ChannelError, UsageError) as error:
                # Before `_leaving` is read: a host that leaves from now on has no link to say so, and ends at once.
                connected, self._link = self._link is not None, None
                if self._ending.is_set():
                    return
                if self._leaving.is_set():
                    self._cut_off(str(error))
                    return
                if _is_unknown(error):
                    self._work.put(DeviceError("the coordinator does not know this machine: join with a new token"))
                    return
                if str(error) != said:
                    said = str(error)
                    event(_log, "coordinator lost", logging.WARNING, address=self._address, reason=said)
                if connected:
                    # Whoever it may be by then that has a placement for this host: the devices are free meanwhile.
                    self._work.put(wire.Release())
                    if time.monotonic() - begun > _LONGEST_DELAY:
                        attempts, said = delays(), ""

    def _connect_once(self) -> None:
        """One control connection, until it ends. Raises OSError, ChannelError and UsageError."""
        pinned = PinnedCoordinator.of(self._identity, self._server.certificates)
        sock = self._dial(pinned)
        certificate = sock.getpeercert(binary_form=True) or b""
        link = Link(sock, wire.FromCoordinator, self._memory)
        try:
            link.channel.send(0, wire.Hello(__version__, self._devices), timeout=tcp.HANDSHAKE_TIMEOUT)
            self._link = link
            event(_log, "connected", cluster=self._files.name, address=self._address)
            earlier = self._server.certificates.index(certificate)
            if earlier:
                # The coordinator has its new key now.
                self._keep(self._server.certificates[earlier:])
            link.run(self._handle, silence=SERVER_TIMEOUT, pings=False)
        finally:
            link.channel.close()

    def _dial(self, pinned: PinnedCoordinator) -> ssl.SSLSocket:
        problem: OSError | ValueError = ConnectionError("no address")
        for address in self._server.addresses:
            try:
                sock = tcp.connect(address, pinned, wire.CONTROL + bytes(tcp.TOKEN_BYTES))
            except (OSError, ValueError) as error:
                problem = error
                continue
            self._address = address
            return sock
        raise problem

    def _handle(self, message: object) -> None:
        if isinstance(message, wire.Find | wire.Assign):
            if isinstance(message, wire.Assign):
                self._epoch = message.epoch
            # The placement so far is over, also if the end of its connections is still on its way.
            self._end_connections()
            self._work.put(message)
        elif isinstance(message, wire.Release):
            self._work.put(message)
        elif isinstance(message, wire.NewPin):
            if reason := flaw(message.certificate):
                # With it no connection could be made any more.
                raise ChannelError(f"of its new key, {reason}")
            self._keep([*self._server.certificates, message.certificate])
            self._post(wire.Pinned())
        elif isinstance(message, wire.Notice):
            _log.warning("the coordinator says: %s", message.text[:500])
        elif isinstance(message, wire.Leave):
            self.leave()
        elif isinstance(message, wire.Dismissed):
            if message.final:
                self._ending.set()
                self._end_connections()
                text = f"the coordinator has dismissed this machine: {message.reason}"
                self._work.put(None if self._leaving.is_set() else DeviceError(text))
            raise ChannelError(f"it ends the connection: {message.reason}")

    def _keep(self, certificates: list[bytes]) -> None:
        """Pin these certificates of the coordinator, also after a restart. Raises UsageError."""
        self._server = _Server(self._server.addresses, certificates)
        self._files.write("server.json", self._server)


def _is_unknown(error: Exception) -> bool:
    """Whether the coordinator has refused this host's certificate, after the host has seen the coordinator's."""
    cause = error.__cause__ or error
    return isinstance(cause, ssl.SSLError) and cause.reason in _UNKNOWN


def _is_over(requests: socket.socket) -> bool:
    """Whether a connection has ended, over which the server sends nothing before its Load is answered."""
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    return bool(poller.poll(0))
