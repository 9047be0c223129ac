"""How many draft rows pay, by times of steps and acceptance rates."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.engine.draft_budget import StepTimes, choose_draft_rows


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
    # A step that is held up hardly counts.
    for measured in (3.0, 0.5, 0.012, 5.0):
        seconds.add(4, measured)
    assert 0.012 < seconds(4) < 0.014
