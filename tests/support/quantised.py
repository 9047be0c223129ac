"""Rows as quantise.h quantises them, by its definition in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.ops.fp16 import Fp16Rows, to_fp16
from luce.ops.matmul import FEW_ROWS, MANY_ROWS
from luce.ops.quantise import BLOCK, Quantised
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from tests.support.quant_blocks import PLAIN

INT8 = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SECTION = 128


def goes_in_int8(device: Device, name: str, n: int, cols: int = 0) -> bool:
    """Whether products of n rows with weights in this format are of int8. More than FEW_ROWS need tensor cores, and so
    many columns that rows have four chains; those of experts are not, for which `cols` is 0."""
    many = n <= MANY_ROWS and "BF16" in device.products and name.endswith("_K") and cols > 3 * 256
    return not device.host and name in INT8 and (0 < n <= FEW_ROWS or many)


def group_for(name: str) -> int:
    """How many columns of x share a scale where it meets weights in this format."""
    return 32 if name in ("Q4_0", "Q8_0") else SECTION


@dataclass(frozen=True)
class Int8Rows:
    """Quantised rows of whole sections."""

    #: int8 [n, blocks, 32]
    values: NDArray[np.int8]
    #: of the values: int32 [n, blocks]
    sums: NDArray[np.int32]
    #: float32 [n, blocks]
    scales: NDArray[np.float32]

    def floats(self, cols: int) -> NDArray[np.float64]:
        """The values of the first `cols` columns times their scales: [n, cols]."""
        products = self.values * self.scales[..., None].astype(np.float64)
        return products.reshape(len(products), -1)[:, :cols]


def quantised(x: NDArray[np.floating], group: int) -> Int8Rows:
    """x [n, cols], its last section filled up with zeros, as int8."""
    n, cols = x.shape
    groups = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -cols % SECTION))).reshape(n, -1, group)
    most = np.abs(groups).max(axis=2)
    with np.errstate(all="ignore"):
        factor = np.where((most > 1e-30) & np.isfinite(most), np.float32(127) / most, np.float32(0))
        values = np.where(factor[..., None] > 0, np.rint(groups * factor[..., None]), 0).astype(np.int8)
    values = values.reshape(n, -1, 32)
    scales = np.where(most <= 1e-30, np.float32(0), most / np.float32(127))
    return Int8Rows(values, values.sum(axis=2, dtype=np.int32), np.repeat(scales, group // 32, axis=1))


def unpacked(device: Device, rows: Quantised) -> Int8Rows:
    """All rows, padded ones too, out of the order of quantise.h; all copies of the sums must agree."""
    data, padded = device.download(rows.data), rows.padded
    sections, eights = len(data), padded // 8 if padded in (8, 16, 32) else 0
    packed, scales = data[:, : padded * SECTION].copy().view(np.int8), data[:, padded * SECTION :].copy()
    if eights:
        # [section, pair, row, w, block, i, column] to [row, section, pair, block, i, w, column]
        values = packed.reshape(sections, 2, padded, 4, 2, 2, 4).transpose(2, 0, 1, 4, 5, 3, 6).reshape(padded, -1, 32)
    else:
        values = packed.reshape(sections, 2, padded, 64).transpose(2, 0, 1, 3).reshape(padded, -1, 32)
    sums = values.sum(axis=2, dtype=np.int32)
    if rows.group == 32:
        floats = scales.view(np.float32)
        if eights:
            floats = floats.reshape(sections, 4, 4, eights, 2).transpose(3, 2, 4, 0, 1)
        else:
            floats = floats.reshape(sections, padded, 4).swapaxes(0, 1)
        return Int8Rows(values, sums, floats.reshape(padded, -1))
    if eights:
        own = scales[:, : padded * 8].reshape(sections, padded, 2, 4)
        halves = scales[:, padded * 8 : padded * 24].copy().view(np.float16).reshape(sections, 8, 4, eights, 2)
        floats = scales[:, padded * 24 :].copy().view(np.float32).reshape(sections, 4, eights, 2)
        floats = floats.transpose(2, 1, 3, 0).reshape(padded, sections)
    else:
        own = scales.reshape(sections, padded, 4, 4)[:, :, :2]
        tails = scales.reshape(sections, padded, 16)[..., 8:].copy().view(np.float32)
        assert not tails[..., 1].any()
        floats = tails[..., 0].T
    low, high = (np.swapaxes(part, 0, 1).astype(np.int32) for part in (own[:, :, 0], own[:, :, 1].view(np.int8)))
    assert (low < 32).all()
    found = (32 * high + low).reshape(padded, -1)
    np.testing.assert_array_equal(found, sums)
    if eights:
        again = halves.astype(np.int32).transpose(3, 1, 0, 2, 4).reshape(padded, sections, 4, 2)
        np.testing.assert_array_equal(again, np.stack((32 * high, low), axis=-1))
    return Int8Rows(values, found, np.repeat(floats, 4, axis=1))


def same_rows(device: Device, one: Quantised, other: Quantised) -> None:
    """Both have as many rows, padded ones too, and the same bits in all of them."""
    assert (one.shape, one.group, one.padded) == (other.shape, other.group, other.padded)
    np.testing.assert_array_equal(device.download(one.data), device.download(other.data))


def seen(device: Device, name: str, x: NDArray[np.floating]) -> NDArray[np.float64]:
    """The rows [n, cols] as products with weights in this format round them."""
    if name == "BF16" and "BF16" in device.products and 0 < len(x) <= FEW_ROWS and x.shape[1] % 32 == 0:
        high = brain(np.asarray(x, np.float32))
        return high.astype(np.float64) + brain((x - high).astype(np.float32))
    if isinstance(device, CpuDevice) and name not in PLAIN:
        # Two int8: the second has the rest of the first, in steps 254 times as fine (luce.cpu_kernels.quantised_rows).
        groups = np.asarray(x, np.float32).reshape(len(x), -1, BLOCK)
        largest = np.abs(groups).max(axis=2, keepdims=True)
        quotients = groups * np.where(largest > 1e-30, np.float32(127) / largest, np.float32(0))
        fine = 254 * np.rint(quotients) + np.rint((quotients - np.rint(quotients)) * np.float32(254))
        return (fine.astype(np.float64) * (largest / np.float32(127 * 254))).reshape(x.shape)
    if not goes_in_int8(device, name, len(x), x.shape[1]):
        return x.astype(np.float64)
    return quantised(x, group_for(name)).floats(x.shape[1])


def brain(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Finite values rounded to bfloat16."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def same_halves(device: Device, actual: Array | Fp16Rows | Quantised, expected: Array, top: int = 15) -> None:
    """The bits of to_fp16 of `expected`, float32 [n, cols]."""
    assert isinstance(actual, Fp16Rows)
    assert actual.shape == expected.shape
    made = to_fp16(device, expected, top)
    assert actual.top == top
    for own, other in ((actual.values, made.values), (actual.scale, made.scale)):
        np.testing.assert_array_equal(device.download(own).view(np.uint8), device.download(other).view(np.uint8))
