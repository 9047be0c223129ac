"""Norms and activations of rows: float32 [n, d] with contiguous rows, d a multiple of 16."""

from __future__ import annotations

from luce.cpu_kernels.jit import compiled_as
from luce.cpu_kernels.vectors import exp, fma, load_floats, splat_float, square_root, store, total

_ADDED = "void(float32[:, :], float32[:, :], float32[::1], float32[:, ::1], float32, boolean)"
_GATED = "void(float32[:, :], float32[:, :], float32[:, ::1], boolean)"


@compiled_as(_ADDED)
def rms_norm(x, delta, weight, out, eps, added):
    """out = rms(x) * weight, after x += delta in place if `added`."""
    n, d = out.shape
    for row in range(n):
        at, other = x.ctypes.data + row * x.strides[0], delta.ctypes.data + row * delta.strides[0]
        to, factor = out.ctypes.data + row * d * 4, weight.ctypes.data
        squares = splat_float(0.0)
        for i in range(0, d * 4, 64):
            value = load_floats(at + i)
            if added:
                value = value + load_floats(other + i)
                store(at + i, value)
            squares = fma(value, value, squares)
        scale = splat_float(square_root(total(squares) / d + eps))
        for i in range(0, d * 4, 64):
            store(to + i, load_floats(at + i) / scale * load_floats(factor + i))


@compiled_as(_GATED)
def gated_activation(gate, up, out, gelu):
    """out = act(gate) * up: silu, or the tanh approximation of gelu."""
    n, f = out.shape
    one, two = splat_float(1.0), splat_float(2.0)
    for row in range(n):
        first, second = gate.ctypes.data + row * gate.strides[0], up.ctypes.data + row * up.strides[0]
        to = out.ctypes.data + row * f * 4
        for i in range(0, f * 4, 64):
            x = load_floats(first + i)
            inner = x
            if gelu:
                # x sigmoid(2 y) = x (1 + tanh y) / 2, with y = sqrt(2 / pi) (x + 0.044715 x^3)
                inner = two * splat_float(0.7978845608) * fma(splat_float(0.044715) * x * x, x, x)
            store(to + i, x / (one + exp(splat_float(0.0) - inner)) * load_floats(second + i))
