"""Which prompts a step reads: turns of prompts and sessions, prompts that share a step, scored prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.engine.prompt_turns import SHARED_ROWS
from luce.engine.sequence import CacheState
from tests.support.driven_scheduler import CHUNK, SLOTS, Drive, rows, sequence


def test_replies_go_on_beside_a_long_prompt() -> None:
    drive = Drive()
    short, long = sequence(3, max_new_tokens=10), sequence(300, max_new_tokens=1)
    drive.scheduler.add(short)
    drive.step()
    drive.scheduler.add(long)
    for _ in range(9):
        assert rows(drive.step()) == {short: 1, long: CHUNK}
    assert drive.ended == [short]


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    drive = Drive()
    long, short = sequence(400, max_new_tokens=1), sequence(10, max_new_tokens=1)
    drive.scheduler.add(long)
    drive.step()
    drive.scheduler.add(short)
    assert rows(drive.step()) == {short: 10, long: CHUNK}
    assert drive.ended == [short]
    # One that has not few rows takes turns with it.
    other = sequence(20, max_new_tokens=1)
    drive.scheduler.add(other)
    assert rows(drive.step()) == {other: 20}
    assert rows(drive.step()) == {long: CHUNK}
    assert drive.ended == [short, other]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("length", [10, 20])
def test_a_long_prompt_is_not_stuck_behind_short_ones(length: int, shares: bool) -> None:
    drive = Drive(slots=8, shares_prompts=shares)
    long = sequence(5 * CHUNK, max_new_tokens=1)
    drive.scheduler.add(long)
    # More come than there is room for: of all that wait, none gets two turns before another one.
    for _ in range(5 * 8):
        for _ in range(2):
            drive.scheduler.add(sequence(length, max_new_tokens=0))
        drive.step()
    assert long in drive.ended


def test_a_step_has_one_prompt_of_many_rows() -> None:
    drive = Drive(slots=6)
    first, second = sequence(18, max_new_tokens=0), sequence(CHUNK, max_new_tokens=0)
    few = [sequence(n, max_new_tokens=0) for n in (6, 5, 6, 16)]
    for one in (first, second, *few):
        drive.scheduler.add(one)
    assert list(rows(drive.step())) == [few[0], few[1], first]
    assert list(rows(drive.step())) == [few[2], second]
    assert list(rows(drive.step())) == [few[3]]


def test_short_prompts_share_a_step() -> None:
    drive = Drive(slots=9, chunk=250, max_scored_rows=250, shares_prompts=True)
    long, scored = sequence(144, max_new_tokens=0), sequence(40, max_new_tokens=0, scores_prompt=True)
    short = [sequence(n, max_new_tokens=0) for n in (60, 143, 17, 100)]
    few = sequence(9, max_new_tokens=0)
    for one in (short[0], long, scored, *short[1:], few):
        drive.scheduler.add(one)
    # 100 rows more would be more than a chunk. Then the prompts without room go first; long and scored ones go alone.
    assert list(rows(drive.step())) == [few, short[0], short[1], short[2]]
    assert list(rows(drive.step())) == [long]
    assert list(rows(drive.step())) == [scored]
    assert list(rows(drive.step())) == [short[3]]


def test_short_prompts_share_a_step_of_so_many_rows() -> None:
    drive = Drive(slots=5, chunk=1000, shares_prompts=True)
    short = [sequence(SHARED_ROWS // 4, max_new_tokens=0) for _ in range(5)]
    for one in short:
        drive.scheduler.add(one)
    assert list(rows(drive.step())) == short[:4]
    drive.scheduler.turns.shares_prompts = False
    drive.scheduler.add(sequence(40, max_new_tokens=0))
    assert list(rows(drive.step())) == short[4:]


def test_prompts_for_which_there_is_no_room_take_turns() -> None:
    drive = Drive(chunk=2)
    all_three = [sequence(6, max_new_tokens=1) for _ in range(3)]
    for one in all_three:
        drive.scheduler.add(one)
    for _ in range(3):
        drive.step()
    assert [one.computed for one in all_three] == [2, 2, 2]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.booleans()), min_size=1, max_size=SLOTS),
    chunk=st.integers(1, 60) | st.integers(100, 400),
    scored=st.integers(1, 30),
    shares=st.booleans(),
)
def test_company_does_not_change_a_prompts_pieces(
    lengths: list[tuple[int, bool]], chunk: int, scored: int, shares: bool
) -> None:
    def pieces(prompts: list[tuple[int, bool]]) -> list[list[int]]:
        drive = Drive(chunk=chunk, max_scored_rows=scored, shares_prompts=shares)
        sequences = [sequence(n, max_new_tokens=0 if whole else 3, scores_prompt=whole) for n, whole in prompts]
        for one in sequences:
            drive.scheduler.add(one)
        found: list[list[int]] = [[] for _ in prompts]
        while plan := drive.step():
            for part in plan.sequences:
                if part.position < len(part.sequence.prompt):
                    found[sequences.index(part.sequence)].append(part.rows)
        return found

    assert pieces(lengths) == [own for one in lengths for own in pieces([one])]


def test_prompt_rows_of_a_step_are_at_most_a_chunk() -> None:
    drive = Drive()
    for _ in range(SLOTS):
        drive.scheduler.add(sequence(100, max_new_tokens=2))
    while plan := drive.step():
        read = [p.rows for p in plan.sequences if p.position < 100]
        assert sum(n for n in read if n > 16) <= CHUNK and sum(n for n in read if n <= 16) <= 16


def test_scored_prompts_want_all_rows_in_bounded_pieces() -> None:
    drive = Drive(max_scored_rows=8)
    scored, other = (
        sequence(20, max_new_tokens=0, scores_prompt=True),
        sequence(40, max_new_tokens=1, cache=CacheState(lengths=(CHUNK - 8,))),
    )
    drive.scheduler.add(scored)
    drive.scheduler.add(other)
    plan = drive.step()
    assert rows(plan) == {scored: 8, other: CHUNK - 8}
    assert plan is not None
    assert plan.step.output_rows.tolist() == list(range(8))
    assert plan.step.needs_logits.all()
    drive.run()
    assert set(drive.ended) == {scored, other}


def test_more_scored_prompts_than_their_bound_take_turns() -> None:
    drive = Drive(max_scored_rows=2)
    three = [sequence(4, max_new_tokens=0, scores_prompt=True) for _ in range(3)]
    for one in three:
        drive.scheduler.add(one)
    while plan := drive.step():
        assert plan.step.needs_logits.sum() <= 2
    assert set(drive.ended) == set(three)
