"""When a better placement is tried: rules, and a member that comes and goes."""

from __future__ import annotations

import pytest

from luce.cluster.auto_replan import INTERVAL, LEAST_GAIN, QUIET, AutoReplan, gains_enough
from luce.cluster.membership import (
    Admitted,
    Connected,
    Disconnected,
    Ended,
    Kept,
    Membership,
    Planned,
    Replan,
    Tick,
    Withdraw,
)

BOX, DEN = frozenset({"box"}), frozenset({"den"})


def due(auto: AutoReplan, now: float, idle: frozenset[str] = BOX, running: int = 0, waiting: int = 0) -> bool:
    return auto.due(now, idle, running=running, waiting=waiting)


def test_it_waits_for_ten_minutes_without_a_change_and_half_a_minute_without_requests() -> None:
    auto = AutoReplan(2, 0.0)
    assert not due(auto, INTERVAL - 1) and due(auto, INTERVAL)
    assert not due(auto, INTERVAL, running=1) and not due(auto, INTERVAL + QUIET - 1)
    assert due(auto, INTERVAL + QUIET)
    assert not due(auto, INTERVAL + QUIET, waiting=1) and not due(auto, INTERVAL + 2 * QUIET - 1)
    # A queue that is longer than what runs at a time does not wait for its own end.
    assert not due(auto, INTERVAL + 100, running=2, waiting=2) and due(auto, INTERVAL + 100, running=2, waiting=3)
    auto.placed(INTERVAL + 100, frozenset())
    assert not due(auto, INTERVAL + 200, running=2, waiting=3) and due(auto, 2 * INTERVAL + 200)


def test_only_for_members_that_have_come_since() -> None:
    auto = AutoReplan(1, 0.0)
    assert not due(auto, INTERVAL, frozenset())
    auto.placed(0.0, BOX)
    assert not due(auto, INTERVAL, BOX) and due(auto, INTERVAL, BOX | DEN)
    # It has been away, and may have other devices now.
    assert not due(auto, INTERVAL, frozenset()) and due(auto, INTERVAL, BOX)


@pytest.mark.parametrize(
    ("before", "now", "enough"),
    [(100.0, 115.1, True), (100.0, 114.9, False)],
)
def test_how_much_faster_it_has_to_be(before: float, now: float, enough: bool) -> None:
    assert LEAST_GAIN == 1.15 and gains_enough(before, now) == enough


@pytest.mark.parametrize("patience", [0.0, 20.0])
@pytest.mark.parametrize("away", [10, 20])
def test_a_member_that_flaps_changes_the_placement_once_in_ten_minutes(patience: float, away: int) -> None:
    membership, auto = Membership("1", patience=patience), AutoReplan(1, 0.0)
    changes, session = 0, 1
    membership.handle(Admitted("box", b"box", ""), 0.0)
    for event in (Connected(b"box", 1, "1", ("cpu:0",), ""), Planned(("box",)), Kept(frozenset({"box"}))):
        membership.handle(event, 0.0)
    for now in range(int(INTERVAL)):
        done = membership.handle(Tick(), now)
        if now and now % (2 * away) == 0:
            session += 1
            done += membership.handle(Connected(b"box", session, "1", ("cpu:0",), ""), now)
        elif now % (2 * away) == away:
            done += membership.handle(Disconnected(session, "it is gone"), now)
        there = membership.usable()
        idle = frozenset(member.name for member in there if member.state == "idle")
        wanted = any(isinstance(each, Replan) for each in done) and not any(isinstance(each, Withdraw) for each in done)
        if wanted or due(auto, now, idle):
            names = tuple(member.name for member in there)
            for following in (Ended(), Planned(names), Kept(frozenset(names))):
                membership.handle(following, now)
            auto.placed(now, frozenset())
            changes += 1
    assert changes == (patience < away)
