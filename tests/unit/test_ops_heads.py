"""The NumPy reference of luce.ops.qkv."""

from __future__ import annotations

import pytest

from luce.ops.kvtype import KVTypes
from luce.runtime.host import HostDevice
from tests.support import op_checks_heads as checks


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "d", "half", "normed"),
    [(1, 3, 1, 48, 5, "qk"), (3, 5, 2, 80, 40, ""), (2, 2, 1, 512, 256, "qkv"), (4, 1, 1, 64, 16, "k")],
)
def test_prepared(n: int, heads: int, kv_heads: int, d: int, half: int, normed: str, adjacent: bool) -> None:
    checks.check_prepared(HostDevice(), n, heads, kv_heads, d, half, normed=normed, adjacent=adjacent)


@pytest.mark.parametrize(
    ("k", "v"), [("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"), ("f16", "q8_0")]
)
def test_blocks(k: str, v: str) -> None:
    checks.check_blocks(HostDevice(), k, v)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    checks.check_rows_alone(HostDevice(), 3, 32)


@pytest.mark.parametrize(
    ("kv_heads", "d", "k", "v"), [(4, 256, "auto", "auto"), (1, 32, "q4_0", "q8_0"), (1, 6, "bf16", "auto")]
)
def test_copies(kv_heads: int, d: int, k: str, v: str) -> None:
    checks.check_copies(HostDevice(), kv_heads, d, KVTypes(k, v))
