"""luce.ops.half_products, and gates of such products, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from luce.ops import half_products, matmul_prefill
from luce.ops.fp16 import Halves, gated_halves_to_fp16, to_floats, to_fp16
from luce.ops.half_products import expect, halves, has_halves, measure
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import BLAS_ROWS, store_copy
from luce.ops.weight import RawTensor, upload_weight
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.devices import on_devices
from tests.support.op_checks_activation import gated
from tests.support.op_checks_matmul import product_limit
from tests.support.quant_blocks import decoded, random_tensor

if TYPE_CHECKING:
    from luce.models.spec import Activation


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of 48 features have fp16 results."""
    monkeypatch.setattr(half_products, "LEAST_FEATURES", 48)


def _even(signs: NDArray[np.float64], scales: float | NDArray[np.float64]) -> RawTensor:
    """Q8_0 rows of 127 times the row's scale with these signs."""
    rows, cols = signs.shape
    blocks = np.empty((rows, cols // 32, 34), np.uint8)
    halves = np.ascontiguousarray(np.broadcast_to(np.asarray(scales, np.float16), rows))
    blocks[:, :, :2] = halves.view(np.uint8).reshape(rows, 1, 2)
    blocks[:, :, 2:] = (127 * signs).astype(np.int8).view(np.uint8).reshape(rows, -1, 32)
    return RawTensor("even", blocks.reshape(rows, -1), GGMLQuantizationType.Q8_0, cols)


@on_devices("scale, top", [(0.0077, 7), (0.0079, 6), (7.9, -4), (1e-6, 15)], host=[])
def test_the_largest_products_do_not_overflow(device: Device, scale: float, top: int) -> None:
    """Rows of x along rows of the weight, of all sizes: their products are the norms' product."""
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], (144, 512))
    # The largest rows are amid the first of two slices.
    scales = np.full(144, scale / 2)
    scales[40:56] = scale
    tensor = _even(signs, scales)
    with mock.patch.object(matmul_prefill, "BUFFER_BYTES", 128 * 512 * 2):
        weight = upload_weight(device, [tensor])
        measure(device, [weight])
        if top < -2:
            assert weight.top is None, "with so small rows of x little would be left of them"
            return
        assert weight.top == top
        sizes = 2.0 ** np.linspace(-110, 100, BLAS_ROWS)[:, None]
        x = (np.tile(signs[40:56], (9, 1)) * sizes * (1 - 2.0**-13)).astype(np.float32)
        made = halves(device, device.upload(x), weight)
    values, rows = device.download(made.values), device.download(made.rows)
    exact = x.astype(np.float64) @ decoded(tensor).astype(np.float64).T
    assert values.dtype == np.float16 and np.isfinite(values).all()
    fits = np.abs(exact).max(axis=1, keepdims=True) < 1e36
    error = np.abs(values * rows[:, None].astype(np.float64) - exact)
    assert (error <= 2.0**-10 * np.abs(exact) + 2.0**-10 * np.abs(exact).max(axis=1, keepdims=True))[fits[:, 0]].all()
    # The bound is met within a factor of four where x is.
    assert np.abs(values).max() > 2.0**13 or top == 15


@on_devices("stored", [False, True], host=[])
def test_products(device: Device, stored: bool) -> None:
    """Floats rounded once, by slices of several types or by a copy; other rows of x are those of floats."""
    tensors = [random_tensor(name, rows, 512, i) for i, (name, rows) in enumerate({"Q4_K": 144, "Q6_K": 112}.items())]
    x = np.random.default_rng(3).standard_normal((BLAS_ROWS, 512)).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * 1e-5, x[2] * 1e6
    weight = upload_weight(device, tensors)
    if stored:
        store_copy(device, weight)
    with mock.patch.object(matmul_prefill, "BUFFER_BYTES", 128 * 512 * 2):
        measure(device, [weight])
        assert weight.top is not None
        rows = to_fp16(device, device.upload(x), weight.top)
        assert has_halves(device, rows, weight)
        made = halves(device, rows, weight)
        again = halves(device, device.upload(x), weight)
    values = device.download(made.values)
    np.testing.assert_array_equal(device.download(again.values), values)
    w = np.concatenate([decoded(tensor) for tensor in tensors])
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    scale = device.download(made.rows)[:, None].astype(np.float64)
    assert (np.abs(values * scale - exact) <= product_limit(x, w, fp16=True) + 2.0**-11 * np.abs(exact)).all()
    np.testing.assert_array_equal(device.download(to_floats(device, made)), values * scale.astype(np.float32))
    floats = device.download(matmul(device, rows, weight))
    error = ((values * scale - floats) ** 2)[3:].mean() / (floats.astype(np.float64) ** 2)[3:].mean()
    assert 1e-8 < error < 6e-8, "one rounding to 11 bits"


