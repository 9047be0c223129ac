"""What quantise.h makes of rows, by its definition in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.ops.matmul import FEW_ROWS
from luce.runtime.device import Device

BYTES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def goes_in_bytes(device: Device, name: str, n: int) -> bool:
    """Whether products of n rows with weights in this format are of bytes."""
    return not device.host and 0 < n <= FEW_ROWS and name in BYTES


def quantised(x: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """values int8 [n, cols / 32, 32] and scales float32 [n, cols / 32] of x [n, cols]."""
    blocks = np.asarray(x, np.float32).reshape(len(x), -1, 32)
    most = np.abs(blocks).max(axis=2)
    with np.errstate(all="ignore"):
        factor = np.where((most > 1e-30) & np.isfinite(most), np.float32(127) / most, np.float32(0))
        values = np.where(factor[..., None] > 0, np.rint(blocks * factor[..., None]), 0).astype(np.int8)
    return values, np.where(most <= 1e-30, np.float32(0), most / np.float32(127))


def seen(device: Device, name: str, x: NDArray[np.floating]) -> NDArray[np.float64]:
    """The rows [n, cols] as their products with weights in this format see them."""
    if name == "BF16" and "BF16" in device.products and 0 < len(x) <= FEW_ROWS and x.shape[1] % 32 == 0:
        high = brain(np.asarray(x, np.float32))
        return high.astype(np.float64) + brain((x - high).astype(np.float32))
    if not goes_in_bytes(device, name, len(x)):
        return x.astype(np.float64)
    values, scales = quantised(x)
    return (values * scales[..., None].astype(np.float64)).reshape(x.shape)


def brain(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Finite values rounded to bfloat16."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)
