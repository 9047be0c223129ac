"""The NumPy gated DeltaNet against float64."""

from __future__ import annotations

import pytest

from luce.runtime.host import HostDevice
from tests.support import op_checks_deltanet as checks


@pytest.mark.parametrize("decay", ["model", "none", "strong", "mixed"])
@pytest.mark.parametrize("lengths", [(1, 2, 16, 5), (17, 1, 63), (64, 65, 200)])
def test_formula(lengths: tuple[int, ...], decay: checks.Decay) -> None:
    checks.check_formula(HostDevice(), lengths, key_heads=2, heads=6, d=24, decay=decay)


@pytest.mark.parametrize(("key_heads", "heads", "d"), [(1, 1, 16), (3, 3, 80), (2, 4, 128)])
def test_shapes(key_heads: int, heads: int, d: int) -> None:
    checks.check_formula(HostDevice(), (3, 70), key_heads=key_heads, heads=heads, d=d)


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("lengths", [(1, 2, 3), (70, 1, 33)])
def test_taps(lengths: tuple[int, ...], taps: int) -> None:
    checks.check_formula(HostDevice(), lengths, key_heads=2, heads=4, d=16, taps=taps)


@pytest.mark.parametrize("rows", [1, 9, 16])
def test_single_steps(rows: int) -> None:
    checks.check_single_steps(HostDevice(), rows, key_heads=2, heads=4, d=64)


@pytest.mark.parametrize("then", [0, 1, 9, 70])
@pytest.mark.parametrize(("speculative", "accepted"), [(2, 1), (8, 8), (16, 5), (16, 16)])
def test_speculative_rows(speculative: int, accepted: int, then: int) -> None:
    checks.check_rollback(HostDevice(), speculative, accepted, then, heads=4, d=32)


@pytest.mark.parametrize(
    ("parents", "path"),
    [
        ((0, 1, 2), (0, 1)),
        ((0, 1, 0, 3, 3, 0), (0, 3, 5)),
        ((0, 0, 0), (0, 3)),
        ((0, 1, 2, 3, 2, 5, 1, 0), (0, 1, 2, 5)),
    ],
)
def test_trees(parents: tuple[int, ...], path: tuple[int, ...]) -> None:
    checks.check_tree(HostDevice(), parents, path, heads=4, d=32)


@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_cut_anywhere(decay: checks.Decay) -> None:
    checks.check_cuts(HostDevice(), (1, 30, 16, 100, 7), key_heads=1, heads=2, d=32, decay=decay)


@pytest.mark.parametrize("rows", [16, 40])
def test_far_out(rows: int) -> None:
    checks.check_far_out(HostDevice(), rows)


def test_no_rows() -> None:
    checks.check_no_rows(HostDevice())
