"""The NumPy norms against float64."""

from __future__ import annotations

import pytest

from luce.runtime.host import HostDevice
from tests.support import op_checks_norm as checks


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 63), (8, 5120)])
def test_rms_norm(n: int, d: int) -> None:
    checks.check_rms_norm(HostDevice(), n, d)
    checks.check_add_rms_norm(HostDevice(), n, d)


@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 16), (3, 5, 48), (4, 24, 256)])
def test_head_norms(n: int, heads: int, d: int) -> None:
    checks.check_head_rms_norm(HostDevice(), n, heads, d)


def test_no_rows() -> None:
    checks.check_no_rows(HostDevice())
