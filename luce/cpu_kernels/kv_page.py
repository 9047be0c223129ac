"""Rows of keys or values of a head between float32 and the types of the pools (luce.ops.kvtype): a page to floats, and
floats to Q8_0."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType

from luce.cpu_kernels.dimensions import PAGE
from luce.cpu_kernels.jit import compiled
from luce.cpu_kernels.narrow import load_bfloats, load_bytes, load_halves, put_byte, put_half, splat_half
from luce.cpu_kernels.vectors import splat, store, to_floats

_T = GGMLQuantizationType
F32, F16, BF16, Q8_0, Q4_0 = (int(t) for t in (_T.F32, _T.F16, _T.BF16, _T.Q8_0, _T.Q4_0))


@compiled
def page_floats(kind, rows, stride, size, to):
    """The PAGE rows of a head at `rows`, `stride` bytes apart, to float32: `size` bytes each, a multiple of 64."""
    for _ in range(PAGE):
        if kind == F16:
            for i in range(0, size, 64):
                store(to + i, load_halves(rows + i // 2))
        elif kind == BF16:
            for i in range(0, size, 64):
                store(to + i, load_bfloats(rows + i // 2))
        elif kind == Q8_0:
            for i in range(0, size, 128):
                block = rows + i // 128 * 34
                scale = splat_half(block)
                # A byte plus 128 is the byte with its highest bit flipped.
                store(to + i, scale * to_floats((load_bytes(block + 2) ^ splat(128)) - splat(128)))
                store(to + i + 64, scale * to_floats((load_bytes(block + 18) ^ splat(128)) - splat(128)))
        else:
            for i in range(0, size, 128):
                block = rows + i // 128 * 18
                scale, both = splat_half(block), load_bytes(block + 2)
                store(to + i, scale * to_floats((both & 15) - splat(8)))
                store(to + i + 64, scale * to_floats((both >> 4) - splat(8)))
        rows += stride
        to += size


@compiled
def put_q8_0(x, to):
    """x float32 [d], d a multiple of 32, to Q8_0 as gguf.quants: halves are rounded away from zero."""
    for block in range(len(x) // 32):
        own, at = x[block * 32 : block * 32 + 32], to + block * 34
        most = np.float32(0.0)
        for i in range(32):
            most = max(most, abs(own[i]))
        scale = most / np.float32(127.0)
        factor = np.float32(1.0) / scale if scale != 0 else np.float32(0.0)
        put_half(at, scale)
        for i in range(32):
            value = abs(own[i] * factor)
            low = np.floor(value)
            near = low + np.floor(np.float32(2.0) * (value - low))
            put_byte(at + 2 + i, np.int32(near if own[i] >= 0 else -near))
