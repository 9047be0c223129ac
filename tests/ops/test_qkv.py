"""Query, key and value heads before attention, and kernels/qkv.cu."""

from __future__ import annotations

import pytest

from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device
from tests.support import op_checks_qkv as checks
from tests.support.devices import on_devices


@pytest.mark.parametrize("adjacent", [False, True])
@on_devices(
    "n, heads, kv_heads, d, half, normed",
    [
        (1, 3, 1, 48, 5, "qk"),
        (3, 5, 2, 80, 40, ""),
        (2, 2, 1, 512, 256, "qkv"),
        (4, 1, 1, 64, 16, "k"),
        (2, 3, 1, 48, 0, "q"),
        (3, 3, 1, 128, 64, "qk"),
        (2, 2, 1, 256, 32, "qv"),
    ],
    gpu=[
        (1, 24, 4, 256, 32, "qk"),
        (100, 5, 2, 80, 40, ""),
        (16, 2, 1, 512, 256, "qkv"),
        (4, 64, 8, 128, 64, "k"),
        (20, 16, 4, 128, 0, ""),
    ],
)
def test_prepared(
    device: Device, n: int, heads: int, kv_heads: int, d: int, half: int, normed: str, adjacent: bool
) -> None:
    checks.check_prepared(device, n, heads, kv_heads, d, half, normed=normed, adjacent=adjacent)


@pytest.mark.parametrize("d", [64, 128])
@on_devices("k, v", [("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"), ("f16", "q8_0")])
def test_quantised_pools(device: Device, k: str, v: str, d: int) -> None:
    checks.check_quantised_pools(device, k, v, d)


@on_devices()
def test_rows_do_not_depend_on_their_neighbours(device: Device) -> None:
    checks.check_rows_alone(device, 3, 32)


@on_devices("kv_heads, d, k, v", [(4, 256, "auto", "auto"), (1, 32, "q4_0", "q8_0"), (1, 6, "bf16", "auto")])
def test_copies(device: Device, kv_heads: int, d: int, k: str, v: str) -> None:
    checks.check_copies(device, kv_heads, d, KVTypes(k, v))


@on_devices("d, k", [(64, "auto"), (32, "q8_0")])
def test_keys_alone(device: Device, d: int, k: str) -> None:
    checks.check_keys_alone(device, d, KVTypes(k, k))


@on_devices(
    "n, heads, kv_heads, d, half, normed",
    host=[],
    emulated=[(3, 3, 1, 128, 64, "qk"), (4, 2, 2, 80, 0, ""), (2, 2, 1, 256, 32, "qkv")],
    gpu=[(100, 24, 4, 256, 32, "qk"), (17, 5, 2, 80, 40, "")],
)
def test_prepared_halves(device: Device, n: int, heads: int, kv_heads: int, d: int, half: int, normed: str) -> None:
    checks.check_halves(device, n, heads, kv_heads, d, half, normed=normed)
