"""Checks of the gates and the residual addition on any device, against the formulas in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.models.spec import Activation
from luce.ops.activation import add, gated_activation, sigmoid_gate
from luce.runtime.device import Device


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def values(n: int, d: int, seed: int = 0) -> NDArray[np.float32]:
    """From tiny to 80, where exp(-x) is still finite in float32."""
    rng = np.random.default_rng(seed)
    x = rng.choice([-1.0, 1.0], (n, d)) * 10 ** rng.uniform(-6, 1.9, (n, d))
    return x.astype(np.float32)


def check_gated_activation(device: Device, n: int, f: int, activation: Activation) -> None:
    """A contiguous matrix, and a slice of a wider one."""
    x = values(n, 2 * f)
    gate, up = x[:, :f].astype(np.float64), x[:, f:].astype(np.float64)
    expected = {"silu": silu, "gelu": gelu}[activation](gate) * up
    wide = device.upload(np.pad(x, ((0, 0), (1, 2)), constant_values=np.nan))
    for on_device in (device.upload(x), wide[:, 1 : 1 + 2 * f]):
        y = device.download(gated_activation(device, on_device, activation))
        assert y.dtype == np.float32
        # gelu loses digits where 1 + tanh cancels: absolute to 1e-7 of |x up|.
        bound = 1e-6 * np.abs(expected) + (2e-7 * np.abs(gate * up) if activation == "gelu" else 1e-37)
        assert (np.abs(y - expected) <= bound).all()


def check_activation_extremes(device: Device, activation: Activation) -> None:
    """Far out the gates are 0 and the identity: no NaN from an overflow inside."""
    x = np.array([[-3e4, -100, 100, 3e4, 0, 2, 2, 2, 2, 2]], np.float32)
    with np.errstate(over="ignore"):
        y = device.download(gated_activation(device, device.upload(x), activation))
    np.testing.assert_array_equal(y, np.array([[0, 0, 200, 6e4, 0]], np.float32))


def check_sigmoid_gate(device: Device, n: int, heads: int, d: int) -> None:
    """The gates lie beside the queries, as attn_q of Qwen3.5 leaves them."""
    x, gate = values(n * heads, d).reshape(n, heads, d), values(n * heads, d, 1).reshape(n, heads, d)
    fused = np.full((n, heads * 2 * d + 3), np.nan, np.float32)
    fused[:, : heads * 2 * d].reshape(n, heads, 2 * d)[:, :, d:] = gate
    view = device.upload(fused)[:, : heads * 2 * d].reshape(n, heads, 2 * d)[..., d:]
    y = device.download(sigmoid_gate(device, device.upload(x), view))
    expected = (x.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))).reshape(n, heads * d)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-37)


def check_add(device: Device, n: int, d: int) -> None:
    """One rounding per element; what lies beside the slice stays as it is."""
    x, delta = values(n, d), values(n, d, 1)
    stream = device.upload(np.pad(x, ((0, 0), (0, 3)), constant_values=7.0))
    more = device.upload(np.pad(delta, ((0, 0), (2, 0)), constant_values=np.nan))
    add(device, stream[:, :d], more[:, 2:])
    after = device.download(stream)
    np.testing.assert_array_equal(after[:, :d], x + delta)
    assert (after[:, d:] == 7).all()
