"""The NumPy attention against float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from luce.runtime.host import HostDevice
from tests.support import op_checks_attention as checks


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(1, 1, 16), (3, 3, 8), (6, 2, 48), (7, 1, 80), (2, 1, 512)])
def test_heads_of_all_sizes(heads: int, kv_heads: int, d: int) -> None:
    checks.check_shape(HostDevice(), heads, kv_heads, d, [(63, 3)])


@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(0, 65)],
        [(63, 1), (64, 1), (127, 1), (31, 1)],
        [(500, 1), (0, 20), (257, 3), (600, 1)],
    ],
)
def test_spans_of_all_lengths(lengths: Sequence[tuple[int, int]]) -> None:
    checks.check_shape(HostDevice(), 4, 2, 16, lengths)


@pytest.mark.parametrize(("window", "position", "rows"), [(1, 70, 2), (32, 60, 9), (64, 640, 1), (100, 750, 20)])
def test_window(window: int, position: int, rows: int) -> None:
    checks.check_window(HostDevice(), window, position, rows)


def test_missing_pages() -> None:
    checks.check_missing_pages(HostDevice())


def test_large_scores() -> None:
    checks.check_sharp(HostDevice())


@pytest.mark.parametrize(("n", "kv_heads", "d"), [(1, 1, 16), (70, 3, 48)])
def test_write_kv(n: int, kv_heads: int, d: int) -> None:
    checks.check_write_kv(HostDevice(), n, kv_heads, d)
