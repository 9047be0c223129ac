"""kernels/qkv.cu on a GPU."""

from __future__ import annotations

import pytest

from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device
from tests.support import op_checks_heads as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "d", "half", "normed"),
    [(1, 24, 4, 256, 32, "qk"), (100, 5, 2, 80, 40, ""), (16, 2, 1, 512, 256, "qkv"), (4, 64, 8, 128, 64, "k")],
)
def test_prepared(
    gpu: Device, n: int, heads: int, kv_heads: int, d: int, half: int, normed: str, adjacent: bool
) -> None:
    checks.check_prepared(gpu, n, heads, kv_heads, d, half, normed=normed, adjacent=adjacent)


@pytest.mark.parametrize(
    ("k", "v"), [("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"), ("f16", "q8_0")]
)
def test_blocks(gpu: Device, k: str, v: str) -> None:
    checks.check_blocks(gpu, k, v)


def test_rows_do_not_depend_on_their_neighbours(gpu: Device) -> None:
    checks.check_rows_alone(gpu, 3, 32)


@pytest.mark.parametrize(
    ("kv_heads", "d", "k", "v"), [(4, 256, "auto", "auto"), (1, 32, "q4_0", "q8_0"), (1, 6, "bf16", "auto")]
)
def test_copies(gpu: Device, kv_heads: int, d: int, k: str, v: str) -> None:
    checks.check_copies(gpu, kv_heads, d, KVTypes(k, v))
