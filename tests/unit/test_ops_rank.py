"""The NumPy reference of luce.ops.page_ranking."""

from __future__ import annotations

import pytest

from luce.runtime.host import HostDevice
from tests.support import op_checks_rank as checks


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("kv_heads", "d"), [(2, 64), (1, 512), (3, 96)])
def test_moments(type: str, kv_heads: int, d: int) -> None:
    checks.check_moments(HostDevice(), type, kv_heads, d)


@pytest.mark.parametrize(("heads", "d"), [(3, 64), (5, 80)])
def test_queries(heads: int, d: int) -> None:
    checks.check_queries(HostDevice(), heads, d)
