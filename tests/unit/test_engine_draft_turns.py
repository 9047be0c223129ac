"""Whom the drafter is asked for, and whose texts are looked up: in turn, and planned while the devices work."""

from __future__ import annotations

import numpy as np
import pytest

from luce.draft.prompt_lookup import Lookup
from luce.engine.draft_budget import AcceptanceRates
from luce.engine.draft_pace import Pace
from luce.engine.draft_turns import DraftTurns, Turn
from luce.engine.drafted import DraftedSequence
from luce.engine.sequence import Sequence
from tests.support.draft_load import Costs, Load

COSTS = Costs(rows={1: 7.0, 8: 8.0, 64: 25.0}, sequence=0.1, drafting={1: 3.0, 8: 6.0})


def replies(count: int) -> tuple[tuple[Sequence, ...], list[DraftedSequence]]:
    """Sequences whose texts have no token twice."""
    found = []
    for slot in range(count):
        one = Sequence(prompt=np.arange(100 * slot, 100 * slot + 8, dtype=np.int32), max_new_tokens=20)
        one.schedule.slot, one.schedule.computed = slot, 8
        one.reply.append(100 * slot + 8)
        found.append(one)
    return tuple(found), [DraftedSequence(AcceptanceRates(), np.empty(0, np.int32)) for _ in found]


def turns(lookup: Lookup | None = None, *, fixed: bool = False) -> DraftTurns:
    return DraftTurns(Pace((2, 4, 8)), lookup, fixed=fixed)


def test_texts_are_looked_up_in_turn() -> None:
    made, (running, known) = turns(Lookup()), replies(20)
    assert made.choose((), [], 8, drafts=False) == []
    assert made.choose(running[:8], known[:8], 8, drafts=False) == [Turn(False, True)] * 8
    known[19].copying = True
    chosen = [[turn.looks for turn in made.choose(running, known, 8, drafts=False)] for _ in range(5)]
    assert turns().choose(running, known, 8, drafts=False) == [Turn(False, False)] * 20
    # The one that copies each time, and of the others eight in turn: every one within three steps.
    assert all(one[19] and sum(one) in (8, 9) for one in chosen)
    for first in range(3):
        assert all(any(one[place] for one in chosen[first : first + 3]) for place in range(20))


def test_a_plan_holds_for_the_same_sequences_with_one_token_more() -> None:
    made, (running, known) = turns(fixed=True), replies(3)
    known[1].off = True
    chosen = made.choose(running, known, 8, drafts=True)
    assert chosen == [Turn(True, False), Turn(False, False), Turn(True, False)]

    def planned(then: tuple[Sequence, ...], *, tokens: int = 1) -> list[Turn] | None:
        made.plan(running, known, chosen)
        for one in running:
            one.reply.extend([1] * tokens)
        return made.planned(then)

    assert planned(running) == chosen
    assert made.planned(running) is None, "a plan is for one step"
    assert planned(running[:2]) is None and planned((running[0], running[2], running[1])) is None
    assert planned(running, tokens=0) is None and planned(running, tokens=2) is None
    made.plan(running, known, [])
    for one in running:
        one.reply.append(1)
    assert made.planned(running) == [], "nothing is drafted, as before"


def test_a_planned_lookup_is_left_out_where_nothing_can_be_found() -> None:
    made, (running, known) = turns(Lookup()), replies(3)
    made.plan(running, known, [Turn(False, True), Turn(False, True), Turn(False, False)])
    running[0].reply.append(5)
    running[1].reply.append(5)
    running[2].reply.append(5)
    assert made.planned(running) == [Turn(False, False)] * 3
    running[1].reply.append(100)
    made.plan(running, known, [Turn(False, True), Turn(False, True), Turn(True, True)])
    for one, token in zip(running, (7, 101, 201), strict=True):
        one.reply.append(token)
    assert made.planned(running) == [Turn(False, False), Turn(False, True), Turn(True, True)]


def test_what_rests_is_chosen_while_the_devices_work(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(COSTS, [0.0] * 8, tokens=64, measured=3.0)
    load.replies()
    chosen: list[bool] = []
    choose, forward = DraftTurns.choose, load.speculator.prepare
    within = [False]

    def prepare(scheduled: object) -> None:
        within[0] = True
        forward(scheduled)  # type: ignore[arg-type]
        within[0] = False

    def noted(self: DraftTurns, *arguments: object, drafts: bool) -> list[Turn]:
        chosen.append(within[0])
        return choose(self, *arguments, drafts=drafts)  # type: ignore[arg-type]

    monkeypatch.setattr(DraftTurns, "choose", noted)
    monkeypatch.setattr(load.speculator, "prepare", prepare)
    load.replies()
    # Between the steps only for the first one, and where a proposal taught something.
    assert chosen.count(True) > 40 and chosen.count(False) < 20


def test_a_plan_rests_where_nobody_is_asked_or_looked_up() -> None:
    made, (running, known) = turns(Lookup()), replies(2)
    assert not made.drafts_nothing, "nothing is planned"
    for turn, rests in ((Turn(False, False), True), (Turn(True, False), False), (Turn(False, True), False)):
        made.plan(running, known, [Turn(False, False), turn])
        assert made.drafts_nothing == rests
    made.plan(running, known, [])
    assert made.drafts_nothing
    made.drop_plan()
    assert not made.drafts_nothing
