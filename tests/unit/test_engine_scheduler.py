"""The scheduler without threads or time, driven over the scripted backend, which checks every step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.engine.scheduler import ScheduledStep
from luce.engine.sequence import CacheState, Draft, Sequence
from luce.ops.matmul import FEW_ROWS
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import STRETCHED
from tests.support.driven_scheduler import CHUNK, SLOTS, Drive, rows, sequence


def test_a_plan_is_filled_with_what_is_proposed_later() -> None:
    drive = Drive()
    drafted, plain = sequence(70, max_new_tokens=30), sequence(3, max_new_tokens=30)
    drive.scheduler.add(drafted)
    drive.scheduler.add(plain)
    while min(len(drafted.reply), len(plain.reply)) < 2:
        drive.step()
    drafted.draft = Draft((0, 0, 0))
    early = drive.scheduler.schedule()
    assert early is not None
    drafted.draft = Draft((5, 6, 7))
    late, filled = drive.scheduler.schedule(), drive.scheduler.with_drafts(early)
    # Nothing but the tokens of proposals could be different.
    assert_same(filled, late)
    for tokens, parents in (((5, 6), ()), ((), ()), ((5, 6, 7), (0, 0, 1))):
        drafted.draft = Draft(tokens, parents)
        assert drive.scheduler.with_drafts(early) is None
    drafted.draft = Draft()
    drive.run()


def assert_same(plan: ScheduledStep | None, other: ScheduledStep | None) -> None:
    assert plan is not None and other is not None
    assert (plan.sequences, plan.step.spans, plan.failures) == (other.sequences, other.step.spans, other.failures)
    for name in ("tokens", "positions", "position_ids", "output_rows", "needs_logits"):
        np.testing.assert_array_equal(getattr(plan.step, name), getattr(other.step, name))
    assert (plan.step.draws is None) == (other.step.draws is None)
    if plan.step.draws is not None and other.step.draws is not None:
        for field in fields(RowDraws):
            own, their = getattr(plan.step.draws, field.name), getattr(other.step.draws, field.name)
            np.testing.assert_array_equal(own, their)
    for own, view in zip(plan.step.views, other.step.views, strict=True):
        for name in ("table", "first", "count", "dest"):
            np.testing.assert_array_equal(getattr(own, name), getattr(view, name))


def both(drive: Drive) -> tuple[ScheduledStep, ScheduledStep]:
    """The next step, which may be prepared, and the same made anew."""
    plan, anew = drive.scheduler.schedule(), drive.scheduler.schedule()
    assert plan is not None and anew is not None
    return plan, anew


def decoding(*added: Sequence, drive: Drive | None = None) -> tuple[Drive, ScheduledStep]:
    """All of them decode, and the step behind the newest one is prepared."""
    drive = drive or Drive()
    for one in added:
        drive.scheduler.add(one)
    while min(len(one.reply) for one in added) < 2:
        newest = drive.step()
    assert newest is not None
    return drive, newest


def test_a_prepared_step_is_the_one_that_would_be_made() -> None:
    drive, newest = decoding(
        sequence(3, 200, position_ids=np.array([0, 10, 20], np.int32)),
        sequence(70, 200, needs_logits=True),
        sequence(5, 200, device_draws=True, draw=Draw(3, 0.7, 40)),
        drive=Drive(windows=(None, 40)),
    )
    # Some rows begin pages, and some leave pages behind.
    for _ in range(150):
        plan, anew = both(drive)
        assert_same(plan, anew)
        assert plan.step.output_rows is newest.step.output_rows is not anew.step.output_rows
        drive.scheduler.prepare(plan)
        drive.scheduler.advance(plan)
        for one in drive.scheduler.running:
            one.reply.append(one.reply[-1] + 1)
        newest = plan


def test_a_prepared_step_is_dropped_where_a_sequence_has_a_draft() -> None:
    one = sequence(3, 20)
    drive, _ = decoding(one)
    one.draft = Draft((4,))
    plan, anew = both(drive)
    assert_same(plan, anew)
    assert plan.step.rows == 2


def test_a_prepared_step_is_dropped_with_a_step_that_failed() -> None:
    drive, _ = decoding(sequence(3, 20))
    plan, _ = both(drive)
    drive.scheduler.prepare(plan)
    assert_same(*both(drive))


def test_a_prepared_step_is_dropped_where_other_sequences_run_now() -> None:
    ended, other = sequence(3, 20), sequence(3, 20)
    drive, _ = decoding(ended)
    drive.scheduler.add(other)
    assert list(drive.scheduler.admit()) == [other]
    assert rows(drive.scheduler.schedule()) == {ended: 1, other: 3}
    drive, _ = decoding(ended := sequence(3, 20))
    drive.scheduler.add(other := sequence(3, 20))
    drive.scheduler.remove(ended)
    assert list(drive.scheduler.admit()) == [other]
    # The prefix cache has its prompt, and it has begun.
    drive.scheduler.resume(other, 4)
    other.reply[:] = [7, 8]
    plan, anew = both(drive)
    assert_same(plan, anew)
    assert rows(plan) == {other: 1}


def test_a_prepared_step_is_dropped_where_a_sequence_is_stretched() -> None:
    one = sequence(3, 20)
    drive, _ = decoding(one)
    computed, one.stretched = one.computed, True
    drive.scheduler.restart(one)
    # The prefix cache has all of its positions.
    drive.scheduler.resume(one, computed)
    plan, anew = both(drive)
    assert_same(plan, anew)
    assert plan.step.position_ids is not None


def test_no_step_is_prepared_behind_drafts_and_prompts() -> None:
    one = sequence(3, 20)
    drive, _ = decoding(one)
    one.draft = Draft((4, 5))
    plan, _ = both(drive)
    drive.scheduler.prepare(plan)
    drive.scheduler.advance(plan)
    drive.scheduler.accept(plan.sequences[0], [0])
    one.draft = Draft()
    plan, anew = both(drive)
    assert_same(plan, anew)
    assert plan.step.spans[0].accepted == 1
    # A prompt's last row, whose logits are saved.
    drive = Drive()
    drive.scheduler.add(last := sequence(CHUNK + 1, 9, cache=CacheState(lengths=(CHUNK,), saves_logits=True)))
    drive.step()
    assert rows(newest := drive.step()) == {last: 1}
    assert newest is not None and newest.step.needs_logits.all()
    plan, anew = both(drive)
    assert_same(plan, anew)
    assert not plan.step.needs_logits.any()


def test_a_sequence_without_pages_is_left_out_of_a_prepared_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fails, stays = sequence(3, 20), sequence(3, 20)
    drive, _ = decoding(fails, stays)
    extend, error = drive.pages.extend, RuntimeError("no page")

    def failing(slot: int, position: int, count: int) -> None:
        if slot == fails.slot:
            raise error
        extend(slot, position, count)

    monkeypatch.setattr(drive.pages, "extend", failing)
    plan, anew = both(drive)
    assert_same(plan, anew)
    assert rows(plan) == {stays: 1} and plan.failures == [(fails, error)]


def test_a_sequence_ends_in_every_stage_and_leaves_nothing() -> None:
    drive = Drive(slots=1)
    decoding, reading, waiting = sequence(3), sequence(100), sequence(3)
    for one in (decoding, reading, waiting):
        drive.scheduler.add(one)
    drive.step()
    drive.step()
    drive.scheduler.remove(decoding)
    assert drive.pages.used == 0
    assert rows(drive.step()) == {reading: CHUNK}
    drive.scheduler.remove(waiting)
    assert drive.scheduler.waiting == ()
    drive.scheduler.remove(reading)
    assert drive.step() is None
    assert (drive.pages.used, drive.scheduler.running) == (0, ())


def test_position_ids_go_on_behind_the_prompt() -> None:
    drive = Drive()
    ids = np.array([0, 1, 7, 8, 9, 20], np.int32)
    gapped, counted = sequence(6, position_ids=ids), sequence(4)
    seen = []
    for one in (counted, gapped):
        drive.scheduler.add(one)
    while plan := drive.step():
        step = plan.step
        assert step.position_ids is not None or gapped in drive.ended
        seen += [] if step.position_ids is None else [(step.positions.tolist(), step.position_ids.tolist())]
    assert seen[0] == ([*range(4), *range(6)], [*range(4), *ids.tolist()])
    assert seen[1:] == [([4 + i, 6 + i], [4 + i, 21 + i]) for i in range(3)]
    gapped.reply = [5]
    assert (gapped.prefix_ids >> 32).tolist() == [0, 0, 5, 5, 5, 15, 15]
    assert counted.prefix_ids.dtype == np.int32


def test_position_ids_of_drafts() -> None:
    """A token of a draft tree has the position of its depth."""
    drive = Drive()
    one = sequence(3, 9, position_ids=np.array([0, 10, 20], np.int32))
    drive.scheduler.add(one)
    drive.step()
    one.draft = Draft((4, 5, 6), parents=(0, 0, 1))
    plan = drive.scheduler.schedule()
    assert plan is not None and plan.step.position_ids is not None
    np.testing.assert_array_equal(plan.step.position_ids, plan.step.positions + 18)


def test_a_stretched_sequence_is_read_again_in_chunks() -> None:
    """Its reply too, and behind that as few rows at a time as is usual."""
    drive = Drive()
    one, other = sequence(6, 90), sequence(3, 90)
    for added in (one, other):
        drive.scheduler.add(added)
    for _ in range(51):
        drive.step()
    computed, reply = one.computed, list(one.reply)
    one.stretched, one.schedule.chunked = True, computed
    one.reply += [1] * 20
    drive.scheduler.restart(one)
    read: list[int] = []
    while one.unread:
        plan = drive.scheduler.schedule()
        assert plan is not None and plan.step.position_ids is not None
        drive.scheduler.advance(plan)
        (part,) = (part for part in plan.sequences if part.sequence is one)
        own = plan.step.position_ids - plan.step.positions
        assert sorted(own.tolist()) == [0] * (len(own) - part.rows) + [STRETCHED] * part.rows
        read.append(part.rows)
    assert read == [6, CHUNK, computed - CHUNK - 6, FEW_ROWS, 20 - FEW_ROWS]
    assert one.reply == reply + [1] * 20 and one.computed == 6 + len(reply) + 19
    assert set((one.prefix_ids >> 32).tolist()) == {STRETCHED} and other.prefix_ids.dtype == np.int32


def test_what_is_wanted_of_a_step() -> None:
    drive = Drive(slots=4)
    plain, sampled = sequence(3), sequence(5, needs_logits=True)
    silent, partial = sequence(4, max_new_tokens=0), sequence(60, cache=CacheState(lengths=(CHUNK - 12,)))
    for one in (plain, sampled, silent, partial):
        drive.scheduler.add(one)
    plan = drive.step()
    assert plan is not None
    assert rows(plan) == {plain: 3, sampled: 5, silent: 4, partial: CHUNK - 12}
    assert plan.step.output_rows.tolist() == [2, 7]
    assert plan.step.needs_logits.tolist() == [False, True]
    parts = {p.sequence: (p.ids, p.logits) for p in plan.sequences}
    assert parts[plain] == (slice(0, 1), slice(0, 0))
    assert parts[sampled] == (slice(1, 2), slice(0, 1))
    assert parts[silent] == (slice(2, 2), slice(1, 1))
    assert parts[partial] == (slice(2, 2), slice(1, 1))
    assert drive.ended == [silent]


def test_deadlines() -> None:
    drive = Drive(slots=1)
    runs = sequence(3, deadline=5.0, queue_deadline=1.0)
    waits = sequence(3, deadline=9.0, queue_deadline=4.0)
    lost = sequence(3, deadline=2.0, queue_deadline=1.0)
    for one in (runs, waits, lost):
        drive.scheduler.add(one)
    drive.step()
    assert drive.scheduler.expired(0.5) == ([], [])
    # Past both deadlines counts as expired; a sequence that runs is not overdue.
    assert drive.scheduler.expired(2.0) == ([lost], [])
    drive.scheduler.remove(lost)
    assert drive.scheduler.expired(4.0) == ([], [waits])
    drive.scheduler.remove(waits)
    assert drive.scheduler.expired(4.9) == ([], [])
    assert drive.scheduler.expired(5.0) == ([runs], [])


@pytest.mark.parametrize("window", [1, 40, 64, 70])
def test_a_window_slides_over_a_long_reply(window: int) -> None:
    drive = Drive(windows=(None, window))
    one = sequence(30, max_new_tokens=300)
    drive.scheduler.add(one)
    drive.run()
    assert one.reply == drive.backend.reply(one.prompt.tolist(), 300)


@dataclass
class Arrival:
    """When a sequence comes, what it is, and after how many of its steps it is cancelled."""

    at: int
    prompt: list[int]
    max_new_tokens: int
    session: str
    scored: bool
    cancel: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.integers(0, 20),
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=150),
        max_new_tokens=st.integers(0, 12),
        session=st.sampled_from(["", "a", "b"]),
        scored=st.booleans(),
        cancel=st.none() | st.integers(0, 15),
    ),
    max_size=10,
)


@pytest.mark.parametrize("windows", [(None,), (None, 40), (70,), ()], ids=str)
@given(arrivals=arrivals, failures=st.sets(st.integers(0, 40), max_size=2), scarce=st.booleans())
@settings(max_examples=40)
def test_any_arrivals_leave_nothing_and_do_not_change_replies(
    windows: tuple[int | None, ...], arrivals: list[Arrival], failures: set[int], scarce: bool
) -> None:
    drive = Drive(windows=windows, max_scored_rows=10, totals=tuple(5 for _ in windows) if scarce else None)
    came: dict[Sequence, Arrival] = {}
    cancelled: set[Sequence] = set()
    lost: set[Sequence] = set()
    number = 0
    while len(came) < len(arrivals) or drive.scheduler.running or drive.scheduler.waiting:
        for arrival in arrivals:
            if arrival.at == number:
                one = sequence(
                    arrival.prompt,
                    max_new_tokens=arrival.max_new_tokens,
                    session=arrival.session,
                    scores_prompt=arrival.scored,
                )
                came[one] = arrival
                drive.scheduler.add(one)
        for one, arrival in came.items():
            alive = one not in cancelled and one not in lost and one not in drive.ended
            if alive and arrival.cancel is not None and number >= arrival.at + arrival.cancel:
                drive.scheduler.remove(one)
                cancelled.add(one)
        drive.fail = failing = number in failures
        plan = drive.step()
        if failing and plan is not None:
            lost |= {part.sequence for part in plan.sequences}
        number += 1
        assert number < 2000
    assert drive.backend.broken is None
    assert len(drive.ended) == len(set(drive.ended))
    assert set(drive.ended) | cancelled | lost == set(came)
    assert drive.pages.used == 0
    for one in [*drive.ended, *cancelled]:
        assert one.reply == drive.backend.reply(one.prompt.tolist(), len(one.reply))
    for one in drive.ended:
        assert len(one.reply) == one.max_new_tokens
    # All slots and all pages can be had again.
    assert drive.scheduler.waiting == ()
    for _ in range(SLOTS):
        drive.scheduler.add(sequence(60, max_new_tokens=4))
    assert len(list(drive.scheduler.admit())) == SLOTS


def test_no_device_draws_where_the_host_has_whole_logits() -> None:
    drive = Drive()
    drive.scheduler.add(sequence(5, 9, device_draws=True, draw=Draw(3, 0.7, 40), cache=CacheState(saves_logits=True)))
    reading, decoding = drive.step(), drive.step()
    assert reading is not None and reading.step.needs_logits.all() and reading.step.draws is None
    assert decoding is not None and not decoding.step.needs_logits.any() and decoding.step.draws is not None


def test_what_follows_a_step_is_prepared_for_that_step() -> None:
    drive = Drive(prepares=False)
    for prompt in (3, 4):
        drive.scheduler.add(sequence(prompt, 9))
    reading, decoding = drive.step(), drive.step()
    assert reading is not None and decoding is not None
    drive.scheduler.prepare(decoding)
    following = drive.scheduler.follow(0.0, verifies=True)
    assert following is not None
    assert [one.position for one in following.sequences] == [one.position + 1 for one in decoding.sequences]
    assert (following.step.positions == decoding.step.positions + 1).all()
    # None follows one that reads, whatever was prepared before.
    drive.scheduler.prepare(reading)
    assert drive.scheduler.follow(0.0, verifies=True) is None
