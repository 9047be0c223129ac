"""Attention of a text's last rows and kernels/tail_attention.cu."""

from __future__ import annotations

import pytest

from luce.ops.tail_attention import HEADS
from luce.runtime.device import Device
from tests.support import op_checks_tail_attention as checks
from tests.support.devices import on_devices

SHAPE = (4, 2, 32)


@pytest.mark.parametrize("rotation", checks.ROTATIONS)
@on_devices("n, rows", [(50, 8), (8, 8), (1, 1), (35, 3)], gpu=[(50, 8), (1, 1), (5000, 8)])
def test_rotations_and_lengths(device: Device, n: int, rows: int, rotation: str) -> None:
    checks.check_weights(device, "f16", SHAPE, n, rows, rotation)


# Heads in one launch: all, some of a group, and some of two groups.
@on_devices("heads, kv_heads, d", [(2 * HEADS + 3, 1, 32), (6, 6, 16), (18, 3, 64), (2, 1, 576)])
def test_heads(device: Device, heads: int, kv_heads: int, d: int) -> None:
    checks.check_weights(device, "f16", (heads, kv_heads, d), 21, 2, "halves")


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0"])
@on_devices()
def test_types_of_keys(device: Device, type: str) -> None:
    checks.check_weights(device, type, SHAPE, 40, 8, "halves")
