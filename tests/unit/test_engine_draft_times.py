"""Times of steps by rows and by the number of sequences."""

from __future__ import annotations

from luce.engine.draft_times import BatchTimes, StepIntervals
from luce.engine.drafted import DraftLimits


def measured() -> BatchTimes:
    """An H100's, about: 8 and 16 rows of one sequence, 16 and 32 rows of 16."""
    times = BatchTimes()
    for _ in range(3):
        for rows, sequences, seconds in ((8, 1, 8.0), (16, 1, 9.0), (16, 16, 11.0), (32, 16, 18.0)):
            times.add(rows, sequences, seconds)
    return times


def test_the_same_rows_of_more_sequences_take_longer() -> None:
    times = measured()
    assert times(16, 1) == 9.0 and times(16, 16) == times(16, 9) == 11.0
    assert times.measured(16, 10) and not times.measured(16, 8) and not times.measured(8, 16)
    by_rows = times.by_rows(12)
    assert by_rows(32) == 18.0 and by_rows(24) == 14.5


def test_more_rows_than_were_measured_take_as_much_longer_as_with_other_numbers() -> None:
    times = measured()
    # Not the same as 16 rows, which would be worth a try.
    assert times(32, 1) == 9.0 + 18.0 - 11.0
    # Nobody knows what more than 32 rows take.
    assert times(64, 16) == 18.0 and times(64, 1) == 9.0 + 18.0 - 11.0
    for _ in range(3):
        times.add(4, 4, 7.0)
    assert times(16, 4) == 7.0 + max(9.0 - times(4, 1), 11.0 - times(4, 16))
    assert times(1, 2) == 0.0


def test_trees_have_the_rows_that_their_pages_hold() -> None:
    chains = DraftLimits(vocab=8, step_rows=64, verify_rows=16)
    assert [chains.budget(plain) for plain in (1, 16, 63, 64, 65)] == [63, 48, 1, 0, -1]
    trees = DraftLimits(vocab=8, step_rows=64, verify_rows=16, tree_tokens=15, tree_rows=15)
    assert [trees.budget(plain) for plain in (1, 16, 48, 60, 64)] == [15, 15, 15, 4, 0]


def test_the_host_between_two_steps_of_the_same_sequences_counts() -> None:
    intervals = StepIntervals()
    assert intervals.end(("a", "b"), 10.0, 2.0) == 2.0
    assert intervals.end(("a", "b"), 13.0, 2.5) == 3.0
    intervals.drafting += 1.5
    assert intervals.end(("a", "b"), 18.0, 2.5) == 3.5
    assert intervals.end(("a", "b"), 21.0, 2.5) == 3.0, "proposals count for one step"
    # The devices' part counts where the clocks disagree.
    assert intervals.end(("a", "b"), 22.0, 2.5) == 2.5
    # Others may have begun, been restored or ended meanwhile.
    assert intervals.end(("a", "b", "c"), 40.0, 2.5) == 2.5
    assert intervals.end(("a",), 60.0, 2.5) == 2.5
