"""The server's side of a cluster: hosts that join, members that connect, and connections to their devices.

The membership decides; this does what it says. One thread accepts, one looks at the time, and each member's control
connection has one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import secrets
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial

from luce.cluster import cluster_status, membership, wire
from luce.cluster.addresses import reachable
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.device_calls import DeviceCalls
from luce.cluster.discovery import Announcement
from luce.cluster.gate import ClusterGate, check_hello, member_name
from luce.cluster.identity import Identity, coordinator_context, new_key_pair, pin, read_identity
from luce.cluster.join_token import ID_BYTES, SECRET_BYTES, TokenBook, TokenRecord, encode_token
from luce.cluster.link import Link
from luce.cluster.membership import Member
from luce.cluster.saved_members import read_members, write_members
from luce.cluster.weight_source import WeightSource, WeightStreams
from luce.errors import DeviceError, UsageError
from luce.ipc import tcp
from luce.ipc.accept import Arrival, accept_connections
from luce.ipc.channel import ChannelError
from luce.ipc.heartbeat import LOST_AFTER
from luce.ipc.supervisor import Peer
from luce.ipc.tcp import HEARTBEAT, REQUESTS
from luce.log import event
from luce.remote.device import MEMBER

_log = logging.getLogger("luce.cluster")
#: seconds that members have to store the coordinator's new certificate
_ROTATE_SECONDS = 10.0
#: seconds that members have to find the model file: the fingerprints of many files may have to be taken
_SEARCH_SECONDS = 60.0
#: seconds between two looks at the time
_TICK_INTERVAL = 1.0
#: longest seconds until the accepting thread sees that the coordinator is closed
_POLL_INTERVAL = 0.2


class Coordinator:
    """The coordinator of a cluster, which listens at an address until it is closed.

    Raises UsageError and ListenError. Any thread may call it.
    """

    def __init__(
        self,
        name: str,
        address: str,
        flag: str = "--listen",
        *,
        announce: bool = False,
        replans: bool = True,
        patience: float = membership.PATIENCE,
    ) -> None:
        """`replans`, `patience`: as in Membership."""
        self.files = ClusterFiles(name)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self.files.lock("lock", "another server"))
            self._identity = self.files.identity("coordinator.pem")
            self._tokens = TokenBook(self.files.read("tokens.json", list[TokenRecord]))
            self._membership = read_members(self.files)
            self._membership.replans, self._membership.patience = replans, patience
            listener = opened.enter_context(tcp.listen(address, flag))
            self.addresses = reachable(*listener.getsockname()[:2])
            #: what makes it known on the local network; None: nothing
            self._announcement: Announcement | None = None
            if announce:
                self._announcement = Announcement(self.addresses, pin(self._identity.certificate))
                opened.callback(self._announcement.close)
            self._lock = threading.Condition()
            self._context = self._new_context()
            self._sessions = itertools.count(1)
            #: the connections of members, by session
            self.links: dict[int, Link] = {}
            self._calls = DeviceCalls()
            self._pinned: set[int] = set()
            #: why a new placement is wanted, as the metrics count it; "" if none is
            self.wanted = ""
            self._fingerprint = ""
            #: what members that lack the model file get it from
            self._source: WeightSource | None = None
            #: the members of the placement, with their sessions when it was planned
            self._planned: dict[str, int | None] = {}
            #: of each member of the placement, as wire.MemberStatus.layers
            self._layers: dict[str, list[str]] = {}
            #: all devices of the last placement, and placements since the start by their reason
            self._placement: Mapping[str, range] = {}
            self._replans: Counter[str] = Counter()
            #: what the server knows of its model, None while none is loaded; called without the lock
            self.model_facts: Callable[[], cluster_status.ModelFacts | None] = lambda: None
            self.streams = WeightStreams()
            self._closing = threading.Event()
            gate = ClusterGate(lambda: self._context, self._is_member, self._admit)
            arrivals = opened.enter_context(accept_connections(listener, gate))
            self._threads = [
                threading.Thread(target=self._dispatch, args=(arrivals,), name="luce-cluster", daemon=True),
                threading.Thread(target=self._tick, name="luce-cluster-time", daemon=True),
            ]
            for thread in self._threads:
                thread.start()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End all connections, and stop listening."""
        self._closing.set()
        with self._lock:
            for name in self._calls.members:
                self._close_devices(name, "the coordinator ends")
            for link in self.links.values():
                link.close()
        if self._source is not None:
            # First: who waits for a piece's turn would wait on.
            self._source.close()
        self.streams.close()
        for thread in list(self._threads):
            thread.join()
        self._opened.close()

    # What the commands ask for.

    def new_token(self, seconds: float, label: str = "", *, lan: bool = False) -> str:
        """The text of a new token, which is nowhere else. `lan`: without addresses; the host looks this coordinator up.

        Raises UsageError if too many are open, and for `lan` without an announcement."""
        if lan and self._announcement is None:
            raise UsageError("--lan: the server has to announce itself: --cluster-announce", param="lan")
        issued = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        now = time.time()
        with self._lock:
            self._tokens.issue(issued, now + seconds, label, now)
            self.files.write("tokens.json", self._tokens.records)
            own = pin(self._identity.certificate)
        return encode_token(self.files.name, () if lan else self.addresses, own, issued, now + seconds)

    def status(self) -> wire.Status:
        """The cluster as it is."""
        now, facts = time.monotonic(), self.model_facts()
        with self._lock:
            return wire.Status(
                self.files.name,
                self.addresses,
                self._membership.epoch,
                len(self._tokens.open(time.time())),
                self.streams.sent,
                dict(self._replans),
                tuple(self._status_of(member, now, facts) for member in self._membership.members.values()),
                None if facts is None else facts.plan,
            )

    def remove(self, name: str) -> None:
        """Remove a member, whose connections end at once. Raises UsageError if there is none of the name."""
        with self._lock:
            if name not in self._membership.members:
                known = ", ".join(self._membership.members) or "there are none"
                raise UsageError(f"{name}: no such member; the members: {known}", param="member")
            self._apply(membership.Removed(name))

    def drain(self, name: str) -> None:
        """Let a member leave, as behind SIGTERM. Raises UsageError if it is not connected."""
        with self._lock:
            member = self._membership.members.get(name)
            if member is None or member.session is None:
                connected = ", ".join(m.name for m in self._membership.members.values() if m.session is not None)
                problem = f"{name}: no such member is connected; those that are: {connected or 'none'}"
                raise UsageError(problem, param="member")
            self.links[member.session].post(wire.Leave())

    def want(self, why: str) -> None:
        """Ask for a new placement; `why`: what the metrics count it as."""
        with self._lock:
            self.wanted = self.wanted or why
            self._lock.notify_all()

    def rotate(self) -> tuple[list[str], list[str]]:
        """Have a new key. Members that are connected get its certificate over that connection; the others have to join
        again. Returns the names of both."""
        with self._lock:
            self.files.write("next.pem", new_key_pair())
            following = read_identity(self.files.path / "next.pem")
            self._pinned.clear()
            asked = dict(self.links)
            for link in asked.values():
                link.post(wire.NewPin(following.certificate))
            self._lock.wait_for(lambda: self._pinned >= asked.keys() & self.links.keys(), _ROTATE_SECONDS)
            before = set(self._membership.members)
            self.files.replace("next.pem", "coordinator.pem")
            self._identity = Identity(self.files.path / "coordinator.pem", following.certificate)
            self._apply(membership.Rotated(tuple(self._pinned & self.links.keys())))
            self._context = self._new_context()
            kept = sorted(self._membership.members)
        if self._announcement is not None:
            self._announcement.renew(pin(following.certificate))
        event(_log, "key rotated", members=len(kept))
        return kept, sorted(before - set(kept))

    # What the server asks for.

    def wait_for_members(self, count: int, seconds: float, on_wait: Callable[[int], None] = lambda found: None) -> int:
        """Wait until so many members can be used, for at most so many seconds; returns how many can be used then.

        `on_wait` gets how many can be used, whenever that may have changed. Raises DeviceError if this is closed.
        """
        end = time.monotonic() + seconds
        with self._lock:
            while (found := len(self._membership.usable())) < count and (left := end - time.monotonic()) > 0:
                if self._closing.is_set():
                    raise DeviceError(f"cluster {self.files.name}: closed")
                on_wait(found)
                self._lock.wait(min(left, _TICK_INTERVAL))
            return found

    def take_wanted(self, seconds: float) -> str:
        """Why a new placement is wanted, "" if none is within so many seconds. It is not wanted any more then."""
        with self._lock:
            self._lock.wait_for(lambda: self.wanted, seconds)
            wanted, self.wanted = self.wanted, ""
            return wanted

    def unplaced(self) -> None:
        """The model is on no devices: it fits nowhere. A command for another placement that came meanwhile stays."""
        with self._lock:
            self._layers, self._placement, self.wanted = {}, {}, "command" if self.wanted == "command" else ""
            self._apply(membership.Unplaced())

    @property
    def placed(self) -> frozenset[str]:
        """The members of the placement."""
        with self._lock:
            return self._membership.placed

    @property
    def present(self) -> frozenset[str]:
        """The members that can be used, also those that leave."""
        with self._lock:
            return frozenset(member.name for member in self._membership.usable(leaving=True))

    @property
    def idle(self) -> dict[str, tuple[str, ...]]:
        """The members that can be used and have no layers, with the full names of their devices."""
        with self._lock:
            return {m.name: cluster_status.full_names(m) for m in self._membership.usable() if m.state == "idle"}

    def plan(
        self,
        fingerprint: str,
        source: WeightSource | None = None,
        without: Collection[str] = (),
        why: str = "start",
        only: Collection[str] | None = None,
    ) -> tuple[list[str], Mapping[str, Callable[[str], Peer]]]:
        """Begin a new placement of the model file with this fingerprint, on other members than those of `without` and
        those that leave; or on those of `only`, also if they leave.

        `source`, which is this one's from now on, has the file for members; None: they have it themselves. `why`: what
        the metrics count it as.
        Returns the names of all devices that can be used, and by their place the function that connects to them.
        """
        with self._lock:
            # Members that still serve the last one do not answer.
            self._layers, self.wanted = {}, ""
            self._apply(membership.Ended())
            if self._source is not None:
                self._source.close()
            self._source = source
            self._search(fingerprint, without)
            usable = [member for member in self._membership.usable(leaving=only is not None) if member.file]
            usable = [member for member in usable if only is None or member.name in only]
            self._planned = {member.name: member.session for member in usable}
            self._replans[why] += 1
            self._apply(membership.Planned(tuple(member.name for member in usable)))
            event(_log, "cluster placement", epoch=self._membership.epoch, members=",".join(m.name for m in usable))
            devices = [device for member in usable for device in cluster_status.full_names(member)]
            return devices, {cluster_status.place_of(m.name): partial(self._dial, m.name) for m in usable}

    def keep(self, placement: Mapping[str, range], why: str = "start") -> None:
        """The placement has these devices alone, each with its layers: of members, and of the server itself."""
        with self._lock:
            self._layers = {}
            for device, own in placement.items():
                if device.startswith(MEMBER):
                    name = device.removeprefix(MEMBER).partition("/")[0]
                    self._layers.setdefault(name, []).append(cluster_status.span_text(own))
            self._apply(membership.Kept(frozenset(self._layers)))
            old, new = map(cluster_status.placement_text, (self._placement, placement))
            epoch = self._membership.epoch
            event(_log, "plan taken", epoch=epoch, why=why, old=old, new=new)
            for name, spans in self._layers.items():
                event(_log, "member assigned", member=name, epoch=epoch, layers=",".join(spans))
            self._placement = dict(placement)

    def broken(self, seconds: float) -> tuple[frozenset[str], frozenset[str]]:
        """The members of the placement that cannot have their weights, and those that have been lost since it was
        planned; waits for the first one."""
        with self._lock:
            members = self._membership.members
            self._lock.wait_for(lambda: any(cluster_status.broken_members(members, self._planned)), seconds)
            return cluster_status.broken_members(members, self._planned)

    @property
    def _streams(self) -> bool:
        """Whether members get the weights that they lack."""
        return self._source is not None and self._source.streams

    def _search(self, fingerprint: str, without: Collection[str]) -> None:
        """Let the members look for a model file. Releases the lock while it waits."""
        self._fingerprint = fingerprint
        for member in self._membership.members.values():
            member.file = "absent" if member.name in without else ""
        asked = self._membership.usable(leaving=True)
        for member in asked:
            assert member.session is not None
            self.links[member.session].post(wire.Find(fingerprint, self._streams))
        self._lock.wait_for(lambda: all(m.file or m.session is None for m in asked), _SEARCH_SECONDS)
        for member in asked:
            if not member.file and member.session is not None:
                why = f"it did not say within {_SEARCH_SECONDS:g} s whether it has the model file"
                self._apply(membership.Searched(member.session, why))

    def _dial(self, name: str, label: str) -> Peer:
        """Connect to the devices of a member. Raises DeviceError."""
        token = secrets.token_bytes(tcp.TOKEN_BYTES)
        with self._lock:
            call = self._calls.expect(token, name)
            self._apply(membership.Dialled(name, token))
            session = member.session if (member := self._membership.members.get(name)) is not None else None
        call.done.wait(tcp.HANDSHAKE_TIMEOUT)
        with self._lock:
            if not call.done.is_set() and session in self.links:
                # It counts as lost at once, so that the load that has failed begins again without it.
                self._apply(membership.Disconnected(session, "it does not connect"))
                self.links[session].close()
            return self._calls.take(token, label)

    # What the gate asks.

    def _is_member(self, certificate: bytes) -> bool:
        with self._lock:
            return self._membership.by_certificate(certificate) is not None

    def _admit(self, join: wire.Join, host: str) -> None:
        """Make a member of a host. Raises TokenRefusedError, and UsageError if that cannot be written to the disk."""
        with self._lock:
            record = self._tokens.redeem(join.id, join.secret, join.certificate, time.time())
            # Before the answer: after a crash the token must not let another host in.
            self.files.write("tokens.json", self._tokens.records)
            self._apply(membership.Admitted(member_name(join.hostname), join.certificate, record.label))
            self._context = self._new_context()

    # Threads.

    def _dispatch(self, arrivals: queue.SimpleQueue[Arrival]) -> None:
        while not self._closing.is_set():
            try:
                arrival = arrivals.get(timeout=_POLL_INTERVAL)
            except queue.Empty:
                continue
            if arrival.role == wire.CONTROL:
                thread = threading.Thread(target=self._serve, args=(arrival.sock,), name="luce-member", daemon=True)
                self._threads.append(thread)
                thread.start()
            elif arrival.role in (REQUESTS, HEARTBEAT):
                self._take(arrival)
            elif arrival.role == wire.WEIGHTS:
                self._stream(arrival)
            else:
                arrival.sock.close()

    def _take(self, arrival: Arrival) -> None:
        """A connection to a member's devices has arrived."""
        certificate = arrival.sock.getpeercert(binary_form=True) or b""
        with self._lock:
            accepted = self._apply(membership.Arrived(certificate, arrival.token))
            if not accepted or not self._calls.arrive(arrival.token, arrival.role, arrival.sock):
                arrival.sock.close()

    def _stream(self, arrival: Arrival) -> None:
        """A connection over which a member reads the model file has arrived."""
        certificate = arrival.sock.getpeercert(binary_form=True) or b""
        with self._lock:
            member = self._membership.by_certificate(certificate)
            accepted = self._apply(membership.Arrived(certificate, arrival.token))
            if member is None or not accepted or self._source is None or self._closing.is_set():
                arrival.sock.close()
                return
            self.streams.begin(member.name, arrival.sock, self._source)

    def _serve(self, sock: ssl.SSLSocket) -> None:
        """One member's control connection, from its first message to its end."""
        session, link, reason = next(self._sessions), Link(sock, wire.FromMember), ""
        certificate = sock.getpeercert(binary_form=True) or b""
        with self._lock:
            self.links[session] = link
            if self._closing.is_set():
                link.close()
        try:
            hello = link.receive(wire.Hello, tcp.HANDSHAKE_TIMEOUT)
            check_hello(hello)
            address = sock.getpeername()[0]
            with self._lock:
                self._apply(membership.Connected(certificate, session, hello.luce, hello.devices, address))
            link.run(lambda message: self._heard(session, message), silence=LOST_AFTER, pings=True)
        except (ChannelError, OSError) as error:
            reason = str(error)
        finally:
            with self._lock:
                self.links.pop(session, None)
                self._apply(membership.Disconnected(session, reason or "its connection has failed"))
                self._threads.remove(threading.current_thread())
            link.channel.close()

    def _heard(self, session: int, message: object) -> None:
        with self._lock:
            if isinstance(message, wire.Loaded):
                self._apply(membership.Loaded(session, message.epoch))
            elif isinstance(message, wire.Leaving):
                self._apply(membership.Left(session))
            elif isinstance(message, wire.Found):
                if message.fingerprint == self._fingerprint:
                    self._apply(membership.Searched(session, message.problem[:500], message.streamed))
            elif isinstance(message, wire.Unfit):
                if message.fingerprint == self._fingerprint:
                    self._apply(membership.Searched(session, message.reason[:500] or "it cannot have its weights"))
            elif isinstance(message, wire.Pinned):
                self._pinned.add(session)
                self._lock.notify_all()
            elif isinstance(message, wire.Unable):
                self._calls.fail(message.token, message.reason[:500])

    def _tick(self) -> None:
        while not self._closing.wait(_TICK_INTERVAL):
            with self._lock:
                self._apply(membership.Tick())

    # Under the lock.

    def _apply(self, happened: membership.Event) -> bool:
        """Do what follows from an event; whether it is accepted."""
        accepted = False
        for instruction in self._membership.handle(happened, time.monotonic()):
            match instruction:
                case membership.Save():
                    self._save()
                case membership.Journal(name, member, reason):
                    level = logging.WARNING if name in ("lost", "removed") else logging.INFO
                    epoch = self._membership.epoch
                    event(_log, f"member {name}", level, member=member, epoch=epoch, reason=reason or None)
                case membership.Assign(session, epoch, token):
                    self.links[session].post(wire.Assign(epoch, token, self._fingerprint, self._streams))
                case membership.Release(session):
                    self.links[session].post(wire.Release())
                case membership.Replan(why, member):
                    event(_log, "replan", member=member, epoch=self._membership.epoch, reason=why)
                    self.wanted = self.wanted or why
                case membership.Withdraw(why):
                    self.wanted = "" if self.wanted == why else self.wanted
                case membership.Tell(session, text):
                    self.links[session].post(wire.Notice(text))
                case membership.Accept():
                    accepted = True
                case membership.Refuse(token, reason):
                    self._calls.fail(token, reason)
                case membership.CloseDevices(member, reason, beside):
                    self._close_devices(member, reason, beside)
                case membership.Close(session, reason, final):
                    if (link := self.links.get(session)) is not None:
                        link.dismiss(wire.Dismissed(reason, final))
        self._lock.notify_all()
        return accepted

    def _close_devices(self, name: str, reason: str, beside: bytes = b"") -> None:
        self.streams.end(name)
        self._calls.end(name, reason, beside)

    def _status_of(self, member: Member, now: float, facts: cluster_status.ModelFacts | None) -> wire.MemberStatus:
        link = None if member.session is None else self.links.get(member.session)
        share = self.streams.share(member.name) if member.file == "streamed" else None
        return cluster_status.member_status(member, now, link, self._layers.get(member.name, ()), share, facts)

    def _new_context(self) -> ssl.SSLContext:
        return coordinator_context(self._identity, [m.certificate for m in self._membership.members.values()])

    def _save(self) -> None:
        write_members(self.files, self._membership)
        self._context = self._new_context()
