"""Norms and activations of rows: float32 [n, d] with contiguous rows, d a multiple of 16. A part is ROWS rows; so many
stay on the caller's thread."""

from __future__ import annotations

from luce.cpu_kernels.dimensions import ROWS
from luce.cpu_kernels.jit import compiled, compiled_as
from luce.cpu_kernels.jobs import run_job
from luce.cpu_kernels.memory import stack_words
from luce.cpu_kernels.vectors import (
    exp,
    fma,
    load_floats,
    put_float,
    read_float,
    splat_float,
    square_root,
    store,
    total,
    word,
)

# int64 arguments: addresses and strides of rows of two inputs, address of out, whose rows are contiguous, rows,
# columns; then of norms the weight's address, whether the second input is added and bits of eps, of activations whether
# it is gelu
_FIRST, _FIRST_STRIDE, _SECOND, _SECOND_STRIDE, _OUT, _ROWS, _COLUMNS = range(7)
_WEIGHT, _ADDED, _EPS, _GELU, _WORDS = 7, 8, 9, 7, 10


@compiled
def rms_norm_rows(arguments, part, scratch):
    """out = rms(x) * weight, after x += delta in place if it is added."""
    size, factor = word(arguments, _COLUMNS) * 4, word(arguments, _WEIGHT)
    for row in range(part * ROWS, min(part * ROWS + ROWS, word(arguments, _ROWS))):
        at = word(arguments, _FIRST) + row * word(arguments, _FIRST_STRIDE)
        other = word(arguments, _SECOND) + row * word(arguments, _SECOND_STRIDE)
        to, squares = word(arguments, _OUT) + row * size, splat_float(0.0)
        for i in range(0, size, 64):
            value = load_floats(at + i)
            if word(arguments, _ADDED) != 0:
                value = value + load_floats(other + i)
                store(at + i, value)
            squares = fma(value, value, squares)
        mean = total(squares) / (size // 4)
        scale = splat_float(square_root(mean + read_float(arguments + _EPS * 8)))
        for i in range(0, size, 64):
            store(to + i, load_floats(at + i) / scale * load_floats(factor + i))


@compiled
def gated_activation_rows(arguments, part, scratch):
    """out = act(gate) * up: silu, or the tanh approximation of gelu."""
    size = word(arguments, _COLUMNS) * 4
    zero, one, two = splat_float(0.0), splat_float(1.0), splat_float(2.0)
    for row in range(part * ROWS, min(part * ROWS + ROWS, word(arguments, _ROWS))):
        first = word(arguments, _FIRST) + row * word(arguments, _FIRST_STRIDE)
        second = word(arguments, _SECOND) + row * word(arguments, _SECOND_STRIDE)
        to = word(arguments, _OUT) + row * size
        for i in range(0, size, 64):
            x = load_floats(first + i)
            inner = x
            if word(arguments, _GELU) != 0:
                # x sigmoid(2 y) = x (1 + tanh y) / 2, with y = sqrt(2 / pi) (x + 0.044715 x^3)
                inner = two * splat_float(0.7978845608) * fma(splat_float(0.044715) * x * x, x, x)
            store(to + i, x / (one + exp(zero - inner)) * load_floats(second + i))


@compiled
def _fill(arguments, first, second, out):
    arguments[_FIRST], arguments[_FIRST_STRIDE] = first.ctypes.data, first.strides[0]
    arguments[_SECOND], arguments[_SECOND_STRIDE] = second.ctypes.data, second.strides[0]
    arguments[_OUT], arguments[_ROWS], arguments[_COLUMNS] = out.ctypes.data, out.shape[0], out.shape[1]


_PAIR = "float32[:, :], float32[:, :]"


@compiled_as(f"void(int64, UniTuple(int64, 1), {_PAIR}, float32[::1], float32[:, ::1], float32, boolean)")
def rms_norm(slot, kernels, x, delta, weight, out, eps, added):
    """rms_norm_rows of all rows."""
    arguments = stack_words(_WORDS)
    _fill(arguments, x, delta, out)
    arguments[_WEIGHT], arguments[_ADDED] = weight.ctypes.data, added
    put_float(arguments.ctypes.data + _EPS * 8, eps)
    if len(out) <= ROWS:
        rms_norm_rows(arguments.ctypes.data, 0, 0)
    else:
        run_job(slot, kernels[0], arguments, (len(out) + ROWS - 1) // ROWS)


@compiled_as(f"void(int64, UniTuple(int64, 1), {_PAIR}, float32[:, ::1], boolean)")
def gated_activation(slot, kernels, gate, up, out, gelu):
    """gated_activation_rows of all rows."""
    arguments = stack_words(_WORDS)
    _fill(arguments, gate, up, out)
    arguments[_GELU] = gelu
    if len(out) <= ROWS:
        gated_activation_rows(arguments.ctypes.data, 0, 0)
    else:
        run_job(slot, kernels[0], arguments, (len(out) + ROWS - 1) // ROWS)
