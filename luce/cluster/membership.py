"""Who is a member, in which state, and what follows from each event. Pure: events and times come in, instructions go
out.

    joining   admitted by a token; it has to connect within PROOF_SECONDS, which proves that it has its key
    idle      connected, without layers: none are asked of it, or its Luce is of another version
    loading   the epoch's placement has devices of it
    serving   it has loaded its layers
    draining  it leaves, and serves its layers until a placement does without them
    lost      its connection has ended
    gone      it has left

A session is one control connection of a member; the latest one counts. An epoch is the number of a placement. A
connection to a member's devices belongs to a session and an epoch, and is closed when either is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["joining", "idle", "loading", "serving", "draining", "lost", "gone"]
#: seconds that a lost member has to come back before the placement does without it
PATIENCE = 20.0
#: seconds in which a host that has joined must connect with its key
PROOF_SECONDS = 60.0


@dataclass
class Member:
    """A host that may connect. Times are monotonic seconds."""

    name: str
    #: DER; the host is who has its key
    certificate: bytes
    label: str
    state: State
    #: since when it is in its state
    since: float
    #: whether it has connected with its key
    proven: bool = False
    #: number of its control connection; None without one
    session: int | None = None
    #: its version, devices and address, as it said when it connected
    luce: str = ""
    devices: tuple[str, ...] = ()
    address: str = ""
    #: whether it has the model file: own, streamed, absent, or "" before it was asked
    file: str = ""
    losses: int = 0
    #: why it is not in use, or why it was lost
    reason: str = ""


# Events.


@dataclass(frozen=True)
class Admitted:
    """A token was redeemed for a host. `name` is what the host calls itself."""

    name: str
    certificate: bytes
    label: str


@dataclass(frozen=True)
class Connected:
    """The host with this certificate has a control connection."""

    certificate: bytes
    session: int
    luce: str
    devices: tuple[str, ...]
    address: str


@dataclass(frozen=True)
class Disconnected:
    """A control connection has ended."""

    session: int
    reason: str


@dataclass(frozen=True)
class Left:
    """A member says that it leaves."""

    session: int


@dataclass(frozen=True)
class Ended:
    """The placement is over: no member serves it any more."""


@dataclass(frozen=True)
class Planned:
    """A new placement has devices of these members."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """The model is loaded on devices of these members alone, not of all for which its placement was planned."""

    members: frozenset[str]


@dataclass(frozen=True)
class Unplaced:
    """The model cannot be loaded on what there is."""


@dataclass(frozen=True)
class Dialled:
    """The server wants a connection to the devices of a member; `token` names the connection."""

    member: str
    token: bytes


@dataclass(frozen=True)
class Arrived:
    """The host with this certificate has made the connection that a token names."""

    certificate: bytes
    token: bytes


@dataclass(frozen=True)
class Searched:
    """A member has looked for the model file; `problem` says why it has none, "" if it has one, or if what it lacks is
    `streamed` to it."""

    session: int
    problem: str
    streamed: bool = False


@dataclass(frozen=True)
class Loaded:
    """A member has loaded its layers of an epoch."""

    session: int
    epoch: int


@dataclass(frozen=True)
class Removed:
    """A member is to be one no longer."""

    member: str


@dataclass(frozen=True)
class Rotated:
    """The coordinator has a new key, which members with these sessions have; the others cannot connect any more."""

    sessions: tuple[int, ...]


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


#: those of a member's control connection
Heard = Disconnected | Left | Searched | Loaded
Event = Admitted | Connected | Ended | Planned | Kept | Unplaced | Dialled | Arrived | Removed | Rotated | Tick | Heard


# Instructions.


@dataclass(frozen=True)
class Save:
    """Write the members and the epoch to the disk, before anything that follows."""


@dataclass(frozen=True)
class Close:
    """End a control connection; `reason` is for the member, `final` if it need not come back."""

    session: int
    reason: str
    final: bool = False


@dataclass(frozen=True)
class Tell:
    """Let a member say something in its log."""

    session: int
    text: str


@dataclass(frozen=True)
class CloseDevices:
    """End the connections to the devices of a member, open or awaited, but not the one that a token names."""

    member: str
    reason: str
    beside: bytes = b""


@dataclass(frozen=True)
class Assign:
    """Ask a member for the connection that a token names."""

    session: int
    epoch: int
    token: bytes


@dataclass(frozen=True)
class Release:
    """Let a member free the weights that it holds for the next placement."""

    session: int


@dataclass(frozen=True)
class Accept:
    """Use the connection that a token names. Without this instruction an arriving connection is closed."""

    token: bytes


@dataclass(frozen=True)
class Refuse:
    """The connection that a token names cannot be had."""

    token: bytes
    reason: str


@dataclass(frozen=True)
class Replan:
    """Place the model anew; `why`: leave, loss, remove or back, what the metrics count it as."""

    why: str
    member: str


@dataclass(frozen=True)
class Withdraw:
    """The Replan that was last asked for is not needed any more."""

    why: str


@dataclass(frozen=True)
class Journal:
    """A line of the log."""

    event: str
    member: str
    reason: str = ""


Instruction = Save | Close | Tell | CloseDevices | Assign | Release | Accept | Refuse | Replan | Withdraw | Journal


@dataclass
class Membership:
    """The members of a cluster. `luce` is the version of the coordinator.

    `replans`: whether the placement changes when one of its members leaves, is removed, or is lost for `patience`
    seconds.
    """

    luce: str
    members: dict[str, Member] = field(default_factory=dict)
    #: number of the last placement
    epoch: int = 0
    #: the members of this placement
    placed: frozenset[str] = frozenset()
    replans: bool = True
    patience: float = PATIENCE
    #: the new placement that is asked for, until it begins
    _asked: Replan | None = None
    #: whether there is none although one was asked for
    _unplaced: bool = False
    #: members that have connected since the model was placed, and were in no placement that was tried
    _newcomers: set[str] = field(default_factory=set)
    #: by token, whose connection is awaited, and its session and epoch
    _awaited: dict[bytes, tuple[str, int, int]] = field(default_factory=dict)

    def usable(self, *, leaving: bool = False) -> list[Member]:
        """The members whose devices can be used, those that joined first in front. `leaving`: also those that leave."""
        connected = [m for m in self.members.values() if m.session is not None]
        staying = [m for m in connected if leaving or m.state != "draining"]
        return [m for m in staying if m.luce == self.luce and m.file != "absent"]

    def by_certificate(self, certificate: bytes) -> Member | None:
        """The member with a certificate."""
        return next((m for m in self.members.values() if m.certificate == certificate), None)

    def by_session(self, session: int) -> Member | None:
        """The member whose control connection this is."""
        return next((m for m in self.members.values() if m.session == session), None)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What follows from an event."""
        if isinstance(event, Heard):
            member = self.by_session(event.session)
            return [] if member is None else self._hear(member, event, now)
        match event:
            case Admitted():
                return self._admit(event, now)
            case Connected():
                return self._connect(event, now)
            case Ended():
                return self._narrow(frozenset(), now)
            case Planned(names):
                return self._plan(names, now)
            case Kept(names):
                return self._keep(names, now)
            case Unplaced():
                newcomers = self._newcomers & {member.name for member in self.usable()}
                done = self._keep(frozenset(), now)
                # The wish for the placement that has just failed keeps no later one from being asked for.
                self._unplaced, self._asked = True, None
                return [*done, *(self._ask("back", min(newcomers)) if newcomers else [])]
            case Dialled(name, token):
                return self._dial(name, token, now)
            case Arrived(certificate, token):
                return self._arrive(certificate, token)
            case Removed(name):
                return self._remove([name], "removed")
            case Rotated(sessions):
                away = [name for name, member in self.members.items() if member.session not in sessions]
                return self._remove(away, "it was away when the coordinator's key was rotated")
            case Tick():
                return self._tick(now)

    def _hear(self, member: Member, event: Heard, now: float) -> list[Instruction]:
        """What follows from an event of a member's control connection."""
        match event:
            case Disconnected(_, reason):
                left: State = "gone" if member.state == "draining" else "lost"
                return [*self._lose(member, left, reason, now), *self._miss(now)]
            case Left():
                return self._leave(member, now)
            case Searched(_, problem, streamed):
                member.file = "absent" if problem else "streamed" if streamed else "own"
                if not problem:
                    return []
                done = self._drop_devices(member, problem)
                state: State = "draining" if member.state == "draining" else "idle"
                return [*done, *self._enter(member, state, now, "cannot load", problem)]
            case Loaded(_, epoch):
                current = member.state == "loading" and epoch == self.epoch
                return self._enter(member, "serving", now) if current else []

    def _admit(self, event: Admitted, now: float) -> list[Instruction]:
        known = self.by_certificate(event.certificate)
        if known is not None:
            # The answer to its token was lost, or its coordinator's key has been rotated.
            known.label = event.label or known.label
            return [Save()]
        name, number = event.name, 2
        while name in self.members:
            name, number = f"{event.name}-{number}", number + 1
        self.members[name] = Member(name, event.certificate, event.label, "joining", now)
        return [Save(), Journal("joined", name)]

    def _connect(self, event: Connected, now: float) -> list[Instruction]:
        member = self.by_certificate(event.certificate)
        if member is None:
            return [Close(event.session, "this host is not a member", final=True)]
        done: list[Instruction] = []
        if member.session is not None:
            done += [Close(member.session, "it has connected again"), *self._drop_devices(member, "it connected again")]
        if not member.proven:
            member.proven = True
            done.append(Save())
        back = member.state in ("lost", "gone")
        member.session, member.luce, member.devices = event.session, event.luce, event.devices
        member.address, member.file = event.address, ""
        other = "" if member.luce == self.luce else f"version {member.luce}, here {self.luce}"
        state: State = "loading" if member.name in self.placed and not other else "idle"
        done += self._enter(member, state, now, "back" if back else "connected", other)
        if other:
            return [*done, Tell(event.session, f"this machine is not used: {other}")]
        self._newcomers.add(member.name)
        if self._asked == Replan("loss", member.name):
            self._asked = None
            done.append(Withdraw("loss"))
        waited = self._unplaced or any(m.state == "draining" for m in self.members.values())
        return [*done, *(self._ask("back", member.name) if waited else [])]

    def _lose(self, member: Member, state: State, reason: str, now: float) -> list[Instruction]:
        done = self._drop_devices(member, reason)
        member.session = None
        member.losses += state == "lost"
        return [*done, *self._enter(member, state, now, reason=reason)]

    def _leave(self, member: Member, now: float) -> list[Instruction]:
        if self.replans and member.name in self.placed:
            return [*self._enter(member, "draining", now), *self._ask("leave", member.name)]
        assert member.session is not None
        return [Close(member.session, "it has left", final=True), *self._lose(member, "gone", "it left", now)]

    def _ask(self, why: str, name: str) -> list[Instruction]:
        """Ask for a new placement, because of a member."""
        if self._asked is not None or not self.replans:
            return []
        self._asked = Replan(why, name)
        return [self._asked]

    def _tick(self, now: float) -> list[Instruction]:
        late = [m.name for m in self.members.values() if not m.proven and now - m.since >= PROOF_SECONDS]
        return [*self._remove(late, f"it did not connect within {PROOF_SECONDS:g} s of joining"), *self._miss(now)]

    def _miss(self, now: float) -> list[Instruction]:
        """Ask for a placement without a member that stays away."""
        away = [m for name in sorted(self.placed) if (m := self.members.get(name)) is not None and m.session is None]
        late = [member.name for member in away if now - member.since >= self.patience]
        return self._ask("loss", late[0]) if late else []

    def _plan(self, names: tuple[str, ...], now: float) -> list[Instruction]:
        self.epoch += 1
        self.placed, self._asked = frozenset(names), None
        self._newcomers -= self.placed
        done: list[Instruction] = [Save()]
        for member in self.members.values():
            done += self._drop_devices(member, "its placement is over")
            if member.session is None or member.luce != self.luce or member.state == "draining":
                continue
            if member.name in self.placed:
                done += self._enter(member, "loading", now)
            elif member.state != "idle":
                done += self._enter(member, "idle", now)
        return done

    def _keep(self, names: frozenset[str], now: float) -> list[Instruction]:
        self._unplaced, self._newcomers, done = False, set(), self._narrow(names, now)
        for member in self.members.values():
            if member.state == "draining" and member.name not in names:
                done += self._leave(member, now)
            elif member.session is not None and member.name not in names and member.luce == self.luce:
                done.append(Release(member.session))
        return done

    def _narrow(self, names: frozenset[str], now: float) -> list[Instruction]:
        """The placement has devices of no other members than these."""
        left, done = self.placed - names, list[Instruction]()
        self.placed &= names
        for member in self.members.values():
            if member.name in left and member.state in ("loading", "serving", "draining"):
                done += self._drop_devices(member, "it has no layers")
                if member.state != "draining":
                    done += self._enter(member, "idle", now)
        return done

    def _dial(self, name: str, token: bytes, now: float) -> list[Instruction]:
        member = self.members.get(name)
        if member is None or name not in self.placed:
            return [Refuse(token, "it is not a member" if member is None else "the placement has no devices of it")]
        if member.session is None:
            return [Refuse(token, "it has not connected" if member.state == "joining" else f"it is {member.state}")]
        if member.luce != self.luce:
            return [Refuse(token, member.reason)]
        done = self._drop_devices(member, "the server connects anew", token)
        if member.state not in ("loading", "draining"):
            done += self._enter(member, "loading", now)
        self._awaited[token] = name, member.session, self.epoch
        return [*done, Assign(member.session, self.epoch, token)]

    def _arrive(self, certificate: bytes, token: bytes) -> list[Instruction]:
        member, awaited = self.by_certificate(certificate), self._awaited.get(token)
        if member is None or awaited != (member.name, member.session, self.epoch):
            return []
        return [Accept(token)]

    def _remove(self, names: list[str], reason: str) -> list[Instruction]:
        gone = [member for name in names if (member := self.members.get(name)) is not None]
        done = list[Instruction]()
        for member in gone:
            done += self._drop_devices(member, reason)
            if member.session is not None:
                done.append(Close(member.session, reason, final=True))
            del self.members[member.name]
            done.append(Journal("removed", member.name, reason))
        for member in gone:
            done += self._ask("remove", member.name) if member.name in self.placed else []
        self.placed -= {member.name for member in gone}
        return [Save(), *done] if gone else []

    def _drop_devices(self, member: Member, reason: str, beside: bytes = b"") -> list[Instruction]:
        self._awaited = {token: awaited for token, awaited in self._awaited.items() if awaited[0] != member.name}
        return [CloseDevices(member.name, reason, beside)]

    def _enter(self, member: Member, state: State, now: float, event: str = "", reason: str = "") -> list[Instruction]:
        member.state, member.since, member.reason = state, now, reason
        return [Journal(event or state, member.name, reason)]
