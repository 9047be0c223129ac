"""Query, key and value heads between their product and attention: norms, rotation, and writing keys and values to the
pools. As luce.ops.qkv, for pools of float32."""

from __future__ import annotations

import numpy as np

from luce.cpu_kernels.jit import compiled_as
from luce.cpu_kernels.vectors import square_root

_HEADS = "float32[:, :, :]"
_WEIGHT = "float32[::1]"


@compiled_as(f"void({_HEADS}, {_WEIGHT}, boolean, float32, float32[:, :, ::1], boolean)")
def prepare(x, weight, normed, eps, table, adjacent):
    """x [n, heads, d] <- rotated(rms(x) * weight) in place; without the norm if not `normed`, without rotation if the
    table float32 [n, half, 2] has no columns."""
    n, heads, d = x.shape
    half = table.shape[1]
    step, gap = (2, 1) if adjacent else (1, half)
    for row in range(n):
        for head in range(heads):
            own = x[row, head]
            if normed:
                squares = np.float32(0.0)
                for i in range(d):
                    squares += own[i] * own[i]
                scale = square_root(squares / np.float32(d) + eps)
                for i in range(d):
                    own[i] = own[i] / scale * weight[i]
            for i in range(half):
                cos, sin = table[row, i, 0], table[row, i, 1]
                a, b = own[i * step], own[i * step + gap]
                own[i * step] = a * cos - b * sin
                own[i * step + gap] = b * cos + a * sin


@compiled_as(f"void({_HEADS}, {_HEADS}, float32[:, :, ::1], float32[:, :, ::1], int32[:])")
def write(k, v, k_pool, v_pool, dest):
    """Row r of k and v [n, kv_heads, d] to row dest[r] of the pools."""
    for row in range(k.shape[0]):
        to = dest[row]
        for head in range(k.shape[1]):
            for i in range(k.shape[2]):
                k_pool[to, head, i] = k[row, head, i]
                v_pool[to, head, i] = v[row, head, i]
