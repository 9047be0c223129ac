"""Which labels no other one beats, against a comparison of all pairs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from luce.planner.labels import Labels, concatenate, ranks, undominated

#: used, last, done, cost, slowest, resources, offloaded, order rank, ends rank
Row = tuple[int, int, int, float, float, tuple[float, ...], int, int, int]


def labels(rows: list[Row]) -> Labels:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    columns += [np.arange(len(rows)), np.zeros(len(rows))]
    return Labels(*columns)


def beats(one: Row, other: Row) -> bool:
    """Whether a label of the same state is nowhere worse, and cheaper or the winner of a tie."""
    if one[:3] != other[:3] or any(a > b for a, b in zip(one[3:5] + one[5], other[3:5] + other[5], strict=True)):
        return False
    return one[3] < other[3] or one[6:] < other[6:]


@pytest.mark.parametrize("resources", [0, 2])
@pytest.mark.parametrize("seed", range(20))
def test_what_stays_is_beaten_by_nothing(seed: int, resources: int) -> None:
    rng = random.Random(seed)
    rows: list[Row] = []
    for number in range(rng.randint(1, 400)):
        state = rng.randint(0, 2), rng.randint(0, 1), rng.randint(1, 3)
        costs = float(rng.randint(1, 9)), float(rng.randint(1, 9))
        used = tuple(float(rng.randint(1, 4)) for _ in range(resources))
        rows.append((*state, *costs, used, rng.randint(0, 2), rng.randint(0, 3), number))
    kept = set(undominated(labels(rows)).parent.tolist())
    expected = {i for i, row in enumerate(rows) if not any(beats(other, row) for other in rows)}
    assert kept == expected


def test_sums_in_another_order_are_a_tie() -> None:
    rows: list[Row] = [(1, 0, 1, 0.1 + 0.2 + 0.3, 1.0, (), 0, 1, 0), (1, 0, 1, 0.3 + 0.2 + 0.1, 1.0, (), 0, 0, 0)]
    assert rows[0][3] != rows[1][3]
    assert undominated(labels(rows)).parent.tolist() == [1]


def test_a_coarse_comparison_keeps_the_cheapest_of_about_the_same_slowest() -> None:
    rows: list[Row] = [(1, 0, 1, 5.0, 1.0001, (), 0, 0, 0), (1, 0, 1, 6.0, 1.00005, (), 0, 0, 0)]
    rows.append((1, 0, 1, 7.0, 0.9, (), 0, 0, 0))
    assert sorted(undominated(labels(rows)).parent.tolist()) == [0, 1, 2]
    assert sorted(undominated(labels(rows), coarse=True).parent.tolist()) == [0, 2]


def test_no_labels_stay_no_labels() -> None:
    assert len(undominated(labels([(1, 0, 1, 5.0, 1.0, (), 0, 0, 0)])[np.zeros(0, np.int64)])) == 0


def test_labels_of_several_lists_are_one_list() -> None:
    one = labels([(1, 0, 1, 5.0, 1.0, (2.0,), 0, 0, 0)])
    assert concatenate([one, one]).resources.tolist() == [[2.0], [2.0]]


def test_ranks_are_dense_and_count_the_first_column_most() -> None:
    assert ranks(np.array([2, 1, 2, 1]), np.array([0, 5, -1, 5])).tolist() == [2, 0, 1, 0]
