"""Query, key and value heads between their product and attention: norms, rotation, and writing keys and values to the
pools. As luce.ops.qkv, for pools of float32 and of Q8_0."""

from __future__ import annotations

import numpy as np

from luce.cpu_kernels.jit import compiled, compiled_as
from luce.cpu_kernels.kv_page import put_q8_0
from luce.cpu_kernels.vectors import square_root

_HEADS = "float32[:, :, :]"
_WEIGHT = "float32[::1]"
_ANGLES = "float32[:, :, ::1]"
_POOL = "uint8[:, :, ::1]"


@compiled
def _prepare_row(x, weight, eps, angles, adjacent):
    """The heads of a row: x [heads, d], angles [half, 2]."""
    half, d = angles.shape[0], x.shape[1]
    step, gap = (2, 1) if adjacent else (1, half)
    for head in range(x.shape[0]):
        own = x[head]
        if len(weight) > 0:
            squares = np.float32(0.0)
            for i in range(d):
                squares += own[i] * own[i]
            scale = square_root(squares / np.float32(d) + eps)
            for i in range(d):
                own[i] = own[i] / scale * weight[i]
        for i in range(half):
            cos, sin = angles[i, 0], angles[i, 1]
            a, b = own[i * step], own[i * step + gap]
            own[i * step] = a * cos - b * sin
            own[i * step + gap] = b * cos + a * sin


@compiled_as(f"void({_HEADS}, {_WEIGHT}, float32, {_ANGLES}, boolean)")
def prepare(x, weight, eps, table, adjacent):
    """x [n, heads, d] <- rotated(rms(x) * weight) in place; without the norm if the weight is empty, without rotation
    if the table float32 [n, half, 2] has no columns."""
    for row in range(x.shape[0]):
        _prepare_row(x[row], weight, eps, table[row], adjacent)


@compiled
def _write_row(x, to):
    """x float32 [heads, d] to a row of a pool, bytes [heads, n]: Q8_0 if these are fewer than those of d floats."""
    d = x.shape[1]
    for head in range(x.shape[0]):
        if to.shape[1] == d * 4:
            floats = to[head].view(np.float32)
            for i in range(d):
                floats[i] = x[head, i]
        else:
            put_q8_0(x[head], to[head].ctypes.data)


@compiled_as(f"void({_HEADS}, {_HEADS}, {_POOL}, {_POOL}, int32[::1])")
def write(k, v, k_pool, v_pool, dest):
    """Row r of k and v [n, kv_heads, d] to row dest[r] of the pools, which are bytes."""
    for row in range(k.shape[0]):
        _write_row(k[row], k_pool[dest[row]])
        _write_row(v[row], v_pool[dest[row]])


_NORMS = f"{_WEIGHT}, {_WEIGHT}, {_WEIGHT}, float32"


@compiled_as(f"void({_HEADS}, {_HEADS}, {_HEADS}, {_NORMS}, {_ANGLES}, boolean, {_POOL}, {_POOL}, int32[::1])")
def prepare_and_write(q, k, v, q_weight, k_weight, v_weight, eps, table, adjacent, k_pool, v_pool, dest):
    """`prepare` of q and k, and of v without rotation; then `write`."""
    for row in range(q.shape[0]):
        _prepare_row(q[row], q_weight, eps, table[row], adjacent)
        _prepare_row(k[row], k_weight, eps, table[row], adjacent)
        _prepare_row(v[row], v_weight, eps, table[row, :0], adjacent)
        _write_row(k[row], k_pool[dest[row]])
        _write_row(v[row], v_pool[dest[row]])
