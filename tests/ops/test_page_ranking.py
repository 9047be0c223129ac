"""Moments of pages, stored queries and kernels/page_ranking.cu."""

from __future__ import annotations

import pytest

from luce.runtime.device import Device
from tests.support import op_checks_page_ranking as checks
from tests.support.devices import on_devices


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0"])
@on_devices("kv_heads, d", [(2, 64), (1, 512), (3, 96)])
def test_moments(device: Device, type: str, kv_heads: int, d: int) -> None:
    checks.check_moments(device, type, kv_heads, d)


@on_devices("heads, d", [(3, 64), (5, 80)])
def test_queries(device: Device, heads: int, d: int) -> None:
    checks.check_queries(device, heads, d)
