"""Checks of the gates and the residual addition on any device, against the formulas in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luce.ops.activation import (
    add,
    add_bias,
    add_gated,
    gated_activation,
    scale,
    sigmoid_gate,
    softcap,
    softplus_gate,
)
from luce.ops.activation import gelu as plain_gelu
from luce.ops.fp16 import TOP, Halves, gated_to_fp16, sigmoid_gate_to_fp16, sigmoid_halves_to_fp16
from luce.runtime.device import Device
from tests.support.quantised import same_halves

if TYPE_CHECKING:
    from luce.models.spec import Activation


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gated(gate: NDArray[np.float64], up: NDArray[np.float64], activation: Activation) -> NDArray[np.float64]:
    """act(gate) * up in float64."""
    # exp(-x) of a very negative x is infinite and gives the right 0.
    with np.errstate(over="ignore"):
        if activation == "clamped_swiglu":
            return (np.clip(up, -7, 7) + 1) * np.minimum(gate, 7) / (1 + np.exp(-1.702 * np.minimum(gate, 7)))
        return {"silu": silu, "gelu": gelu}[activation](gate) * up


def values(n: int, d: int, seed: int = 0) -> NDArray[np.float32]:
    """From tiny to 80, where exp(-x) is still finite in float32."""
    rng = np.random.default_rng(seed)
    x = rng.choice([-1.0, 1.0], (n, d)) * 10 ** rng.uniform(-6, 1.9, (n, d))
    return x.astype(np.float32)


def check_gated_activation(device: Device, n: int, f: int, activation: Activation) -> None:
    """A contiguous matrix, and a slice of a wider one."""
    x = values(n, 2 * f)
    gate, up = x[:, :f].astype(np.float64), x[:, f:].astype(np.float64)
    expected = gated(gate, up, activation)
    wide = device.upload(np.pad(x, ((0, 0), (1, 2)), constant_values=np.nan))
    for on_device in (device.upload(x), wide[:, 1 : 1 + 2 * f]):
        y = device.download(gated_activation(device, on_device[:, :f], on_device[:, f:], activation))
        assert y.dtype == np.float32
        # gelu loses digits where 1 + tanh cancels: absolute to 1e-7 of |x up|.
        # clamped_swiglu where up is near -1.
        lost = {"silu": 1e-37, "gelu": 2e-7 * np.abs(gate * up), "clamped_swiglu": 2e-7 * np.abs(gate) + 1e-37}
        bound = 1e-6 * np.abs(expected) + lost[activation]
        assert (np.abs(y - expected) <= bound).all()


def check_activation_extremes(device: Device, activation: Activation) -> None:
    """For large values the gates are 0 and the identity, or the limit: no NaN from an overflow inside."""
    x = np.array([[-3e4, -100, 100, 3e4, 0, 2, 2, 2, 2, 2]], np.float32)
    with np.errstate(over="ignore"):
        y = device.download(gated_activation(device, *np.split(device.upload(x), 2, axis=1), activation))
    limited = activation == "clamped_swiglu"
    expected = [0, 0, 3 * 7, 3 * 7, 0] if limited else [0, 0, 200, 6e4, 0]
    np.testing.assert_allclose(y, np.array([expected], np.float32), rtol=1e-5 if limited else 0)


def check_gelu(device: Device, n: int, f: int) -> None:
    """In place."""
    x = values(n, f)
    expected = gelu(x.astype(np.float64))
    y = device.upload(x.copy())
    plain_gelu(device, y)
    assert (np.abs(device.download(y) - expected) <= 1e-6 * np.abs(expected) + 2e-7 * np.abs(x)).all()


def check_add_bias(device: Device, n: int, d: int) -> None:
    """One rounding per element; the columns beside the slice do not change."""
    x, bias = values(n, d), values(1, d, 1)[0]
    wide = device.upload(np.pad(x, ((0, 0), (0, 3)), constant_values=7.0))
    add_bias(device, wide[:, :d], device.upload(bias))
    after = device.download(wide)
    np.testing.assert_array_equal(after[:, :d], x + bias)
    assert (after[:, d:] == 7).all()


def check_sigmoid_gate(device: Device, n: int, heads: int, d: int) -> None:
    """The gates lie beside the queries, as after the product with a fused attn_q."""
    x, gate = values(n * heads, d).reshape(n, heads, d), values(n * heads, d, 1).reshape(n, heads, d)
    fused = np.full((n, heads * 2 * d + 3), np.nan, np.float32)
    fused[:, : heads * 2 * d].reshape(n, heads, 2 * d)[:, :, d:] = gate
    view = device.upload(fused)[:, : heads * 2 * d].reshape(n, heads, 2 * d)[..., d:]
    y = device.download(sigmoid_gate(device, device.upload(x), view))
    expected = (x.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))).reshape(n, heads * d)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-37)


def check_softplus_gate(device: Device, n: int, heads: int, d: int) -> None:
    """A gate per head, or one per element, in columns of a wider array."""
    x = values(n * heads, d).reshape(n, heads, d)
    for each in (1, d):
        fused = values(n, heads * each + 3, 1)
        gate = device.upload(fused)[:, 3:].reshape(n, heads, each)
        y = device.download(softplus_gate(device, device.upload(x), gate))
        z = fused[:, 3:].reshape(n, heads, each).astype(np.float64)
        expected = (x * np.logaddexp(0, z)).reshape(n, heads * d)
        np.testing.assert_allclose(y, expected, rtol=3e-6, atol=1e-37)


def check_scale_and_softcap(device: Device, n: int, d: int) -> None:
    """In place; the cap bends large values and hardly touches small ones."""
    x = 10 * values(n, d)
    expected = x.astype(np.float64) * np.float32(1.7), 30 * np.tanh(x.astype(np.float64) / 30)
    scaled, capped = device.upload(x.copy()), device.upload(x.copy())
    scale(device, scaled, 1.7)
    softcap(device, capped, 30.0)
    np.testing.assert_allclose(device.download(scaled), expected[0], rtol=1e-6)
    np.testing.assert_allclose(device.download(capped), expected[1], rtol=2e-6, atol=1e-37)


def check_add_gated(device: Device, n: int, d: int) -> None:
    """The gate is a column of a wider array, as after the router's product."""
    x, delta, fused = values(n, d), values(n, d, 1), values(n, 5, 2)
    expected = x + delta.astype(np.float64) / (1 + np.exp(-fused[:, 4:].astype(np.float64)))
    # The sum may cancel, so the error is of the size of its terms.
    limit = 2.0**-21 * (np.abs(x) + np.abs(delta)) + 1e-37
    y = device.upload(x)
    add_gated(device, y, device.upload(delta), device.upload(fused)[:, 4:])
    assert (np.abs(device.download(y) - expected) <= limit).all()


