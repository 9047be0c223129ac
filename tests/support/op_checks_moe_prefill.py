"""Checks of experts' gates and ups of a prompt's rows on any device, against float64 formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from luce.ops.moe import gated_experts
from luce.ops.weight import RawTensor, upload_experts
from luce.runtime.device import Device
from tests.support.op_checks_activation import gated
from tests.support.op_checks_moe import Floats, random_ids, routed
from tests.support.quant_blocks import decoded, random_tensor

if TYPE_CHECKING:
    from luce.models.spec import Activation


def check_gated(
    device: Device,
    types: tuple[str, str],
    n: int,
    k: int,
    *,
    experts: int,
    inner: int,
    cols: int,
    activation: Activation = "silu",
    together: bool = False,
    biased: bool = False,
    wide: bool = False,
) -> None:
    """act(gate) * up against float64 of gguf's values. `together`: gates and ups are one tensor. `wide`: rows of x lie
    beyond the range of fp16 on both sides."""
    tensors = [random_tensor(name, experts * inner, cols, seed=i) for i, name in enumerate(types)]
    x = np.random.default_rng(n).standard_normal((n, cols)).astype(np.float32) / 8
    if wide:
        x *= 2.0 ** (np.arange(n, dtype=np.float32)[:, None] % 3 * 20 - 20)
    bias = np.random.default_rng(k).standard_normal((experts, 2 * inner)).astype(np.float32) if biased else None
    ids = random_ids(n, k, experts)
    gates, ups = (decoded(tensor).reshape(experts, inner, cols).astype(np.float64) for tensor in tensors)
    placed = tensors
    if together:
        both = np.concatenate([tensor.raw.reshape(experts, inner, -1) for tensor in tensors], axis=1)
        placed = [RawTensor("both", both.reshape(2 * experts * inner, -1), tensors[0].type, cols)]
    actual = _gated(device, x, placed, experts, ids, activation, bias)
    expected, size = np.empty((n, k, inner)), np.empty((n, k, inner))
    for row, slot in np.ndindex(n, k):
        expert, values = ids[row, slot], x[row].astype(np.float64)
        gate, up = gates[expert] @ values, ups[expert] @ values
        if bias is not None:
            gate, up = gate + bias[expert, :inner], up + bias[expert, inner:]
        expected[row, slot] = gated(gate, up, activation)
        # What a rounding of each product of the two sums can change.
        size[row, slot] = (1 + np.abs(gate)) * (np.abs(ups[expert]) @ np.abs(values))
        size[row, slot] += (1 + np.abs(up)) * (np.abs(gates[expert]) @ np.abs(values))
    assert actual.shape == (n * k, inner)
    error = np.abs(actual.reshape(n, k, inner) - expected)
    limit = 2.0 ** (-19 if types == ("F32", "F32") else -10) * size
    assert (error <= limit).all(), f"{(error / limit).max():.1f} times the limit"


def check_gated_neighbours(device: Device, name: str, n: int, *, experts: int, inner: int, cols: int) -> None:
    """A row's results have the same bits among other rows, and at another place."""
    k = 2
    tensors = [random_tensor(name, experts * inner, cols, seed=i) for i in range(2)]
    x = np.random.default_rng(n).standard_normal((2 * n, cols)).astype(np.float32) / 8
    ids = random_ids(2 * n, k, experts)
    whole = _gated(device, x, tensors, experts, ids, "silu").reshape(2 * n, k, inner)
    part = _gated(device, x[:n], tensors, experts, ids[:n], "silu").reshape(n, k, inner)
    np.testing.assert_array_equal(part, whole[:n])
    turned = _gated(device, np.roll(x, 5, axis=0), tensors, experts, np.roll(ids, 5, axis=0), "silu")
    np.testing.assert_array_equal(turned.reshape(2 * n, k, inner), np.roll(whole, 5, axis=0))


def _gated(
    device: Device,
    x: Floats,
    tensors: list[RawTensor],
    experts: int,
    ids: NDArray[np.int32],
    activation: Activation,
    bias: Floats | None = None,
) -> NDArray[Any]:
    weight = upload_experts(device, tensors, experts)
    weight.bias = None if bias is None else device.upload(bias)
    routing = routed(device, ids, experts)
    return device.download(gated_experts(device, device.upload(x), weight, experts, routing, activation))
