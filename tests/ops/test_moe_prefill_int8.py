"""Experts' products of int8 rows (kernels/moe_prefill_int8.cu), and how their weights are placed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from luce.models.spec import Activation
from luce.ops import moe_prefill_int8
from luce.ops.int8_rows import to_int8
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.moe import combine
from luce.ops.weight import upload_experts
from luce.runtime.device import Device
from tests.support import op_checks_moe_prefill_int8 as checks
from tests.support.devices import on_devices
from tests.support.op_checks_activation import gated
from tests.support.op_checks_moe import random_ids
from tests.support.quant_blocks import random_tensor

F32 = np.float32
#: the device whose kernels these are
WGMMA = ("emulated, wgmma",)


@on_devices(
    "types, n, k, experts, inner, cols, activation",
    host=[],
    emulated=[
        (("Q4_K", "Q6_K"), 150, 2, 3, 40, 256, "silu"),
        # One tensor, and gates that fill neither a run of eight nor a block; more slices than stay in shared memory.
        (("Q8_0",), 144, 1, 4, 77, 672, "gelu"),
        # An expert whose rows take several tiles.
        (("Q4_K",), 300, 1, 2, 9, 256, "silu"),
    ],
    gpu=[
        (("Q4_K", "Q4_K"), 2048, 8, 64, 512, 2048, "silu"),
        (("Q6_K",), 600, 4, 20, 384, 768, "gelu"),
    ],
    emulated_devices=WGMMA,
)
def test_gates(
    device: Device,
    types: tuple[str, ...],
    n: int,
    k: int,
    experts: int,
    inner: int,
    cols: int,
    activation: Activation,
) -> None:
    checks.check_gates(device, types, n, k, experts=experts, inner=inner, cols=cols, activation=activation)


@on_devices(
    "parts, n, k, experts, cols",
    host=[],
    emulated=[
        # Rows that stay for all turns, whose last one is not whole.
        ([("Q8_0", 590)], 144, 1, 4, 160),
        # Two types; slices that do not stay, the last one not whole.
        ([("Q4_0", 18), ("Q6_K", 130)], 40, 3, 9, 768),
        ([("Q8_0", 66)], 33, 1, 3, 544),
        # Fewer slices than are on their way.
        ([("Q8_0", 300)], 40, 1, 3, 96),
    ],
    gpu=[
        ([("Q6_K", 2048)], 2048, 8, 64, 512),
        ([("Q4_K", 1024), ("Q6_K", 514)], 700, 4, 12, 1280),
    ],
    emulated_devices=WGMMA,
)
def test_products_have_exact_sums(
    device: Device, parts: list[tuple[str, int]], n: int, k: int, experts: int, cols: int
) -> None:
    checks.check_products(device, parts, random_ids(n, k, experts), experts=experts, cols=cols)


@on_devices(
    "sizes", host=[], emulated=[(1, 17, 40, 64), (65, 95, 112, 128)], gpu=[range(1, 140)], emulated_devices=WGMMA
)
def test_tiles_of_all_sizes(device: Device, sizes: tuple[int, ...]) -> None:
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))[:, None]
    checks.check_products(device, [("Q8_0", 64)], ids, experts=len(sizes) + 1, cols=256)


@on_devices("slices", [1, 3], host=[], emulated_devices=WGMMA)
def test_copies_made_in_parts(device: Device, slices: int) -> None:
    """Which end within an expert."""
    with mock.patch.object(moe_prefill_int8, "BUFFER_BYTES", 3 * 256 * 40 * slices):
        checks.check_gates(device, ("Q8_0", "Q4_0"), 144, 1, experts=3, inner=34, cols=256)


@on_devices(
    "n, k, experts, inner, hidden",
    host=[],
    emulated=[(144, 2, 4, 256, 512)],
    gpu=[(500, 8, 64, 512, 2048)],
    emulated_devices=WGMMA,
)
def test_the_error_of_a_layer(device: Device, n: int, k: int, experts: int, inner: int, hidden: int) -> None:
    """Against float64 of gguf's values: three products, each of two rounded factors of about 3e-5."""
    gate_up, down, (gates, ups, downs) = checks.layer_weights(device, experts=experts, inner=inner, hidden=hidden)
    x = np.random.default_rng(n).standard_normal((n, hidden)).astype(F32) / 8
    ids, weights = random_ids(n, k, experts), np.random.default_rng(k).random((n, k)).astype(F32)
    actual = checks.layer(device, x, ids, weights, gate_up, down, experts)
    exact = np.zeros((n, hidden))
    for row, slot in np.ndindex(n, k):
        expert = ids[row, slot]
        gate, up = gates[expert] @ x[row].astype(np.float64), ups[expert] @ x[row].astype(np.float64)
        exact[row] += weights[row, slot] * (downs[expert] @ (gated(gate, up, "silu")))
    error = ((actual - exact) ** 2).mean() / (exact**2).mean()
    assert 5e-5 < error < 1e-3, error


