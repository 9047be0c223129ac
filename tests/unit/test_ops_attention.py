"""The NumPy attention against float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from luce.errors import UsageError
from luce.ops.kvtype import KVTypes
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "position", "window"),
    [(6, 2, 16, 130, None), (4, 4, 64, 63, 20), (8, 1, 128, 300, 70)],
)
def test_rows_that_see_each_other(heads: int, kv_heads: int, d: int, position: int, window: int | None) -> None:
    checks.check_seen(HostDevice(), heads, kv_heads, d, position, window)


def test_missing_pages() -> None:
    checks.check_missing_pages(HostDevice())


def test_large_scores() -> None:
    checks.check_sharp(HostDevice())


@pytest.mark.parametrize(("n", "kv_heads", "d"), [(1, 1, 16), (70, 3, 48)])
def test_write_kv(n: int, kv_heads: int, d: int) -> None:
    checks.check_write_kv(HostDevice(), n, kv_heads, d)


@pytest.mark.parametrize(
    ("k", "v"),
    [("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q8_0")],
)
def test_types(k: str, v: str) -> None:
    checks.check_types(HostDevice(), k, v, 6, 2, 64, [(63, 3), (300, 1)])
    checks.check_write_types(HostDevice(), k, v, 20, 3, 96)


def test_types_of_pools() -> None:
    layout = KVTypes("q8_0", "q4_0").layout(HostDevice(), 96)
    assert layout == ((np.dtype(np.uint8), 3 * 34), (np.dtype(np.uint8), 3 * 18))
    assert KVTypes("bf16").layout(HostDevice(), 8) == ((np.dtype(np.uint16), 8), (np.dtype(np.float32), 8))


@pytest.mark.parametrize(("kv", "param"), [(KVTypes("q8_0", "f16"), "k"), (KVTypes("f16", "q4_0"), "v")])
def test_head_that_blocks_do_not_divide(kv: KVTypes, param: str) -> None:
    with pytest.raises(UsageError, match=f"--cache-type-{param} q[48]_0: the model's heads have 80 values") as raised:
        kv.layout(HostDevice(), 80)
    assert raised.value.param == f"cache_type_{param}"
