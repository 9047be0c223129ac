"""Grouped dynamic causal convolution over the rows of each span (DFlash2 drafts)."""

from __future__ import annotations

import numpy as np

from luce.runtime.device import Array, Device
from luce.runtime.step import SpanArrays

_THREADS = 256


def dynamic_conv(device: Device, x: Array, base: Array, coefficients: Array, spans: SpanArrays) -> Array:
    """out[i, c] = sum over the taps t of (base[t, c] + coefficients[i, t, c // group]) * x[i - t, c]: float32 [n, h].

    x float32 [n, h] (any row stride); base float32 [taps, h]; coefficients float32 [n, taps, groups] (any row stride),
    where groups divides h and group = h / groups. x is 0 before a span's first row.
    """
    n, h = x.shape
    taps, groups = coefficients.shape[1:]
    if device.host:
        out = np.zeros((n, h), np.float32)
        for _, start, rows, _ in spans.table.tolist():
            for tap in range(min(taps, rows)):
                own = slice(start + tap, start + rows)
                weights = base[tap] + np.repeat(coefficients[own, tap], h // groups, axis=1)
                out[own] += weights * x[start : start + rows - tap]
        return out
    out = device.empty((n, h))
    if n:
        strides = (np.int64(x.strides[0] // 4), np.int64(coefficients.strides[0] // 4))
        sizes = (np.int32(h), np.int32(taps), np.int32(h // groups))
        args = (out, x, strides[0], base, coefficients, strides[1], spans.row_span, spans.table, *sizes)
        device.launch("dynamic_conv", "dynamic_conv", (n, -(-h // _THREADS)), (_THREADS,), args)
    return out
