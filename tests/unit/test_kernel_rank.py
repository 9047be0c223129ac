"""kernels/page_ranking.cu on the emulated device."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support import op_checks_rank as checks


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("kv_heads", "d"), [(2, 64), (1, 512), (3, 96)])
def test_moments(emulated: Device, type: str, kv_heads: int, d: int) -> None:
    checks.check_moments(emulated, type, kv_heads, d)


@pytest.mark.parametrize(("heads", "d"), [(3, 64), (5, 80)])
def test_queries(emulated: Device, heads: int, d: int) -> None:
    checks.check_queries(emulated, heads, d)
