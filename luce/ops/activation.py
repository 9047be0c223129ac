"""Element-wise gates of the feed-forward and attention outputs, and the residual addition."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from luce.cpu_kernels.dimensions import LANES
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

if TYPE_CHECKING:
    from luce.models.spec import Activation

_THREADS = 256
# Elements of a row for each block of the gates (per thread, EACH of kernels/activation.cu).
_GATED = 4 * _THREADS
_KERNEL: dict[Activation, str] = {
    "silu": "gated_silu",
    "gelu": "gated_gelu",
    "clamped_swiglu": "gated_clamped_swiglu",
}
#: the activations that compiled code of the CPU computes, and kernels that write int8
FUSED: frozenset[Activation] = frozenset({"silu", "gelu"})
# Of clamped_swiglu (kernels/activation.h).
_LIMIT, _STEEPNESS = np.float32(7), np.float32(1.702)


def gated_activation(device: Device, gate: Array, up: Array, activation: Activation) -> Array:
    """act(gate) * up: both float32 [n, f] (any row stride) -> float32 [n, f].

    silu(x) = x sigmoid(x); gelu is the tanh approximation; for clamped_swiglu see luce.models.spec.Activation.
    """
    if isinstance(device, CpuDevice) and gate.shape[1] % LANES == 0 and activation in FUSED:
        out = device.empty(gate.shape)
        device.run(device.kernels.gated_activation, gate, up, out, activation == "gelu")
        return out
    n, f = gate.shape
    if isinstance(device, HostDevice):
        return device.compute(_HOST[activation], (n, f), gate, up)
    out = device.empty((n, f))
    args = (out, gate, np.int64(gate.strides[0] // 4), up, np.int64(up.strides[0] // 4), np.int32(f))
    device.launch("activation", _KERNEL[activation], (n, -(-f // _GATED)), (_THREADS,), args)
    return out


def gelu(device: Device, x: Array) -> None:
    """x = gelu(x), its tanh approximation, in place: float32 [n, f] contiguous."""
    if isinstance(device, HostDevice):
        device.call_host(lambda x: np.copyto(x, _gelu(x)), x)
        return
    n, f = x.shape
    device.launch("activation", "plain_gelu", (n, -(-f // _THREADS)), (_THREADS,), (x, np.int32(f)))


def sigmoid_gate(device: Device, x: Array, gate: Array) -> Array:
    """x * sigmoid(gate): x float32 [n, heads, d] contiguous, gate float32 [n, heads, d] (any row and head strides)

    -> float32 [n, heads * d].
    """
    n, heads, d = x.shape
    if isinstance(device, HostDevice):
        return device.compute(_sigmoid_gate, (n, heads * d), x, gate)
    out = device.empty((n, heads * d))
    row, head = np.int64(gate.strides[0] // 4), np.int64(gate.strides[1] // 4)
    args = (out, x, gate, row, head, np.int32(heads), np.int32(d))
    device.launch("activation", "sigmoid_gate", (n, -(-heads * d // _GATED)), (_THREADS,), args)
    return out


def softplus_gate(device: Device, x: Array, gate: Array) -> Array:
    """x * log(1 + e^gate): x float32 [n, heads, d] contiguous, gate float32 [n, heads, 1] or [n, heads, d] (any row and
    head strides) -> float32 [n, heads * d].
    """
    n, heads, d = x.shape
    if isinstance(device, HostDevice):
        return device.compute(_softplus_gate, (n, heads * d), x, gate)
    out = device.empty((n, heads * d))
    row, head = np.int64(gate.strides[0] // 4), np.int64(gate.strides[1] // 4)
    args = (out, x, gate, row, head, np.int32(gate.shape[2]), np.int32(heads), np.int32(d))
    device.launch("activation", "softplus_gate", (n, -(-heads * d // _THREADS)), (_THREADS,), args)
    return out


def add_gated(device: Device, x: Array, delta: Array, gate: Array) -> None:
    """x += delta * sigmoid(gate) in place: x, delta float32 [n, d] contiguous, gate float32 [n, 1] (any row stride)."""
    if isinstance(device, HostDevice):
        device.call_host(_add_gated, x, delta, gate)
        return
    n, d = x.shape
    args = (x, delta, gate, np.int64(gate.strides[0] // 4), np.int32(d))
    device.launch("activation", "add_gated", (n, -(-d // _THREADS)), (_THREADS,), args)


def add(device: Device, x: Array, delta: Array) -> None:
    """x += delta in place, both float32 [n, d]."""
    if isinstance(device, HostDevice):
        device.call_host(_add, x, delta)
        return
    n, d = x.shape
    args = (x, np.int64(x.strides[0] // 4), delta, np.int64(delta.strides[0] // 4), np.int32(d))
    device.launch("activation", "add", (n, -(-d // _THREADS)), (_THREADS,), args)


def add_bias(device: Device, x: Array, bias: Array) -> None:
    """x += bias in place: x float32 [n, d], bias float32 [d]."""
    if isinstance(device, HostDevice):
        device.call_host(_add, x, bias)
        return
    n, d = x.shape
    args = (x, np.int64(x.strides[0] // 4), bias, np.int64(0), np.int32(d))
    device.launch("activation", "add", (n, -(-d // _THREADS)), (_THREADS,), args)


def scale(device: Device, x: Array, factor: float) -> None:
    """x *= factor in place, float32 [n, d] contiguous."""
    if isinstance(device, HostDevice):
        device.call_host(partial(_scale, np.float32(factor)), x)
        return
    n, d = x.shape
    device.launch("activation", "scale", (n, -(-d // _THREADS)), (_THREADS,), (x, np.float32(factor), np.int32(d)))


def softcap(device: Device, x: Array, cap: float) -> None:
    """x = cap tanh(x / cap) in place, float32 [n, d] contiguous."""
    if isinstance(device, HostDevice):
        device.call_host(partial(_softcap, np.float32(cap)), x)
        return
    n, d = x.shape
    device.launch("activation", "softcap", (n, -(-d // _THREADS)), (_THREADS,), (x, np.float32(cap), np.int32(d)))


def host_sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) on the host; 0 where e^-x overflows."""
    with np.errstate(over="ignore"):
        y = np.exp(-x)
    y += 1
    np.reciprocal(y, out=y)
    return y


def host_softplus(x: Array) -> Array:
    """log(1 + e^x) on the host, x itself above 20."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _sigmoid_gate(x: Array, gate: Array) -> Array:
    return (x * host_sigmoid(gate)).reshape(len(x), -1)


def _softplus_gate(x: Array, gate: Array) -> Array:
    return (x * host_softplus(gate)).reshape(len(x), -1)


def _add_gated(x: Array, delta: Array, gate: Array) -> None:
    x += delta * host_sigmoid(gate)


def _add(x: Array, delta: Array) -> None:
    np.add(x, delta, out=x)


def _scale(factor: np.float32, x: Array) -> None:
    x *= factor


def _softcap(cap: np.float32, x: Array) -> None:
    x /= cap
    np.tanh(x, out=x)
    x *= cap


def _silu(x: Array) -> Array:
    y = host_sigmoid(x)
    y *= x
    return y


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


def _clamped_swiglu(gate: Array, up: Array) -> Array:
    gate = np.minimum(gate, _LIMIT)
    return (np.clip(up, -_LIMIT, _LIMIT) + 1) * (gate * host_sigmoid(_STEEPNESS * gate))


_HOST = {
    "silu": lambda gate, up: _silu(gate) * up,
    "gelu": lambda gate, up: _gelu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
}
