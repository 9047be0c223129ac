"""Sessions share slots and chunks of prompts: whose sequence the scheduler takes next."""

from __future__ import annotations

import pytest

from luce.engine.scheduler import MAX_OVERTAKEN
from tests.support.driven_scheduler import CHUNK, Drive, rows, sequence


def test_sessions_take_turns_and_are_first_in_first_out() -> None:
    drive = Drive(slots=1)
    a = [sequence(2, max_new_tokens=1, session="a") for _ in range(3)]
    b = [sequence(2, max_new_tokens=1, session="b") for _ in range(2)]
    c = [sequence(2, max_new_tokens=1, session="c")]
    for one in [*a, *b, *c]:
        drive.scheduler.add(one)
    assert drive.scheduler.waiting == (*a, *b, *c)
    drive.run()
    assert drive.ended == [a[0], b[0], c[0], a[1], b[1], a[2]]


def test_a_small_request_waits_for_one_prompt_of_another_session() -> None:
    drive = Drive(slots=1)
    long = [sequence(10 * CHUNK, max_new_tokens=1, session="a") for _ in range(3)]
    small = sequence(5, max_new_tokens=1, session="b")
    drive.scheduler.add(long[0])
    drive.step()
    for one in (*long[1:], small):
        drive.scheduler.add(one)
    steps = 1
    while small not in drive.ended:
        drive.step()
        steps += 1
    assert steps == 10 + 1 and drive.ended == [long[0], small]
    drive.run()
    assert drive.ended == [long[0], small, *long[1:]]


def test_a_small_request_waits_for_one_prompt_although_four_run() -> None:
    drive = Drive(slots=4)
    long = [sequence(10 * CHUNK, max_new_tokens=1, session="a") for _ in range(4)]
    for one in long:
        drive.scheduler.add(one)
    for _ in range(4):
        drive.step()
    assert [one.computed for one in long] == [CHUNK] * 4
    small = sequence(5, max_new_tokens=1, session="b")
    drive.scheduler.add(small)
    steps = 0
    while small not in drive.ended:
        drive.step()
        steps += 1
    # The nine chunks of one prompt, and its own step.
    assert steps == 9 + 1 and drive.ended[1] is small
    drive.run()
    assert set(drive.ended) == {*long, small}


def test_a_free_slot_goes_to_the_session_with_the_fewest() -> None:
    drive = Drive(slots=4)
    a = [sequence(3, max_new_tokens=50, session="a") for _ in range(3)]
    b = [sequence(3, max_new_tokens=50, session="b") for _ in range(2)]
    for one in (*a[:2], b[0], sequence(3, max_new_tokens=2, session="c")):
        drive.scheduler.add(one)
        drive.step()
    for one in (a[2], b[1]):
        drive.scheduler.add(one)
    # The last slot of a is longer ago than that of b, but a has two.
    while not drive.ended:
        drive.step()
    drive.step()
    assert b[1].slot is not None and a[2].slot is None
    drive.run()
    assert len(drive.ended) == 6


def test_no_request_is_overtaken_for_ever() -> None:
    drive = Drive(slots=2)
    drive.scheduler.add(sequence(3, max_new_tokens=300, session="a"))
    drive.scheduler.add(sequence(3, max_new_tokens=2, session="first"))
    drive.step()
    waits = sequence(3, max_new_tokens=1, session="a")
    drive.scheduler.add(waits)
    # Each new session has no slot yet, the one that waits has one.
    later = [sequence(3, max_new_tokens=1, session=f"s{i}") for i in range(30)]
    for one in later:
        drive.scheduler.add(one)
        drive.step()
    assert waits in drive.ended
    assert sum(one in drive.ended[: drive.ended.index(waits)] for one in later) == MAX_OVERTAKEN


@pytest.mark.parametrize("others", [1, 3])
def test_sessions_get_equal_shares_of_the_chunks(others: int) -> None:
    drive = Drive(slots=8)
    many = [sequence(12 * CHUNK, max_new_tokens=0, session="a") for _ in range(4)]
    single = [sequence(4 * CHUNK, max_new_tokens=0, session=f"s{i}") for i in range(others)]
    for one in (*many, *single):
        drive.scheduler.add(one)
    steps = 0
    while not set(single) <= set(drive.ended):
        drive.step()
        steps += 1
    # Four chunks of each session, in turn.
    assert steps <= 4 * (1 + others)
    assert sum(one.computed for one in many) <= 4 * CHUNK


def test_short_prompts_pass_between_chunks() -> None:
    drive = Drive(slots=8)
    many = [sequence(12 * CHUNK, max_new_tokens=0, session="a") for _ in range(4)]
    for one in many:
        drive.scheduler.add(one)
    drive.step()
    short = sequence(16, max_new_tokens=1, session="b")
    drive.scheduler.add(short)
    assert CHUNK in rows(drive.step()).values() and drive.ended == [short]
    # Short prompts of a session in every step do not take its turns for long ones.
    long = sequence(3 * CHUNK, max_new_tokens=0, session="b")
    drive.scheduler.add(long)
    steps = 0
    while long not in drive.ended:
        drive.scheduler.add(sequence(8, max_new_tokens=0, session="b"))
        drive.step()
        steps += 1
    assert steps <= 2 * 3


def test_a_large_sequence_gets_its_turn_where_pages_are_scarce() -> None:
    # 8 pages: two of 3 pages run, the one of 8 waits for both, and the small one behind it does not overtake.
    drive = Drive(totals=(8,))
    first, second = sequence(64 * 2, max_new_tokens=64), sequence(64 * 2, max_new_tokens=40)
    large, small = sequence(64 * 7, max_new_tokens=10), sequence(5, max_new_tokens=2)
    for one in (first, second, large, small):
        drive.scheduler.add(one)
    drive.step()
    assert drive.scheduler.waiting == (large, small)
    drive.run()
    assert drive.ended == [second, first, large, small]
    assert drive.pages.used == 0
