"""Element-wise gates of the feed-forward and attention outputs, and the residual addition."""

from __future__ import annotations

import numpy as np

from luce.models.spec import Activation
from luce.runtime.device import Array, Device

_THREADS = 256
_KERNEL: dict[Activation, str] = {"silu": "gated_silu", "gelu": "gated_gelu"}


def gated_activation(device: Device, gate_up: Array, activation: Activation) -> Array:
    """act(gate) * up: gate_up float32 [n, 2 f] (gate first) -> float32 [n, f].

    silu(x) = x sigmoid(x); gelu is the tanh approximation.
    """
    if device.host:
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        return _HOST[activation](gate) * up
    n, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = device.empty((n, f))
    args = (out, gate_up, np.int64(gate_up.strides[0] // 4), np.int32(f))
    device.launch("activation", _KERNEL[activation], (n, -(-f // _THREADS)), (_THREADS,), args)
    return out


def sigmoid_gate(device: Device, x: Array, gate: Array) -> Array:
    """x * sigmoid(gate): x float32 [n, heads, d] contiguous, gate float32 [n, heads, d] (any row and head strides)

    -> float32 [n, heads * d].
    """
    if device.host:
        return (x / (1 + np.exp(-gate))).reshape(x.shape[0], -1)
    n, heads, d = x.shape
    out = device.empty((n, heads * d))
    row, head = np.int64(gate.strides[0] // 4), np.int64(gate.strides[1] // 4)
    args = (out, x, gate, row, head, np.int32(heads), np.int32(d))
    device.launch("activation", "sigmoid_gate", (n, -(-heads * d // _THREADS)), (_THREADS,), args)
    return out


def add(device: Device, x: Array, delta: Array) -> None:
    """x += delta in place, both float32 [n, d]."""
    if device.host:
        np.add(x, delta, out=x)
        return
    n, d = x.shape
    args = (x, np.int64(x.strides[0] // 4), delta, np.int64(delta.strides[0] // 4), np.int32(d))
    device.launch("activation", "add", (n, -(-d // _THREADS)), (_THREADS,), args)


def _silu(x: Array) -> Array:
    y = np.exp(-x)
    y += 1
    np.divide(x, y, out=y)
    return y


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


_HOST = {"silu": _silu, "gelu": _gelu}
