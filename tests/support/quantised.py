"""What quantise.h makes of rows, by its definition in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.ops.matmul import FEW_ROWS
from luce.ops.quantise import Quantised
from luce.runtime.device import Device

BYTES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SECTION = 128


def goes_in_bytes(device: Device, name: str, n: int) -> bool:
    """Whether products of n rows with weights in this format are of bytes."""
    return not device.host and 0 < n <= FEW_ROWS and name in BYTES


def group_for(name: str) -> int:
    """How many columns of x share a scale where it meets weights in this format."""
    return 32 if name in ("Q4_0", "Q8_0") else SECTION


@dataclass(frozen=True)
class Bytes:
    """values int8 [n, blocks, 32] of whole sections, their sums int32 [n, blocks], scales float32 [n, blocks]."""

    values: NDArray[np.int8]
    sums: NDArray[np.int32]
    scales: NDArray[np.float32]

    def floats(self, cols: int) -> NDArray[np.float64]:
        """What the first `cols` columns stand for: [n, cols]."""
        products = self.values * self.scales[..., None].astype(np.float64)
        return products.reshape(len(products), -1)[:, :cols]


def quantised(x: NDArray[np.floating], group: int) -> Bytes:
    """The bytes of x [n, cols], whose last section zeros make whole."""
    n, cols = x.shape
    groups = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -cols % SECTION))).reshape(n, -1, group)
    most = np.abs(groups).max(axis=2)
    with np.errstate(all="ignore"):
        factor = np.where((most > 1e-30) & np.isfinite(most), np.float32(127) / most, np.float32(0))
        values = np.where(factor[..., None] > 0, np.rint(groups * factor[..., None]), 0).astype(np.int8)
    values = values.reshape(n, -1, 32)
    scales = np.where(most <= 1e-30, np.float32(0), most / np.float32(127))
    return Bytes(values, values.sum(axis=2, dtype=np.int32), np.repeat(scales, group // 32, axis=1))


def unpacked(device: Device, rows: Quantised) -> Bytes:
    """All rows that there is room for, out of the order that quantise.h gives; sums wherever they are must agree."""
    data, room = device.download(rows.data), rows.padded
    sections, eights = len(data), room // 8 if room in (8, 16) else 0
    packed, scales = data[:, : room * SECTION].copy().view(np.int8), data[:, room * SECTION :].copy()
    if eights:
        # [section, pair, row, w, block, i, column] to [row, section, pair, block, i, w, column]
        values = packed.reshape(sections, 2, room, 4, 2, 2, 4).transpose(2, 0, 1, 4, 5, 3, 6).reshape(room, -1, 32)
    else:
        values = packed.reshape(sections, 2, room, 64).transpose(2, 0, 1, 3).reshape(room, -1, 32)
    sums = values.sum(axis=2, dtype=np.int32)
    if rows.group == 32:
        floats = scales.view(np.float32)
        if eights:
            floats = floats.reshape(sections, 4, 4, eights, 2).transpose(3, 2, 4, 0, 1)
        else:
            floats = floats.reshape(sections, room, 4).swapaxes(0, 1)
        return Bytes(values, sums, floats.reshape(room, -1))
    if eights:
        own = scales[:, : room * 8].reshape(sections, room, 2, 4)
        halves = scales[:, room * 8 : room * 24].copy().view(np.float16).reshape(sections, 8, 4, eights, 2)
        floats = scales[:, room * 24 :].copy().view(np.float32).reshape(sections, 4, eights, 2)
        floats = floats.transpose(2, 1, 3, 0).reshape(room, sections)
    else:
        own = scales.reshape(sections, room, 4, 4)[:, :, :2]
        tails = scales.reshape(sections, room, 16)[..., 8:].copy().view(np.float32)
        assert not tails[..., 1].any()
        floats = tails[..., 0].T
    low, high = (np.swapaxes(part, 0, 1).astype(np.int32) for part in (own[:, :, 0], own[:, :, 1].view(np.int8)))
    assert (low < 32).all()
    found = (32 * high + low).reshape(room, -1)
    np.testing.assert_array_equal(found, sums)
    if eights:
        again = halves.astype(np.int32).transpose(3, 1, 0, 2, 4).reshape(room, sections, 4, 2)
        np.testing.assert_array_equal(again, np.stack((32 * high, low), axis=-1))
    return Bytes(values, found, np.repeat(floats, 4, axis=1))


def same_bytes(device: Device, one: Quantised, other: Quantised) -> None:
    """Both have room for as many rows, and the same bits in all of them."""
    assert (one.shape, one.group, one.padded) == (other.shape, other.group, other.padded)
    np.testing.assert_array_equal(device.download(one.data), device.download(other.data))


def seen(device: Device, name: str, x: NDArray[np.floating]) -> NDArray[np.float64]:
    """The rows [n, cols] as their products with weights in this format see them."""
    if name == "BF16" and "BF16" in device.products and 0 < len(x) <= FEW_ROWS and x.shape[1] % 32 == 0:
        high = brain(np.asarray(x, np.float32))
        return high.astype(np.float64) + brain((x - high).astype(np.float32))
    if not goes_in_bytes(device, name, len(x)):
        return x.astype(np.float64)
    return quantised(x, group_for(name)).floats(x.shape[1])


def brain(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Finite values rounded to bfloat16."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)
