"""Rotary position embedding (Su et al., arXiv 2104.09864): angles once per step, rotation in place per layer."""

from __future__ import annotations

import numpy as np

from luce.runtime.device import Array, Device


def rope_table(device: Device, positions: Array, frequencies: Array, axes: Array, *, magnitude: float = 1.0) -> Array:
    """cos and sin of positions[row, axes[i]] * frequencies[i], both times magnitude: float32 [n, half, 2].

    positions int32 [n] (text: the same position on every axis) or [n, 4] (M-RoPE), frequencies float64 [half],
    axes int32 [half]. The angle is formed and reduced in float64: at position 262144 a float32 product is off by 0.016.
    """
    if device.host:
        table = positions[:, None] if positions.ndim == 1 else positions[:, axes]
        angles = table * frequencies[None, :]
        return (np.stack((np.cos(angles), np.sin(angles)), axis=-1) * magnitude).astype(np.float32)
    n, half = positions.shape[0], frequencies.shape[0]
    out = device.empty((n, half, 2))
    axes_per_row = np.int32(1 if positions.ndim == 1 else positions.shape[1])
    args = (out, positions, axes_per_row, frequencies, axes, np.int32(half), np.float32(magnitude))
    device.launch("rope", "rope_table", (n, -(-half // 64)), (64,), args)
    return out


def rope(device: Device, x: Array, table: Array, *, adjacent: bool) -> None:
    """Rotate the first 2 * half elements of each head in place.

    x float32 [n, heads, d] (any row and head strides), table float32 [n, half, 2]. Pair i is (x[i], x[i + half]), or
    (x[2i], x[2i + 1]) if adjacent.
    """
    if device.host:
        half = table.shape[1]
        cos, sin = table[:, None, :, 0], table[:, None, :, 1]
        if adjacent:
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
        rotated = a * cos - b * sin
        b[...] = b * cos + a * sin
        a[...] = rotated
        return
    n, heads, _ = x.shape
    half = table.shape[1]
    row, head = np.int64(x.strides[0] // 4), np.int64(x.strides[1] // 4)
    step, gap = (2, 1) if adjacent else (1, half)
    args = (x, row, head, np.int32(heads), table, np.int32(half), np.int32(step), np.int32(gap))
    device.launch("rope", "rope", (n, -(-heads * half // 128)), (128,), args)