@on_devices(
    "n, experts, inner, hidden",
    host=[],
    emulated=[(144, 3, 256, 256)],
    gpu=[(500, 20, 512, 2048)],
    emulated_devices=WGMMA,
)
def test_rows_do_not_depend_on_their_neighbours(device: Device, n: int, experts: int, inner: int, hidden: int) -> None:
    gate_up, down, _ = checks.layer_weights(device, experts=experts, inner=inner, hidden=hidden)
    rng = np.random.default_rng(n)
    x, weights = rng.standard_normal((2 * n, hidden)).astype(F32), rng.random((2 * n, 2)).astype(F32)
    ids = random_ids(2 * n, 2, experts)

    def run(chosen: Any) -> Any:
        return checks.layer(device, x[chosen], ids[chosen], weights[chosen], gate_up, down, experts)

    whole = run(np.s_[:])
    np.testing.assert_array_equal(run(np.s_[:n]), whole[:n])
    turned = np.roll(np.arange(2 * n), 5)
    np.testing.assert_array_equal(run(turned), whole[turned])


@on_devices(host=[], emulated_devices=WGMMA)
def test_copies_for_a_step_have_the_bits_of_kept_ones(device: Device) -> None:
    gates = [random_tensor("Q4_K", 3 * 160, 256, seed=i) for i in range(2)]
    gate_up, down = (upload_experts(device, own, 3) for own in (gates, [random_tensor("Q8_0", 3 * 256, 160, seed=9)]))
    gate_up.int8 = down.int8 = True
    x = np.random.default_rng(1).standard_normal((144, 256)).astype(F32)
    ids, weights = random_ids(144, 2, 3), np.random.default_rng(2).random((144, 2)).astype(F32)
    made = checks.layer(device, x, ids, weights, gate_up, down, 3)
    assert gate_up.int8_experts is None and down.int8_experts is None
    moe_prefill_int8.store_experts(device, gate_up, 3, gated=True)
    moe_prefill_int8.store_experts(device, down, 3, gated=False)
    np.testing.assert_array_equal(checks.layer(device, x, ids, weights, gate_up, down, 3), made)


@on_devices("bad", [np.inf, np.nan], host=[], emulated_devices=WGMMA)
def test_a_row_that_is_not_finite_stays_alone(device: Device, bad: float) -> None:
    gate_up, down, _ = checks.layer_weights(device, experts=2, inner=256, hidden=256)
    x = np.ones((144, 256), F32)
    ids, weights = np.tile(np.array([[0, 1]], np.int32), (144, 1)), np.ones((144, 2), F32)
    whole = checks.layer(device, x, ids, weights, gate_up, down, 2)
    x[7, 200] = bad
    spoiled = checks.layer(device, x, ids, weights, gate_up, down, 2)
    assert np.isnan(spoiled[7]).all()
    np.testing.assert_array_equal(np.delete(spoiled, 7, axis=0), np.delete(whole, 7, axis=0))