@on_devices(host=[])
def test_which_weights_and_rows(device: Device) -> None:
    packed = random_tensor("Q8_0", 48, 64, 0)
    good, zero = upload_weight(device, [packed]), upload_weight(device, [_even(np.zeros((48, 64)), 1)])
    infinite = upload_weight(device, [_even(np.ones((48, 64)), 60000)])
    biased, int8 = upload_weight(device, [packed]), upload_weight(device, [packed])
    biased.bias, int8.int8 = device.zeros(48), True
    floats = upload_weight(device, [packed, random_tensor("F32", 16, 64, 1)])
    halves_ = upload_weight(device, [packed, random_tensor("F16", 16, 64, 1)])
    odd, small = (upload_weight(device, [random_tensor("Q8_0", rows, 64, 0)]) for rows in (60, 40))
    others = [infinite, biased, int8, floats, halves_, odd, small]
    expect(device, [good, zero, *others])
    assert good.top == 0 and biased.top is None
    measure(device, [good, zero, *others])
    assert zero.top == 15 and good.top is not None and good.top < 15
    assert [weight.top for weight in others] == [None] * len(others)
    rows = device.zeros((BLAS_ROWS, 64))
    assert has_halves(device, rows, good)
    assert not any(has_halves(device, rows, weight) for weight in (odd, small))
    assert not has_halves(device, rows[1:], good), "few rows have the bits of one"
    device.batch_invariant = True
    assert not has_halves(device, rows, good), "and so have those of short prompts"
    device.batch_invariant = False
    assert has_halves(device, to_fp16(device, rows, good.top), good)
    assert not has_halves(device, to_fp16(device, rows), good), "rows of larger numbers may overflow"


def test_no_weights_of_the_host() -> None:
    host = HostDevice()
    weight = upload_weight(host, [random_tensor("Q8_0", 48, 64, 0)])
    expect(host, [weight])
    measure(host, [weight])
    assert weight.top is None and not has_halves(host, np.zeros((BLAS_ROWS, 64), np.float32), weight)


@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_swiglu"])
@on_devices("n, cols", host=[], emulated=[(4, 8), (3, 2200)], gpu=[(4, 8), (300, 17408)])
def test_gates(device: Device, n: int, cols: int, activation: Activation) -> None:
    """act(gate) up of numbers of all sizes, one of them beyond the range of silu's exponent; zeros behind them."""
    rng = np.random.default_rng(cols)
    values = (rng.standard_normal((n, 2 * cols)) * 2.0 ** rng.integers(-12, 5, (n, 2 * cols))).astype(np.float16)
    values[:, 0], values[:, 1], values[0, cols] = -300, 300, 60000
    rows = (2.0 ** (np.arange(n) % 8)).astype(np.float32)
    made = gated_halves_to_fp16(device, Halves(device.upload(values), device.upload(rows)), activation, 5)
    assert made.top == 5 and np.abs(device.download(made.values)).max() < 2.0**5
    out, scale = device.download(made.values).astype(np.float64), device.download(made.scale).astype(np.float64)
    gate, up = np.split(values.astype(np.float64) * rows[:, None], 2, axis=1)
    exact = gated(gate, up, activation)
    assert out.shape == (n, -(-cols // 128) * 128) and not out[:, cols:].any()
    # gelu's sum of 1 and a tangent near -1 loses bits of small results.
    slack = 2.0**-24 * np.abs(gate * up) if activation == "gelu" else 0
    limit = 2.0**-10.9 * np.abs(exact) + 2.0**-24 * scale[:, None] + slack
    assert (np.abs(out[:, :cols] * scale[:, None] - exact) <= limit).all()
