"""The membership: its rules in order, and what holds whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from luce.cluster.membership import (
    PATIENCE,
    PROOF_SECONDS,
    Accept,
    Admitted,
    Arrived,
    Assign,
    Close,
    CloseDevices,
    Connected,
    Dialled,
    Disconnected,
    Ended,
    Event,
    Instruction,
    Journal,
    Kept,
    Left,
    Loaded,
    Membership,
    Planned,
    Refuse,
    Release,
    Removed,
    Replan,
    Rotated,
    Save,
    Searched,
    Tell,
    Tick,
    Unplaced,
    Withdraw,
)
from luce.cluster.saved_members import restored

BOX, DEN = b"certificate of box", b"certificate of den"


def connected(certificate: bytes, session: int, luce: str = "1") -> Connected:
    return Connected(certificate, session, luce, ("cpu:0",), "10.0.0.2")


def after(*events: Event) -> tuple[Membership, list[Instruction]]:
    """A membership after events, and what followed from the last one."""
    membership, last = Membership("1"), list[Instruction]()
    for event in events:
        last = membership.handle(event, 0.0)
    return membership, last


SERVING = (
    Admitted("box", BOX, "attic"),
    connected(BOX, 1),
    Planned(("box",)),
    Dialled("box", b"token"),
    Loaded(1, 1),
)


def test_from_joining_to_serving() -> None:
    states = []
    membership = Membership("1")
    for event in SERVING:
        instructions = membership.handle(event, 0.0)
        states.append(membership.members["box"].state)
    assert states == ["joining", "idle", "loading", "loading", "serving"]
    assert instructions == [Journal("serving", "box")] and membership.epoch == 1
    assert after(*SERVING[:3])[1][0] == Save() and after(*SERVING[:1])[1][0] == Save()
    assert after(*SERVING[:4])[1][-1] == Assign(1, 1, b"token")


def test_a_member_that_is_lost_and_comes_back() -> None:
    membership, lost = after(*SERVING, Disconnected(1, "it is silent"))
    member = membership.members["box"]
    assert CloseDevices("box", "it is silent") in lost and Journal("lost", "box", "it is silent") in lost
    assert (member.state, member.losses, member.session) == ("lost", 1, None)
    assert membership.handle(Dialled("box", b"next"), 1.0) == [Refuse(b"next", "it is lost")]
    assert Journal("back", "box") in membership.handle(connected(BOX, 2), 2.0)
    assert Assign(2, 1, b"next") in membership.handle(Dialled("box", b"next"), 3.0)
    # What the earlier connection said late changes nothing.
    assert membership.handle(Loaded(1, 1), 4.0) == membership.handle(Disconnected(1, "late"), 4.0) == []
    assert member.state == "loading"


def test_a_member_that_leaves_serves_until_others_have_its_layers() -> None:
    membership, left = after(*SERVING, Left(1))
    member = membership.members["box"]
    assert left == [Journal("draining", "box"), Replan("leave", "box")] and member.state == "draining"
    # It says it once, and is asked for nothing new.
    assert membership.handle(Left(1), 0.0) == [Journal("draining", "box")]
    assert membership.usable() == [] and membership.usable(leaving=True) == [member]
    assert CloseDevices("box", "it has no layers") in membership.handle(Ended(), 0.0)
    membership.handle(Planned(()), 0.0)
    assert member.state == "draining" and member.session == 1
    done = membership.handle(Kept(frozenset()), 0.0)
    assert Close(1, "it has left", final=True) in done and Journal("gone", "box", "it left") in done
    assert (member.state, member.losses, member.session) == ("gone", 0, None)


def test_a_member_that_leaves_goes_on_where_the_model_fits_nowhere_else() -> None:
    membership, _ = after(*SERVING, Left(1), Ended(), Planned(("box",)))
    assert Assign(1, 2, b"again") in membership.handle(Dialled("box", b"again"), 0.0)
    membership.handle(Loaded(1, 2), 0.0)
    assert membership.handle(Kept(frozenset({"box"})), 0.0) == []
    assert membership.members["box"].state == "draining"
    # Whoever comes may have room for its layers.
    membership.handle(Admitted("den", DEN, ""), 0.0)
    assert membership.handle(connected(DEN, 2), 0.0)[-1] == Replan("back", "den")
    # It is cut off in the end, which is no loss.
    assert Journal("gone", "box", "closed") in membership.handle(Disconnected(1, "closed"), 0.0)
    assert membership.members["box"].losses == 0


def test_only_members_without_layers_free_what_they_hold() -> None:
    membership, _ = after(*SERVING, Admitted("den", DEN, ""))
    membership.handle(connected(DEN, 2), 0.0)
    assert membership.handle(Kept(frozenset({"box"})), 0.0) == [Release(2)]
    # While a new placement begins they hold it: that may need it.
    assert Release(1) not in membership.handle(Ended(), 0.0)
    assert Release(1) not in membership.handle(Planned(("box", "den")), 0.0)
    assert Release(1) in membership.handle(Unplaced(), 0.0)


def test_a_member_without_layers_leaves_at_once() -> None:
    for events, replans in ((SERVING[:2], True), (SERVING, False), ((*SERVING, Kept(frozenset())), True)):
        membership, _ = after(*events)
        membership.replans = replans
        left = membership.handle(Left(1), 0.0)
        assert left[0] == Close(1, "it has left", final=True) and left[-1] == Journal("gone", "box", "it left")
        assert membership.members["box"].losses == 0


def test_the_placement_does_without_a_member_that_stays_away() -> None:
    membership, _ = after(*SERVING, Disconnected(1, "it is silent"))
    assert membership.handle(Tick(), PATIENCE - 0.1) == []
    assert membership.handle(Tick(), PATIENCE) == [Replan("loss", "box")]
    # Once, until that has begun.
    assert membership.handle(Tick(), PATIENCE + 1) == []
    membership.handle(Planned(()), PATIENCE + 2)
    assert membership.handle(Tick(), 3 * PATIENCE) == []
    # One that is back before that keeps its layers.
    membership, _ = after(*SERVING, Disconnected(1, "it is silent"))
    assert membership.handle(Tick(), PATIENCE) == [Replan("loss", "box")]
    assert Withdraw("loss") in membership.handle(connected(BOX, 2), PATIENCE)
    membership.handle(Disconnected(2, "it is silent"), PATIENCE)
    assert membership.handle(Tick(), 2 * PATIENCE) == [Replan("loss", "box")]
    # Another reason is not withdrawn with it.
    membership, _ = after(*SERVING, Left(1), Disconnected(1, "it is silent"))
    assert Withdraw("loss") not in membership.handle(connected(BOX, 2), 0.0)
    # One that is back in time keeps its layers.
    membership, _ = after(*SERVING, Disconnected(1, "it is silent"), connected(BOX, 2))
    assert membership.handle(Tick(), 2 * PATIENCE) == [] and membership.members["box"].state == "loading"
    for patience, replans, found in ((0.0, True, [Replan("loss", "box")]), (PATIENCE, False, [])):
        membership, _ = after(*SERVING, Disconnected(1, "it is silent"))
        membership.patience, membership.replans = patience, replans
        assert membership.handle(Tick(), 0.0 if replans else 1e6) == found
    # Without patience at once, not at the next look at the time.
    membership, _ = after(*SERVING)
    membership.patience = 0.0
    assert membership.handle(Disconnected(1, "it is silent"), 5.0)[-1] == Replan("loss", "box")


def test_a_model_that_fits_nowhere_is_placed_once_a_member_comes() -> None:
    membership, _ = after(*SERVING, Disconnected(1, "it is silent"), Ended(), Planned(()))
    assert Unplaced() and membership.handle(Unplaced(), 0.0) == []
    done = membership.handle(connected(BOX, 2), 0.0)
    assert done[-1] == Replan("back", "box")
    membership.handle(Planned(("box",)), 0.0)
    membership.handle(Kept(frozenset({"box"})), 0.0)
    # It is placed.
    assert not any(isinstance(i, Replan) for i in membership.handle(connected(BOX, 3), 0.0))
    # One of another version is no help.
    membership, _ = after(*SERVING, Ended(), Planned(()), Unplaced())
    assert not any(isinstance(i, Replan) for i in membership.handle(connected(BOX, 2, "2"), 0.0))


def test_what_comes_while_a_model_finds_no_place_is_tried_too() -> None:
    # What was asked for meanwhile keeps no later one from being asked for.
    membership, left = after(*SERVING, Left(1))
    assert left[-1] == Replan("leave", "box")
    membership.handle(Unplaced(), 0.0)
    assert membership.members["box"].state == "gone"
    membership.handle(Admitted("den", DEN, ""), 0.0)
    assert membership.handle(connected(DEN, 2), 0.0)[-1] == Replan("back", "den")
    # One that has come too late for the placement, or was not in it.
    came = Admitted("den", DEN, ""), connected(DEN, 2)
    for events in (
        (*came, Unplaced()),
        (*came, Planned(("box",)), Unplaced()),
        (Disconnected(1, ""), connected(BOX, 2), Unplaced()),
    ):
        membership, done = after(*SERVING, *events)
        name = "box" if BOX in [getattr(event, "certificate", b"") for event in events] else "den"
        assert done[-1] == Replan("back", name)
        # Once.
        membership.handle(Planned((name,)), 0.0)
        assert not any(isinstance(i, Replan) for i in membership.handle(Unplaced(), 0.0))
    # Not one that was in it, cannot load it, is gone again, or came to a model that has found a place since.
    for events in (
        (*came, Planned(("box", "den"))),
        (*came, Searched(2, "no such file")),
        (*came, Disconnected(2, "")),
        (*came, Kept(frozenset({"box"}))),
    ):
        _, done = after(*SERVING, *events, Unplaced())
        assert not any(isinstance(i, Replan) for i in done)


def test_a_connection_counts_only_with_its_token_session_and_epoch() -> None:
    for between, accepted in (
        ((), True),
        ((Planned(("box",)),), False),
        ((Disconnected(1, ""), connected(BOX, 2)), False),
        ((connected(BOX, 2),), False),
        ((Dialled("box", b"newer"),), False),
        ((Removed("box"),), False),
        ((Kept(frozenset()),), False),
    ):
        events = (*SERVING[:4], *between, Arrived(BOX, b"token"))
        assert after(*events)[1] == ([Accept(b"token")] if accepted else [])
    both = (Admitted("den", DEN, ""), connected(DEN, 2), *SERVING[:4])
    assert after(*both, Arrived(DEN, b"token"))[1] == after(*both, Arrived(BOX, b"other"))[1] == []


def test_a_removed_member_is_dismissed_and_a_stranger_then() -> None:
    membership, done = after(*SERVING, Removed("box"))
    assert done == [
        Save(),
        CloseDevices("box", "removed"),
        Close(1, "removed", final=True),
        Journal("removed", "box", "removed"),
        Replan("remove", "box"),
    ]
    assert membership.handle(connected(BOX, 2), 0.0) == [Close(2, "this host is not a member", final=True)]
    assert membership.handle(Dialled("box", b"next"), 0.0) == [Refuse(b"next", "it is not a member")]


def test_who_does_not_show_its_key_in_time_is_no_member() -> None:
    for seconds, proven, kept in ((59.9, False, True), (PROOF_SECONDS, False, False), (1e9, True, True)):
        membership, _ = after(Admitted("box", BOX, ""), *[connected(BOX, 1), Disconnected(1, "")][: 2 * proven])
        membership.handle(Tick(), seconds)
        assert ("box" in membership.members) == kept


def test_rotation_removes_those_that_do_not_have_the_new_key() -> None:
    membership, done = after(Admitted("den", DEN, ""), connected(DEN, 2), *SERVING, Rotated((2,)))
    assert list(membership.members) == ["den"] and done[0] == Save()


def test_another_version_and_a_missing_file_are_not_used() -> None:
    membership, done = after(Admitted("box", BOX, ""), connected(BOX, 1, "2"))
    assert done[-1] == Tell(1, "this machine is not used: version 2, here 1")
    assert membership.members["box"].reason == "version 2, here 1" and membership.usable() == []
    membership.handle(Planned(("box",)), 0.0)
    assert membership.handle(Dialled("box", b"token"), 0.0) == [Refuse(b"token", "version 2, here 1")]
    membership, _ = after(*SERVING[:2], Searched(1, "no such file"))
    assert (membership.members["box"].file, membership.members["box"].reason) == ("absent", "no such file")
    assert membership.usable() == []
    membership.handle(Searched(1, ""), 0.0)
    assert membership.usable() == [membership.members["box"]]


def test_names_are_unique_and_a_certificate_has_one() -> None:
    membership, _ = after(Admitted("box", BOX, "old"), Admitted("box", DEN, ""), Admitted("other", BOX, "new"))
    assert [(m.name, m.label) for m in membership.members.values()] == [("box", "new"), ("box-2", "")]


def test_a_coordinator_that_starts_again_knows_its_members() -> None:
    before, _ = after(*SERVING)
    again = restored("1", list(before.members.values()), before.epoch, 7.0)
    member = again.members["box"]
    assert (again.epoch, member.state, member.session, member.proven) == (1, "joining", None, True)
    assert again.handle(Tick(), 1e9) == []
    again.handle(connected(BOX, 9), 8.0)
    assert member.state == "idle"


CERTIFICATES = st.sampled_from([BOX, DEN, b"certificate of nobody"])
NAMES = st.sampled_from(["box", "den", "box-2"])
SESSIONS = st.integers(1, 12)


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, against a record of what the instructions have allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership("1")
        self.now, self.sessions, self.tokens, self.epoch = 0.0, 0, 0, 0
        #: by token, the certificate that may use it, from Assign until something closes it
        self.live: dict[bytes, bytes] = {}
        self.members: dict[str, bytes] = {}
        #: sessions that are over
        self.over: set[int] = set()

    def happen(self, event: Event) -> list[Instruction]:
        self.members = {name: m.certificate for name, m in self.membership.members.items()}
        done = self.membership.handle(event, self.now)
        for instruction in done:
            if isinstance(instruction, CloseDevices):
                certificate = self.members[instruction.member]
                self.live = {t: c for t, c in self.live.items() if c != certificate or t == instruction.beside}
            elif isinstance(instruction, Close):
                self.over.add(instruction.session)
            elif isinstance(instruction, Assign):
                member = self.membership.by_session(instruction.session)
                assert member is not None and member.luce == "1" and instruction.session not in self.over
                assert member.name in self.membership.placed and instruction.epoch == self.membership.epoch
                self.live[instruction.token] = member.certificate
        return done

    @rule(name=NAMES, certificate=CERTIFICATES)
    def admit(self, name: str, certificate: bytes) -> None:
        assert self.happen(Admitted(name, certificate, ""))[0] == Save()

    @rule(certificate=CERTIFICATES, luce=st.sampled_from(["1", "1", "2"]))
    def connect(self, certificate: bytes, luce: str) -> None:
        self.sessions += 1
        known = certificate in {m.certificate for m in self.membership.members.values()}
        done = self.happen(connected(certificate, self.sessions, luce))
        assert (Close(self.sessions, "this host is not a member", final=True) in done) != known

    @rule(session=SESSIONS, left=st.booleans())
    def disconnect(self, session: int, left: bool) -> None:
        # A number that no connection has yet will be that of a later one.
        session = min(session, self.sessions)
        self.happen(Left(session) if left else Disconnected(session, "gone"))
        if not left:
            self.over.add(session)

    @rule(names=st.sets(NAMES))
    def plan(self, names: set[str]) -> None:
        self.happen(Planned(tuple(names)))
        assert self.membership.epoch == self.epoch + 1
        self.epoch += 1
        assert not self.live, "no connection outlives its placement"

    @rule(names=st.sets(NAMES))
    def keep(self, names: set[str]) -> None:
        self.happen(Kept(frozenset(names)))
        assert all(m.name in names for m in self.membership.members.values() if m.state == "draining")

    @rule(unplaced=st.booleans())
    def end(self, unplaced: bool) -> None:
        self.happen(Unplaced() if unplaced else Ended())
        assert not self.membership.placed and not self.live

    @rule(name=NAMES)
    def dial(self, name: str) -> None:
        self.tokens += 1
        token = str(self.tokens).encode()
        done = self.happen(Dialled(name, token))
        # Whoever waits for the connection hears of it.
        assert len([i for i in done if isinstance(i, Assign | Refuse) and i.token == token]) == 1

    @rule(certificate=CERTIFICATES, number=st.integers(1, 12))
    def arrive(self, certificate: bytes, number: int) -> None:
        token = str(number).encode()
        allowed = self.live.get(token) == certificate
        assert self.happen(Arrived(certificate, token)) == ([Accept(token)] if allowed else [])

    @rule(session=SESSIONS, epoch=st.integers(0, 6))
    def load(self, session: int, epoch: int) -> None:
        done = self.happen(Loaded(session, epoch))
        assert not done or epoch == self.epoch

    @rule(session=SESSIONS, problem=st.sampled_from(["", "no file"]))
    def search(self, session: int, problem: str) -> None:
        self.happen(Searched(session, problem))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.happen(Removed(name))
        assert name not in self.membership.members

    @rule(sessions=st.sets(SESSIONS))
    def rotate(self, sessions: set[int]) -> None:
        self.happen(Rotated(tuple(sessions)))
        assert all(member.session in sessions for member in self.membership.members.values())

    @rule(seconds=st.sampled_from([1.0, PATIENCE, PROOF_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.happen(Tick())
        assert all(m.proven or self.now - m.since < PROOF_SECONDS for m in self.membership.members.values())

    @invariant()
    def a_session_is_one_members(self) -> None:
        sessions = [m.session for m in self.membership.members.values() if m.session is not None]
        assert len(sessions) == len(set(sessions)) and self.over.isdisjoint(sessions)

    @invariant()
    def only_connected_members_work(self) -> None:
        for member in self.membership.members.values():
            assert (member.session is None) == (member.state in ("joining", "lost", "gone"))
            if member.state in ("loading", "serving"):
                assert member.luce == "1" and member.name in self.membership.placed

    @invariant()
    def the_epoch_only_grows(self) -> None:
        assert self.membership.epoch == self.epoch

    @invariant()
    def live_tokens_belong_to_members(self) -> None:
        assert set(self.live.values()) <= {m.certificate for m in self.membership.members.values()}


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