@on_devices(host=[], emulated_devices=WGMMA)
def test_which_weights_have_copies(device: Device) -> None:
    def size(*types: str, experts: int = 2, rows: int = 8, cols: int = 256, gated: bool = False) -> int:
        weight = upload_experts(device, [random_tensor(name, rows, cols, seed=0) for name in types], experts)
        weight.int8 = True
        return moe_prefill_int8.copy_bytes(device, weight, experts, gated=gated)

    assert size("Q8_0") == 2 * 64 * (256 + 4)
    assert size("Q4_0", rows=132, cols=160) == 2 * 128 * (256 + 4)
    # Of 130 rows of an expert 65 are gates, which are three runs of 32.
    assert size("Q4_0", "Q8_0", rows=130, gated=True) == 2 * 3 * 64 * (256 + 4)
    assert size("F16") == size("Q8_0", "F32") == 0
    assert size("Q8_0", rows=6) == 0  # an odd number of an expert
    with mock.patch.object(device, "products", frozenset({"F16", "BF16"})):
        assert size("Q8_0") == 0
    weight = upload_experts(device, [random_tensor("Q8_0", 8, 256, seed=0)], 2)
    weight.int8, weight.bias = True, device.zeros((2, 4))
    assert moe_prefill_int8.copy_bytes(device, weight, 2, gated=False) == 0


@on_devices(host=[], emulated_devices=WGMMA)
def test_which_rows_these_products_serve(device: Device) -> None:
    weight, other = (upload_experts(device, [random_tensor("Q8_0", 8, 256, seed=0)], 2) for _ in range(2))
    weight.int8 = True

    def serves(rows: int, activation: Activation = "silu") -> bool:
        return moe_prefill_int8.multiplies_int8(device, rows, weight, other, 2, activation)

    assert not serves(BLAS_ROWS)
    other.int8 = True
    assert serves(BLAS_ROWS)
    assert not serves(BLAS_ROWS - 1)
    assert not serves(BLAS_ROWS, "clamped_swiglu")


@on_devices("n, cols, before", [(1, 8, 0), (6, 136, 4), (5, 300, 1), (9, 2048, 8)], host=[])
def test_floats_as_int8(device: Device, n: int, cols: int, before: int) -> None:
    """On and off 16-byte boundaries."""
    wide = np.random.default_rng(cols).standard_normal((n, cols + 9)).astype(F32)
    wide[0] = 0
    wide[:, ::97] *= 20
    made = to_int8(device, device.upload(wide)[:, before : before + cols])
    expected = checks.rounded(wide[:, before : before + cols].copy())
    values = device.download(made.values)
    np.testing.assert_array_equal(values[:, :cols], expected.values)
    assert not values[:, cols:].any()
    np.testing.assert_array_equal(device.download(made.scale), expected.scale)


@on_devices("n, cols", [(1, 8), (6, 136), (5, 1032)], host=[])
def test_bfloat16_as_int8(device: Device, n: int, cols: int) -> None:
    bits = checks.bfloat16(np.random.default_rng(cols).standard_normal((n, cols)).astype(F32))
    made = to_int8(device, device.upload(bits))
    expected = checks.rounded(checks.floats(bits))
    np.testing.assert_array_equal(device.download(made.values)[:, :cols], expected.values)
    np.testing.assert_array_equal(device.download(made.scale), expected.scale)


@on_devices("n, k, rows", [(1, 1, 2), (3, 8, 258), (5, 4, 1026)], host=[])
@pytest.mark.parametrize("more", ["", "shared", "gated"])
def test_combine_of_bfloat16(device: Device, n: int, k: int, rows: int, more: str) -> None:
    """The bits of the same numbers as floats."""
    rng = np.random.default_rng(rows)
    bits = checks.bfloat16(rng.standard_normal((n, k, rows)).astype(F32))
    weights = device.upload(rng.random((n, k)).astype(F32))
    shared = device.upload(rng.standard_normal((n, rows)).astype(F32)) if more else None
    gate = device.upload(rng.standard_normal((n, 1)).astype(F32)) if more == "gated" else None
    both = [combine(device, device.upload(y), weights, shared, gate) for y in (bits, checks.floats(bits))]
    np.testing.assert_array_equal(*map(device.download, both))
