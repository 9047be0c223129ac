"""kernels/page_ranking.cu on a GPU."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support import op_checks_rank as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("kv_heads", "d"), [(2, 64), (1, 512), (3, 96)])
def test_moments(gpu: Device, type: str, kv_heads: int, d: int) -> None:
    checks.check_moments(gpu, type, kv_heads, d)


@pytest.mark.parametrize(("heads", "d"), [(3, 64), (5, 80)])
def test_queries(gpu: Device, heads: int, d: int) -> None:
    checks.check_queries(gpu, heads, d)
