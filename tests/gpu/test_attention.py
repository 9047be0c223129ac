"""kernels/attention.cu, kernels/attention_mma.cu and kernels/kv.cu on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from luce.ops.attention import attention
from luce.ops.kvtype import KVTypes
from luce.ops.qkv import Destination, write_kv
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE, PageView, SpanArrays
from tests.support import op_checks_attention as checks

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["as it is", "portable"])
def gpu(gpu: Device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The GPU by what its products allow, and by the portable path."""
    if request.param == "portable":
        monkeypatch.setattr(gpu, "products", frozenset())
    return gpu


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"),
    [(1, 1, 16), (6, 2, 48), (5, 1, 64), (7, 1, 80), (32, 8, 128), (17, 1, 24), (24, 4, 256), (8, 1, 512)],
)
def test_heads_of_all_sizes(gpu: Device, heads: int, kv_heads: int, d: int) -> None:
    checks.check_shape(gpu, heads, kv_heads, d, [(63, 3), (250, 1)])


@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(0, 300)],
        [(63, 1), (64, 1), (127, 1), (31, 1)],
        [(5000, 1)],
        [(500, 1), (0, 200), (257, 3), (2047, 1)],
        [(p, 1) for p in range(0, 2000, 31)],
    ],
)
def test_spans_of_all_lengths(gpu: Device, lengths: Sequence[tuple[int, int]]) -> None:
    checks.check_shape(gpu, 4, 2, 64, lengths)


@pytest.mark.parametrize(("window", "position", "rows"), [(1, 70, 2), (512, 3000, 1), (100, 750, 200)])
def test_window(gpu: Device, window: int, position: int, rows: int) -> None:
    checks.check_window(gpu, window, position, rows)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "position", "window"),
    [
        (6, 2, 16, 130, None),
        (4, 4, 64, 63, 20),
        (32, 8, 128, 4090, None),
        (24, 4, 256, 5000, 2048),
        (8, 1, 512, 300, 70),
    ],
)
def test_rows_that_see_each_other(
    gpu: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    checks.check_seen(gpu, heads, kv_heads, d, position, window)


def test_missing_pages(gpu: Device) -> None:
    checks.check_missing_pages(gpu)


def test_large_scores(gpu: Device) -> None:
    checks.check_sharp(gpu)


@pytest.mark.parametrize("stale", [math.nan, math.inf])
def test_rows_behind_the_end_are_not_read(gpu: Device, stale: float) -> None:
    chunks = [checks.Chunk(checks.History.random(p + n, 8, 2, 128, 1), p, n) for p, n in ((70, 30), (0, 1))]
    checks.check(gpu, chunks, stale=stale)


@pytest.mark.parametrize(("position", "rows"), [(0, 512), (8000, 64), (130_000, 1)])
def test_agrees_with_the_reference(gpu: Device, position: int, rows: int) -> None:
    chunks = [checks.Chunk(checks.History.random(position + rows, 8, 2, 64, 2), position, rows)]
    actual = checks.run(gpu, chunks, scale=0.125, window=None)
    rounded = checks.rounded_queries(gpu, chunks, 0.125)
    want = checks.run(HostDevice(), rounded, scale=0.125, window=None)
    np.testing.assert_allclose(actual, want, rtol=0, atol=1e-3 if gpu.products else 2e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "position", "window"),
    [
        (6, 2, 16, 520, None),
        (32, 8, 128, 4000, None),
        (24, 4, 256, 2500, None),
        (24, 4, 256, 4088, None),
        (16, 2, 256, 16377, None),
        (12, 2, 128, 5300, 4200),
        (8, 1, 512, 900, None),
        (8, 1, 32, 700, 200),
        (16, 2, 64, 9000, 1024),
    ],
)
def test_rows_do_not_depend_on_their_neighbours(
    gpu: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    checks.check_rows_alone(gpu, heads, kv_heads, d, position, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "lengths", "each"),
    [(24, 4, 256, [(1000, 1)], 256), (16, 2, 256, [(3, 2), (65, 5)], 1), (64, 8, 128, [(70, 16)], 128)],
)
def test_gated(gpu: Device, heads: int, kv_heads: int, d: int, lengths: list[tuple[int, int]], each: int) -> None:
    checks.check_gated(gpu, heads, kv_heads, d, lengths, each)


@pytest.mark.parametrize(("n", "kv_heads", "d"), [(1, 1, 16), (192, 3, 48), (128, 8, 128), (5, 4, 256)])
def test_write_kv(gpu: Device, n: int, kv_heads: int, d: int) -> None:
    checks.check_write_kv(gpu, n, kv_heads, d)


PAIRS = [
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("q8_0", "q8_0"),
    ("q4_0", "q4_0"),
    ("q8_0", "q4_0"),
    ("f16", "q8_0"),
    ("q4_0", "bf16"),
]


@pytest.mark.parametrize(("k", "v"), PAIRS)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(6, 2, 96), (32, 8, 128), (24, 4, 256), (8, 1, 512)])
def test_types(gpu: Device, k: str, v: str, heads: int, kv_heads: int, d: int) -> None:
    checks.check_types(gpu, k, v, heads, kv_heads, d, [(63, 3), (1000, 1), (250, 70)])


@pytest.mark.parametrize(("k", "v"), PAIRS)
@pytest.mark.parametrize(("n", "kv_heads", "d"), [(20, 3, 96), (192, 8, 128), (5, 1, 512)])
def test_write_types(gpu: Device, k: str, v: str, n: int, kv_heads: int, d: int) -> None:
    checks.check_write_types(gpu, k, v, n, kv_heads, d)


@pytest.mark.parametrize(("k", "v"), PAIRS[1:])
def test_rows_of_other_types_do_not_depend_on_their_neighbours(gpu: Device, k: str, v: str) -> None:
    checks.check_rows_alone(gpu, 32, 8, 128, 2000, None, KVTypes(k, v))


def test_pools_of_more_than_2_31_elements(gpu: Device) -> None:
    heads, d, pages = 8, 512, 2**31 // (8 * 512 * PAGE) + 2
    if gpu.memory().free < 10 << 30:
        pytest.skip("needs 10 GiB of device memory")
    k_pool, v_pool = (gpu.zeros((pages * PAGE, heads, d), np.float16) for _ in range(2))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, heads, d)).astype(np.float16).astype(np.float32) for _ in range(2))
    dest = gpu.upload(np.array([pages * PAGE - PAGE, pages * PAGE - PAGE + 1], np.int32))
    write_kv(gpu, gpu.upload(k), gpu.upload(v), Destination(k_pool, v_pool, dest))
    table = gpu.upload(np.array([[pages - 1]], np.int32))
    out = attention(
        gpu,
        gpu.upload(k),
        k_pool,
        v_pool,
        SpanArrays(gpu.upload(np.array([[0, 0, 2, 0]], np.int32)), gpu.zeros(2, np.int32), count=1, longest=2),
        PageView(table, gpu.zeros((1, 1), np.int32), gpu.upload(np.ones(1, np.int32)), dest),
        gpu.upload(np.arange(2, dtype=np.int32)),
        scale=1.0,
        window=None,
    )
    # A key's product with itself is about 512, with the other about 0: each row takes its own value.
    np.testing.assert_allclose(gpu.download(out), v, rtol=0, atol=1e-6)
