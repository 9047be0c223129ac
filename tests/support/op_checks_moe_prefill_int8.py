"""Checks of experts' products of int8 rows, against formulas in NumPy in which sums are exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from luce.ops import moe_prefill_int8
from luce.ops.int8_rows import to_int8
from luce.ops.moe import combine, group_tiles
from luce.ops.weight import RawTensor, Weight, upload_experts
from luce.runtime.device import Array, Device
from tests.support.drafts import bfloat16
from tests.support.op_checks_activation import gated
from tests.support.op_checks_moe import Floats, random_ids
from tests.support.quant_blocks import decoded, random_tensor

if TYPE_CHECKING:
    from luce.models.spec import Activation

F32 = np.float32


@dataclass(frozen=True)
class Rounded:
    """Rows as values times scale."""

    values: NDArray[np.float64]
    scale: Floats


def rounded(x: Floats) -> Rounded:
    """Rows as int8, in float32 as the kernel rounds."""
    most = np.abs(x).max(axis=-1)
    inverse = np.divide(F32(127), most, out=np.zeros_like(most), where=most > 0)
    return Rounded(np.rint(x * inverse[..., None]).astype(np.float64), most / F32(127))


def floats(bits: NDArray[np.uint16]) -> Floats:
    """The numbers of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(F32)


def stored(device: Device, tensors: list[RawTensor], experts: int, *, gated: bool) -> Weight:
    """The weight with its copy as int8."""
    weight = upload_experts(device, tensors, experts)
    assert moe_prefill_int8.copy_bytes(device, weight, experts, gated=gated) == 0
    weight.int8 = True
    size = moe_prefill_int8.copy_bytes(device, weight, experts, gated=gated)
    for _ in range(2):
        # The second time in the same memory.
        before = weight.int8_experts
        moe_prefill_int8.store_experts(device, weight, experts, gated=gated)
        assert before in (None, weight.int8_experts)
    copy = weight.int8_experts
    assert copy is not None
    assert size == copy.values.nbytes + copy.scale.nbytes
    return weight


def _exact(x: Rounded, w: Rounded, expert: int) -> Floats:
    """The product of int8 rows with an expert's, as float32 rounds it."""
    sums = (x.values @ w.values[expert].T).astype(F32)
    product: Floats = sums * x.scale[:, None] * w.scale[expert]
    return product


def check_gates(
    device: Device,
    types: tuple[str, ...],
    n: int,
    k: int,
    *,
    experts: int,
    inner: int,
    cols: int,
    activation: Activation = "silu",
) -> None:
    """act(gate) * up. One type: gates and ups are one tensor."""
    rows = experts * inner * (2 // len(types))
    tensors = [random_tensor(name, rows, cols, seed=i) for i, name in enumerate(types)]
    w = np.concatenate([decoded(t).reshape(experts, -1, cols) for t in tensors], axis=1)
    weight = stored(device, tensors, experts, gated=True)
    x = np.random.default_rng(n).standard_normal((n, cols)).astype(F32) / 8
    x[0], x[1] = 0, x[1] * F32(2.0**30)
    ids = random_ids(n, k, experts)
    groups = group_tiles(device, device.upload(ids), experts, moe_prefill_int8.TILE_ROWS)
    made = moe_prefill_int8.multiply_gated(
        device, to_int8(device, device.upload(x)), weight, experts, groups, activation
    )
    actual = floats(device.download(made)).reshape(n, k, inner)
    x8, w8 = rounded(x), rounded(w.astype(np.float16).astype(F32))
    for expert in range(experts):
        own = ids == expert
        both = np.broadcast_to(_exact(x8, w8, expert)[:, None], (n, k, 2 * inner))[own].astype(np.float64)
        expected = gated(both[:, :inner], both[:, inner:], activation)
        # Half a step of bfloat16, and what float32 adds: tanh near -1 loses all of a gelu's digits.
        limit = 2.0**-8 * np.abs(expected) + 1e-6 * np.abs(both[:, :inner] * both[:, inner:])
        assert (np.abs(actual[own] - expected) <= limit).all()


def check_products(
    device: Device, parts: list[tuple[str, int]], ids: NDArray[np.int32], *, experts: int, cols: int
) -> None:
    """Products of each pair's own row, bit for bit. Parts: format and rows of an expert."""
    n, k = ids.shape
    tensors = [random_tensor(name, experts * rows, cols, seed=i) for i, (name, rows) in enumerate(parts)]
    w = np.concatenate([decoded(t).reshape(experts, -1, cols) for t in tensors], axis=1)
    weight = stored(device, tensors, experts, gated=False)
    x = np.random.default_rng(n).standard_normal((n * k, cols)).astype(F32)
    groups = group_tiles(device, device.upload(ids), experts, moe_prefill_int8.TILE_ROWS)
    actual = device.download(
        moe_prefill_int8.multiply(device, to_int8(device, device.upload(x)), weight, experts, groups)
    )
    x8, w8 = rounded(x), rounded(w.astype(np.float16).astype(F32))
    expected = np.zeros_like(actual)
    for expert in range(experts):
        own = ids.reshape(-1) == expert
        expected[own] = bfloat16(_exact(x8, w8, expert)[own])
    np.testing.assert_array_equal(actual, expected)


def layer_weights(
    device: Device, *, experts: int, inner: int, hidden: int
) -> tuple[Weight, Weight, list[NDArray[np.float64]]]:
    """Gates and ups, downs, and all three matrices in float64 [experts, rows, cols]."""
    tensors = [random_tensor("Q4_K", experts * inner, hidden, seed=i) for i in range(2)]
    down = random_tensor("Q6_K", experts * hidden, inner, seed=9)
    exact = [decoded(t).reshape(experts, -1, t.cols).astype(np.float64) for t in (*tensors, down)]
    return stored(device, tensors, experts, gated=True), stored(device, [down], experts, gated=False), exact


def layer(
    device: Device, x: Floats, ids: NDArray[np.int32], weights: Floats, gate_up: Weight, down: Weight, experts: int
) -> NDArray[Any]:
    """The weighted sums of the experts' results."""
    n, k = ids.shape
    groups = group_tiles(device, device.upload(ids), experts, moe_prefill_int8.TILE_ROWS)
    gated = moe_prefill_int8.multiply_gated(device, to_int8(device, device.upload(x)), gate_up, experts, groups, "silu")
    made: Array = moe_prefill_int8.multiply(device, to_int8(device, gated), down, experts, groups)
    return device.download(combine(device, made.reshape(n, k, -1), device.upload(weights)))
