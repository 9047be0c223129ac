"""Attention over KV pages against float64: NumPy, luce/cpu_kernels/attention.py, kernels/attention.cu, attention_mma.cu
and kv.cu."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from luce.errors import UsageError
from luce.ops.attention import attention
from luce.ops.attention_mma import AttentionInputs
from luce.ops.kvtype import KVTypes
from luce.ops.qkv import Destination, write_kv
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE, PageView, SpanArrays
from tests.support import attention_inputs as inputs
from tests.support import op_checks_attention as checks
from tests.support.devices import ATTENTION_EMULATED, ATTENTION_GPU, COMPILED
from tests.support.devices import on_devices as on_plain_devices

on_devices = functools.partial(on_plain_devices, emulated_devices=ATTENTION_EMULATED, gpu_devices=ATTENTION_GPU)
Lengths = Sequence[tuple[int, int]]


@on_devices(
    "heads, kv_heads, d, lengths",
    host=[(*sizes, [(63, 3)]) for sizes in [(1, 1, 16), (3, 3, 8), (6, 2, 48), (7, 1, 80), (2, 1, 512)]],
    emulated=[
        (*sizes, [(63, 3)])
        for sizes in [
            *[(1, 1, 16), (3, 3, 8), (6, 2, 48), (5, 1, 64), (7, 1, 80)],
            *[(4, 4, 128), (17, 1, 24), (2, 1, 256), (3, 1, 512), (3, 1, 576)],
        ]
    ],
    gpu=[
        (*sizes, [(63, 3), (250, 1)])
        for sizes in [
            *[(1, 1, 16), (6, 2, 48), (5, 1, 64), (7, 1, 80)],
            *[(32, 8, 128), (17, 1, 24), (24, 4, 256), (8, 1, 512), (128, 1, 576)],
        ]
    ],
)
def test_heads_of_all_sizes(device: Device, heads: int, kv_heads: int, d: int, lengths: Lengths) -> None:
    checks.check_shape(device, heads, kv_heads, d, lengths)


@on_devices(
    "lengths, d",
    host=[
        ([(0, 1)], 16),
        ([(0, 65)], 16),
        ([(63, 1), (64, 1), (127, 1), (31, 1)], 16),
        ([(500, 1), (0, 20), (257, 3), (600, 1)], 16),
        ([(2100, 1), (1023, 3), (40, 1)], 16),
    ],
    emulated=[
        ([(0, 1)], 16),
        ([(0, 65)], 16),
        ([(63, 1), (64, 1), (127, 1), (31, 1)], 16),
        ([(300, 1)], 16),
        ([(500, 1), (0, 20), (257, 3), (600, 1)], 16),
        ([(255, 2), (0, 1)], 16),
        ([(4093, 6)], 16),
    ],
    gpu=[
        ([(0, 1)], 64),
        ([(0, 300)], 64),
        ([(63, 1), (64, 1), (127, 1), (31, 1)], 64),
        ([(5000, 1)], 64),
        ([(500, 1), (0, 200), (257, 3), (2047, 1)], 64),
        ([(p, 1) for p in range(0, 2000, 31)], 64),
    ],
)
def test_spans_of_all_lengths(device: Device, lengths: Lengths, d: int) -> None:
    checks.check_shape(device, 4, 2, d, lengths)


@on_devices(
    "window, position, rows",
    [(1, 70, 2), (32, 60, 9), (64, 640, 1), (100, 750, 20)],
    gpu=[(1, 70, 2), (512, 3000, 1), (100, 750, 200)],
)
def test_window(device: Device, window: int, position: int, rows: int) -> None:
    checks.check_window(device, window, position, rows)


@on_devices(
    "heads, kv_heads, d, position, window",
    [(6, 2, 16, 130, None), (4, 4, 64, 63, 20), (8, 1, 128, 300, 70)],
    host=[
        (6, 2, 16, 130, None),
        (4, 4, 64, 63, 20),
        (8, 1, 128, 300, 70),
        (6, 2, 16, 1015, None),
        (6, 2, 24, 130, 70),
    ],
    gpu=[
        (6, 2, 16, 130, None),
        (4, 4, 64, 63, 20),
        (32, 8, 128, 4090, None),
        (24, 4, 256, 5000, 2048),
        (8, 1, 512, 300, 70),
    ],
)
def test_rows_that_see_each_other(
    device: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    checks.check_seen(device, heads, kv_heads, d, position, window)


@on_devices(
    "heads, kv_heads, d, lengths, each",
    host=[],
    emulated=[
        (4, 2, 64, [(130, 1)], 64),
        (2, 1, 128, [(3, 2), (65, 1)], 1),
        (2, 1, 256, [(70, 5)], 256),
        (2, 2, 48, [(9, 1)], 48),
    ],
    gpu=[(24, 4, 256, [(1000, 1)], 256), (16, 2, 256, [(3, 2), (65, 5)], 1), (64, 8, 128, [(70, 16)], 128)],
)
def test_gated(device: Device, heads: int, kv_heads: int, d: int, lengths: Lengths, each: int) -> None:
    checks.check_gated(device, heads, kv_heads, d, lengths, each)


@on_devices(
    "heads, kv_heads, d, lengths, softcap, sinks, window",
    [
        (4, 2, 32, [(130, 2), (3, 1)], 5.0, False, None),
        (4, 2, 64, [(130, 1), (0, 20)], 0.0, True, 70),
        (6, 2, 16, [(300, 3), (0, 1)], 4.0, True, None),
        (2, 1, 256, [(130, 2), (60, 20)], 5.0, True, 100),
    ],
    host=[
        (4, 2, 32, [(130, 2), (3, 1)], 5.0, False, None),
        (4, 2, 64, [(130, 1), (0, 20)], 0.0, True, 70),
        (6, 2, 16, [(300, 3), (0, 1)], 4.0, True, None),
        # No compiled code takes these heads.
        (6, 2, 24, [(300, 3), (0, 20)], 4.0, True, 70),
        (4, 1, 520, [(70, 1)], 0.0, True, None),
    ],
    gpu=[
        (8, 4, 256, [(1000, 1), (0, 1), (100, 300)], 50.0, False, None),
        (32, 16, 128, [(5000, 2), (100, 70)], 5.0, False, 4096),
        (64, 8, 64, [(1000, 1), (3, 16), (0, 500)], 0.0, True, 128),
        (64, 8, 64, [(5000, 1), (0, 500)], 0.0, True, None),
        (8, 2, 128, [(700, 9)], 4.0, True, None),
    ],
)
def test_softcap_and_sinks(
    device: Device,
    heads: int,
    kv_heads: int,
    d: int,
    lengths: Lengths,
    softcap: float,
    sinks: bool,
    window: int | None,
) -> None:
    checks.check_bent(device, heads, kv_heads, d, lengths, softcap=softcap, sinks=sinks, window=window)


@on_devices()
def test_missing_pages(device: Device) -> None:
    checks.check_missing_pages(device)


@on_devices()
def test_large_scores(device: Device) -> None:
    checks.check_sharp(device)


@pytest.mark.parametrize("stale", [math.nan, math.inf])
@on_devices(
    "heads, kv_heads, d, rows",
    host=[],
    emulated=[(2, 1, 16, 3), (1, 1, 64, 20), (1, 1, 160, 20)],
    gpu=[(8, 2, 128, 30), (6, 1, 160, 30), (6, 1, 256, 30)],
)
def test_rows_behind_the_end_are_not_read(
    device: Device, heads: int, kv_heads: int, d: int, rows: int, stale: float
) -> None:
    checks.check_stale(device, heads, kv_heads, d, rows, stale)


@on_devices("position, rows", host=[], emulated=[], gpu=[(0, 512), (8000, 64), (130_000, 1)])
def test_agrees_with_the_reference(device: Device, position: int, rows: int) -> None:
    chunks = [inputs.Chunk(inputs.History.random(position + rows, 8, 2, 64, 2), position, rows)]
    actual = inputs.run(device, chunks, scale=0.125, window=None)
    rounded = inputs.rounded_queries(device, chunks, 0.125)
    want = inputs.run(HostDevice(), rounded, scale=0.125, window=None)
    np.testing.assert_allclose(actual, want, rtol=0, atol=1e-3 if device.products else 2e-5)


@on_devices(
    "heads, kv_heads, d, position, window",
    # From 1024 positions on, pages are in several runs.
    host=[
        (6, 2, 16, 130, None),
        (9, 3, 64, 250, 100),
        (64, 1, 80, 60, None),
        (2, 2, 512, 30, None),
        (6, 2, 16, 2010, None),
        (3, 1, 48, 2200, 1150),
    ],
    host_devices=COMPILED,
    emulated=[],
    gpu=[],
)
def test_rows_of_a_prompt_do_not_depend_on_their_neighbours(
    device: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    checks.check_rows_of_a_prompt(device, heads, kv_heads, d, position, window)


@on_devices(
    "heads, kv_heads, d, position, window",
    host=[(6, 2, 16, 520, None), (8, 1, 32, 300, 200), (6, 2, 16, 1020, None), (8, 1, 32, 3000, 1900)],
    host_devices=COMPILED,
    emulated=[
        (6, 2, 16, 520, None),
        (1, 1, 64, 760, None),
        (2, 1, 256, 500, None),
        (3, 1, 512, 250, None),
        (2, 1, 576, 500, None),
        (8, 1, 32, 700, 200),
    ],
    gpu=[
        (6, 2, 16, 520, None),
        (32, 8, 128, 4000, None),
        (24, 4, 256, 2500, None),
        (24, 4, 256, 4088, None),
        (16, 2, 256, 16377, None),
        (12, 2, 128, 5300, 4200),
        (8, 1, 512, 900, None),
        (16, 1, 576, 900, None),
        (8, 1, 32, 700, 200),
        (16, 2, 64, 9000, 1024),
    ],
)
def test_rows_do_not_depend_on_their_neighbours(
    device: Device, heads: int, kv_heads: int, d: int, position: int, window: int | None
) -> None:
    checks.check_rows_alone(device, heads, kv_heads, d, position, window)


@on_devices(
    "n, kv_heads, d",
    host=[(1, 1, 16), (70, 3, 48)],
    emulated=[(1, 1, 16), (70, 3, 48), (5, 2, 256), (3, 1, 576)],
    gpu=[(1, 1, 16), (192, 3, 48), (128, 8, 128), (5, 4, 256), (100, 1, 576)],
)
def test_write_kv(device: Device, n: int, kv_heads: int, d: int) -> None:
    checks.check_write_kv(device, n, kv_heads, d)


PAIRS = [
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("q8_0", "q8_0"),
    ("q4_0", "q4_0"),
    ("q8_0", "q4_0"),
    ("f16", "q8_0"),
    ("q4_0", "bf16"),
]


@on_devices(
    "k, v, heads, kv_heads, d, lengths",
    host=[(*pair, 6, 2, 64, [(63, 3), (300, 1)]) for pair in PAIRS[:6]],
    emulated=[
        (*case, [(63, 3), (300, 1)])
        for case in [
            ("bf16", "bf16", 6, 2, 48),
            ("q8_0", "q8_0", 6, 2, 96),
            ("q4_0", "q4_0", 5, 1, 64),
            ("q8_0", "q4_0", 3, 3, 160),
            ("f16", "q8_0", 4, 2, 32),
            ("q4_0", "bf16", 2, 1, 320),
        ]
    ],
    gpu=[
        (*pair, *sizes, [(63, 3), (1000, 1), (250, 70)])
        for pair, sizes in itertools.product(PAIRS, [(6, 2, 96), (32, 8, 128), (24, 4, 256), (8, 1, 512)])
    ],
)
def test_types(device: Device, k: str, v: str, heads: int, kv_heads: int, d: int, lengths: Lengths) -> None:
    checks.check_types(device, k, v, heads, kv_heads, d, lengths)


@on_devices(
    "k, v, shapes",
    host=[(*pair, [(20, 3, 96)]) for pair in PAIRS[:6]],
    emulated=[(*pair, [(20, 3, 96), (2, 1, 320)]) for pair in (*PAIRS[1:4], PAIRS[5])],
    gpu=[(*pair, [shape]) for pair, shape in itertools.product(PAIRS, [(20, 3, 96), (192, 8, 128), (5, 1, 512)])],
)
def test_write_types(device: Device, k: str, v: str, shapes: list[tuple[int, int, int]]) -> None:
    for n, kv_heads, d in shapes:
        checks.check_write_types(device, k, v, n, kv_heads, d)


@on_devices(
    "k, v, heads, kv_heads, d, position",
    host=[],
    emulated=[("q8_0", "q8_0", 2, 1, 64, 520), ("q4_0", "q4_0", 2, 1, 32, 520)],
    gpu=[(*pair, 32, 8, 128, 2000) for pair in PAIRS[1:]],
)
def test_rows_of_other_types_do_not_depend_on_their_neighbours(
    device: Device, k: str, v: str, heads: int, kv_heads: int, d: int, position: int
) -> None:
    checks.check_rows_alone(device, heads, kv_heads, d, position, None, KVTypes(k, v))


def test_types_of_pools() -> None:
    layout = KVTypes("q8_0", "q4_0").layout(HostDevice(), 96)
    assert layout == ((np.dtype(np.uint8), 3 * 34), (np.dtype(np.uint8), 3 * 18))
    assert KVTypes("bf16").layout(HostDevice(), 8) == ((np.dtype(np.uint16), 8), (np.dtype(np.float32), 8))


@pytest.mark.parametrize(("kv", "param"), [(KVTypes("q8_0", "f16"), "k"), (KVTypes("f16", "q4_0"), "v")])
def test_head_that_blocks_do_not_divide(kv: KVTypes, param: str) -> None:
    with pytest.raises(UsageError, match=f"--cache-type-{param} q[48]_0: the model's heads have 80 values") as raised:
        kv.layout(HostDevice(), 80)
    assert raised.value.param == f"cache_type_{param}"


@on_devices(host=[], emulated=[])
def test_pools_of_more_than_2_31_elements(device: Device) -> None:
    heads, d, pages = 8, 512, 2**31 // (8 * 512 * PAGE) + 2
    if device.memory().free < 10 << 30:
        pytest.skip("needs 10 GiB of device memory")
    k_pool, v_pool = (device.zeros((pages * PAGE, heads, d), np.float16) for _ in range(2))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, heads, d)).astype(np.float16).astype(np.float32) for _ in range(2))
    dest = device.upload(np.array([pages * PAGE - PAGE, pages * PAGE - PAGE + 1], np.int32))
    write_kv(device, device.upload(k), device.upload(v), Destination(k_pool, v_pool, dest))
    table = device.upload(np.array([[pages - 1]], np.int32))
    inputs = AttentionInputs(
        device.upload(k),
        k_pool,
        v_pool,
        SpanArrays(device.upload(np.array([[0, 0, 2, 0]], np.int32)), device.zeros(2, np.int32), count=1, longest=2),
        PageView(table, device.zeros((1, 1), np.int32), device.upload(np.ones(1, np.int32)), dest),
        device.upload(np.arange(2, dtype=np.int32)),
        scale=1.0,
        window=None,
    )
    # A key's product with itself is about 512, with the other about 0: each row takes its own value.
    np.testing.assert_allclose(device.download(attention(device, inputs)), v, rtol=0, atol=1e-6)
