"""How many draft rows pay, by times of steps and acceptance rates."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.draft.drafter import Proposal
from luce.engine.draft_budget import AcceptanceRates, choose_draft_rows, worth_drafting
from luce.engine.draft_times import StepTimes


def test_rows_are_chosen_by_what_they_gain() -> None:
    flat: Callable[[int], float] = lambda rows: 1.0  # noqa: E731
    linear: Callable[[int], float] = lambda rows: float(rows)  # noqa: E731
    # Rows that cost nothing are all worth it, rows that cost a step each never are.
    any_size = range(99)
    assert choose_draft_rows([[0.9, 0.5, 0.1]], 9, 1, flat, 0.0, any_size) == ([3], 2.5)
    assert choose_draft_rows([[0.9, 0.5, 0.1]], 9, 1, linear, 0.0, any_size) == ([0], 1.0)
    # The likeliest rows of all sequences, as many as there is room for.
    assert choose_draft_rows([[0.9, 0.5, 0.1], [0.7, 0.6]], 3, 2, flat, 0.0, any_size)[0] == [1, 2]
    # Drafting is paid whatever is verified: here it makes up for what it cost, here not.
    assert choose_draft_rows([[0.9, 0.8]], 2, 1, flat, 0.5, any_size) == ([2], pytest.approx(1.8))
    counts, gain = choose_draft_rows([[0.1]], 1, 1, flat, 0.5, any_size)
    assert counts == [1] and gain < 1
    # A step that becomes dear after three rows, of which there may be two or four.
    dear: Callable[[int], float] = lambda rows: 1.0 if rows <= 3 else 3.5  # noqa: E731
    assert choose_draft_rows([[0.9] * 5], 5, 1, dear, 0.0, any_size)[0] == [2]
    assert choose_draft_rows([[0.9] * 5], 5, 1, dear, 0.0, (2, 4))[0] == [1]
    assert choose_draft_rows([[0.9] * 2], 5, 1, dear, 0.0, ())[0] == [2]


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=5).map(lambda r: sorted(r, reverse=True)), min_size=1, max_size=4),
    st.sampled_from([range(99), (2, 4, 8, 16)]),
)
def test_the_choice_is_the_best_of_all(reaches: list[list[float]], sizes: Many[int]) -> None:
    def seconds(rows: int) -> float:
        return 1 + 0.07 * rows + 0.5 * (rows > 6)

    room, plain = 7, len(reaches)
    counts, _ = choose_draft_rows(reaches, room, plain, seconds, 0.3, sizes)
    allowed = {plain, *sizes, plain + min(room, sum(map(len, reaches)))}

    def rate(chosen: Many[int]) -> float:
        expected = plain + sum(sum(reach[:n]) for reach, n in zip(reaches, chosen, strict=True))
        return expected / (0.3 + seconds(plain + sum(chosen)))

    every = np.ndindex(*[len(reach) + 1 for reach in reaches])
    fitting = [chosen for chosen in every if sum(chosen) <= room and plain + sum(chosen) in allowed]
    assert rate(counts) == pytest.approx(max(map(rate, fitting)))


def test_times_of_rows_that_were_not_tried_lie_between_those_that_were() -> None:
    seconds = StepTimes()
    assert seconds(3) == 0.0
    # The first steps of a kind build kernels and capture graphs.
    for measured in (3.0, 0.5, 0.010):
        assert not seconds.measured(1)
        seconds.add(1, measured)
    assert seconds.measured(1) and seconds(16) == 0.010
    for measured in (3.0, 0.5, 0.018):
        seconds.add(9, measured)
    assert seconds(5) == pytest.approx(0.014) and seconds(16) == 0.018
    fewer = StepTimes(fixed=0.5)
    for measured in (3.0, 0.5, 0.012):
        fewer.add(6, measured)
    assert [fewer(rows) for rows in (1, 3, 6, 9)] == pytest.approx([0.007, 0.009, 0.012, 0.012])
    # A step that is held up hardly counts.
    for measured in (3.0, 0.5, 0.012, 5.0):
        seconds.add(4, measured)
    assert 0.012 < seconds(4) < 0.014


def worth(asked: Many[Many[float]], drafting: Callable[[int], float]) -> list[bool]:
    return worth_drafting(asked, 16, len(asked), lambda rows: 1 + 0.02 * rows, drafting, range(99), margin=0.02)


def test_one_that_copies_is_drafted_for_beside_seven_that_gain_nothing() -> None:
    asked = [[0.0] * 7, [0.95] * 7, *[[0.0] * 7] * 6]
    assert worth(asked, lambda count: 0.1 + 0.05 * count) == [False, True, *[False] * 6]
    # Where drafting for more of them costs nothing, none of them rests.
    assert worth(asked, lambda count: 0.1) == [True] * 8
    # Alone it pays less than it costs, or little more.
    assert worth([[0.3]], lambda count: 0.5) == [False]
    assert worth([[0.3]], lambda count: 0.27) == [False]
    assert worth([[0.3]], lambda count: 0.01) == [True]
    assert worth([], lambda count: 0.01) == []


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=4).map(lambda r: sorted(r, reverse=True)), min_size=1, max_size=5),
    st.floats(0, 0.5),
    st.floats(0, 0.3),
)
def test_drafting_for_those_that_are_worth_it_is_no_slower_than_plain(
    asked: list[list[float]], once: float, each: float
) -> None:
    def seconds(rows: int) -> float:
        return 1 + 0.02 * rows + 0.3 * (rows > 8)

    def drafting(count: int) -> float:
        return once + each * count

    chosen = worth_drafting(asked, 12, len(asked), seconds, drafting, range(99), margin=0.02)
    kept = [own for own, pays in zip(asked, chosen, strict=True) if pays]
    if kept:
        _, gain = choose_draft_rows(kept, 12, len(asked), seconds, drafting(len(kept)), range(99))
        assert gain >= 1.02
        # The others gain less each.
        left = [sum(own) for own, pays in zip(asked, chosen, strict=True) if not pays]
        assert max(left, default=0.0) <= min(map(sum, kept))
    else:
        _, gain = choose_draft_rows(asked, 12, len(asked), seconds, drafting(len(asked)), range(99))
        assert gain <= 1.02 + 1e-9


def test_rates_of_copied_tokens_are_learned_by_how_much_is_copied() -> None:
    rates = AcceptanceRates()
    chain = Proposal([7] * 9, copied=[2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert rates.probabilities(Proposal([7]))[0] == 0.5
    # A longer copy is likelier at first, and so is one that the drafter says too.
    one = [rates.probabilities(Proposal([7], copied=[length]))[0] for length in (2, 4, 8, 16)]
    assert one == sorted(one) and one[0] < 0.5 < one[-1]
    both = rates.probabilities(Proposal([7], [0.6], copied=[4]))[0]
    assert both > max(0.6, one[1])
    for _ in range(60):
        rates.update(chain, [(0, False)], 0.1)
    # Two tokens are not enough here; those of longer copies are as likely as before.
    assert rates.probabilities(chain)[0] < 0.02
    assert rates.probabilities(Proposal([7], copied=[8]))[0] == one[2]
    assert rates.probabilities(Proposal([7]))[0] == 0.5
