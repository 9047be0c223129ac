"""The NumPy rotary embedding against exact angles and float64 products."""

from __future__ import annotations

import numpy as np
import pytest

from luce.runtime.host import HostDevice
from tests.support import op_checks_rope as checks


@pytest.mark.parametrize("half", [1, 4, 66])
def test_table_of_text_positions(half: int) -> None:
    checks.check_table(HostDevice(), np.array([0, 1, 17, 262143, 1048575], np.int32), half, 1e7)


def test_table_of_positions_on_four_axes() -> None:
    checks.check_table(HostDevice(), np.array([[5, 1000, 3, 9], [262143, 0, 77777, 9]], np.int32), 10, 1e4)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("n", "heads", "d", "half"), [(1, 1, 2, 1), (3, 5, 48, 24), (4, 3, 64, 16), (2, 7, 80, 33)])
def test_rope(n: int, heads: int, d: int, half: int, adjacent: bool) -> None:
    checks.check_rope(HostDevice(), n, heads, d, half, adjacent=adjacent)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    checks.check_rows_alone(HostDevice(), 3, 16)
