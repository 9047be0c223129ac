"""Angles of the rotary position embedding (Su et al., arXiv 2104.09864), once per step; luce.ops.qkv applies them."""

from __future__ import annotations

from functools import partial

import numpy as np

from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import STRETCHED

# No position reaches this.
_NEVER = np.iinfo(np.int32).max


def rope_table(device: Device, positions: Array, frequencies: Array, axes: Array, *, magnitude: float = 1.0) -> Array:
    """cos and sin of positions[row, axes[i]] * frequencies[i], both times magnitude: float32 [n, half, 2].

    positions int32 [n] (text: the same position on every axis) or [n, 4] (M-RoPE), axes int32 [half], frequencies
    float64 [half], or [2, half]: then positions from STRETCHED on count from there and take the second. The angle is
    formed and reduced in float64: at position 262144 a float32 product is off by 0.016.
    """
    n, half = positions.shape[0], frequencies.shape[-1]
    if isinstance(device, HostDevice):
        return device.compute(partial(_host, magnitude), (n, half, 2), positions, frequencies, axes)
    out = device.empty((n, half, 2))
    axes_per_row = np.int32(1 if positions.ndim == 1 else positions.shape[1])
    stretched = np.int32(STRETCHED if frequencies.ndim == 2 else _NEVER)
    args = (out, positions, axes_per_row, frequencies, axes, np.int32(half), stretched, np.float32(magnitude))
    device.launch("rope", "rope_table", (n, -(-half // 64)), (64,), args)
    return out


def _host(magnitude: float, positions: Array, frequencies: Array, axes: Array) -> Array:
    table = positions[:, None] if positions.ndim == 1 else positions[:, axes]
    if frequencies.ndim == 2:
        stretched = table >= STRETCHED
        angles = (table - STRETCHED * stretched) * np.where(stretched, frequencies[1], frequencies[0])
    else:
        angles = table * frequencies[None, :]
    return (np.stack((np.cos(angles), np.sin(angles)), axis=-1) * magnitude).astype(np.float32)
