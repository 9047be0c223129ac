"""kernels/attention.cu, kernels/attention_mma.cu and kernels/kv.cu on the emulated device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest

from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device
from tests.support import op_checks_attention as checks
from tests.support.emulated import EmulatedDevice

DEVICES = {"wgmma": (32, ["F16", "BF16", "WGMMA"]), "mma": (32, ["F16", "BF16"]), "32": (32, []), "64": (64, [])}


@pytest.fixture(params=DEVICES)
def emulated(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    """Devices with products of tiles by four waves and by one, and of both lane counts without."""
    lanes, products = DEVICES[request.param]
    device = EmulatedDevice(lanes, products=products)
    yield device
    device.close()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"),
    [(1, 1, 16), (3, 3, 8), (6, 2, 48), (5, 1, 64), (7, 1, 80), (4, 4, 128), (17, 1, 24), (2, 1, 256), (3, 1, 512)],
)
def test_heads_of_all_sizes(emulated: Device, heads: int, kv_heads: int, d: int) -> None:
    checks.check_shape(emulated, heads, kv_heads, d, [(63, 3)])


@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(0, 65)],
        [(63, 1), (64, 1), (127, 1), (31, 1)],
        [(300, 1)],
        [(500, 1), (0, 20), (257, 3), (600, 1)],
        [(255, 2), (0, 1)],
        [(4093, 6)],
    ],
)
def test_spans_of_all_lengths(emulated: Device, lengths: Sequence[tuple[int, int]]) -> None:
    checks.check_shape(emulated, 4, 2, 16, lengths)


@pytest.mark.parametrize(("window", "position", "rows"), [(1, 70, 2), (32, 60, 9), (64, 640, 1), (100, 750, 20)])
def test_window(emulated: Device, window: int, position: int, rows: int) -> None:
    checks.check_window(emulated, window, position, rows)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "position", "window"),
    [(6, 2, 16, 130, None), (4, 4, 64, 63, 20), (8, 1, 128, 300, 70)],
)
def test_rows_that_see_each_other(
    emulated: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    checks.check_seen(emulated, heads, kv_heads, d, position, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "lengths", "each"),
    [
        (4, 2, 64, [(130, 1)], 64),
        (2, 1, 128, [(3, 2), (65, 1)], 1),
        (2, 1, 256, [(70, 5)], 256),
        (2, 2, 48, [(9, 1)], 48),
    ],
)
def test_gated(
    emulated: Device, heads: int, kv_heads: int, d: int, lengths: Sequence[tuple[int, int]], each: int
) -> None:
    checks.check_gated(emulated, heads, kv_heads, d, lengths, each)


def test_missing_pages(emulated: Device) -> None:
    checks.check_missing_pages(emulated)


def test_large_scores(emulated: Device) -> None:
    checks.check_sharp(emulated)


@pytest.mark.parametrize("stale", [math.nan, math.inf])
def test_rows_behind_the_end_are_not_read(emulated: Device, stale: float) -> None:
    chunks = [checks.Chunk(checks.History.random(p + n, 2, 1, 16, 1), p, n) for p, n in ((70, 3), (0, 1))]
    checks.check(emulated, chunks, stale=stale)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "position", "window"),
    [
        (6, 2, 16, 520, None),
        (1, 1, 64, 760, None),
        (2, 1, 256, 500, None),
        (3, 1, 512, 250, None),
        (8, 1, 32, 700, 200),
    ],
)
def test_rows_do_not_depend_on_their_neighbours(
    emulated: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    checks.check_rows_alone(emulated, heads, kv_heads, d, position, window)


@pytest.mark.parametrize(("n", "kv_heads", "d"), [(1, 1, 16), (70, 3, 48), (5, 2, 256)])
def test_write_kv(emulated: Device, n: int, kv_heads: int, d: int) -> None:
    checks.check_write_kv(emulated, n, kv_heads, d)


@pytest.mark.parametrize(
    ("k", "v", "heads", "kv_heads", "d"),
    [
        ("bf16", "bf16", 6, 2, 48),
        ("q8_0", "q8_0", 6, 2, 96),
        ("q4_0", "q4_0", 5, 1, 64),
        ("q8_0", "q4_0", 3, 3, 160),
        ("f16", "q8_0", 4, 2, 32),
        ("q4_0", "bf16", 2, 1, 320),
    ],
)
def test_types(emulated: Device, k: str, v: str, heads: int, kv_heads: int, d: int) -> None:
    checks.check_types(emulated, k, v, heads, kv_heads, d, [(63, 3), (300, 1)])


@pytest.mark.parametrize(("k", "v"), [("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q8_0")])
def test_write_types(emulated: Device, k: str, v: str) -> None:
    checks.check_write_types(emulated, k, v, 20, 3, 96)
    checks.check_write_types(emulated, k, v, 2, 1, 320)


@pytest.mark.parametrize(("k", "v", "d"), [("q8_0", "q8_0", 64), ("q4_0", "q4_0", 32)])
def test_rows_of_quantised_pages_do_not_depend_on_their_neighbours(emulated: Device, k: str, v: str, d: int) -> None:
    checks.check_rows_alone(emulated, 2, 1, d, 520, None, KVTypes(k, v))