def check_add(device: Device, n: int, d: int) -> None:
    """One rounding per element; the columns beside the slice do not change."""
    x, delta = values(n, d), values(n, d, 1)
    stream = device.upload(np.pad(x, ((0, 0), (0, 3)), constant_values=7.0))
    more = device.upload(np.pad(delta, ((0, 0), (2, 0)), constant_values=np.nan))
    add(device, stream[:, :d], more[:, 2:])
    after = device.download(stream)
    np.testing.assert_array_equal(after[:, :d], x + delta)
    assert (after[:, d:] == 7).all()


def check_fp16_gates(device: Device, n: int, heads: int, d: int, activation: Activation) -> None:
    """The halves of the gates' floats, of rows that need a scale and of others, beside each other and at odd places."""
    f = heads * d
    x = values(n, 2 * f)
    x[0] *= 1e-3
    x[1:2] *= 1e3
    x[-1, 0] = np.nan
    for left in (0, 1):
        wide = device.upload(np.pad(x, ((0, 0), (left, 3))))
        gate, up = wide[:, left : left + f], wide[:, left + f : left + 2 * f]
        floats = gated_activation(device, gate, up, activation)
        for top in (TOP, -3):
            same_halves(device, gated_to_fp16(device, gate, up, activation, top), floats, top)
        of_heads = device.upload(x[:, f:].reshape(n, heads, d).copy())
        gates = gate.reshape(n, heads, d)
        floats = sigmoid_gate(device, of_heads, gates)
        for top in (TOP, -3):
            same_halves(device, sigmoid_gate_to_fp16(device, of_heads, gates, top), floats, top)


def check_fp16_gate_of_halves(device: Device, n: int, heads: int, d: int) -> None:
    """x sigmoid(gate) against float64: gates beside other values, whose rows have scales; zeros behind the rows."""
    rng = np.random.default_rng(d)
    x = values(n, heads * d).reshape(n, heads, d)
    wide = rng.standard_normal((n, heads, 2 * d)).astype(np.float16)
    wide[0, 0, -2:] = -300, 300
    scales = (2.0 ** (np.arange(n) % 5 - 1)).astype(np.float32)
    gate = Halves(device.upload(wide)[..., d:], device.upload(scales))
    made = sigmoid_halves_to_fp16(device, device.upload(x), gate, -2)
    out, scale = device.download(made.values), device.download(made.scale)[:, None].astype(np.float64)
    assert made.top == -2 and np.abs(out).max() < 2.0**-2 and not out[:, heads * d :].any()
    z = wide[..., d:] * scales[:, None, None].astype(np.float64)
    exact = (x / (1 + np.exp(-z))).reshape(n, -1)
    assert (np.abs(out[:, : heads * d] * scale - exact) <= 2.0**-10.9 * np.abs(exact) + 2.0**-25 * scale).all()
