"""Rows of activations as signed bytes with a scale for every 32 columns, for integer products (kernels/dot_s8.h)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from luce.runtime.device import Array, Device

#: columns of a scale
BLOCK = 32
_THREADS = 256


@dataclass(frozen=True)
class Quantised:
    """Rows to be multiplied: `count` rows of `cols` columns.

    values  int8 [cols / 32, space, 32]    rounded quotients of the columns and their block's scale
    scales  float32 [cols / 32, space, 2]  a block's largest magnitude / 127, and that times the sum of its values
    x       float32 [count, cols] the rows as they were, for products that take them so; None if there is none

    Rows beyond `count` are zeros, as many as kernels want.
    """

    count: int
    values: Array
    scales: Array
    x: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.count, self.values.shape[0] * BLOCK

    @property
    def space(self) -> int:
        """Rows that there is room for."""
        return int(self.values.shape[1])


def space_for(count: int) -> int:
    """The rows that kernels for up to 16 rows come in (the variants of kernels/matmul_s8.cu)."""
    return count if count <= 2 else 8 if count <= 8 else 16


def room(device: Device, count: int, cols: int, *, space: int, x: Array | None = None) -> Quantised:
    """Rows still to be written, by a kernel that has them at hand (kernels/quantise.h)."""
    values = device.empty((cols // BLOCK, space, BLOCK), np.int8)
    return Quantised(count, values, device.empty((cols // BLOCK, space, 2)), x)


def as_arguments(rows: Quantised | None) -> tuple[Array | None, Array | None, np.int32]:
    """Values, scales and room, as kernels take them that write bytes or floats; no room means floats."""
    return (None, None, np.int32(0)) if rows is None else (rows.values, rows.scales, np.int32(rows.space))


def quantise(device: Device, x: Array) -> Quantised:
    """x float32 [n, cols] with 0 < n <= 16 (any row stride) on a GPU; cols is a multiple of 32.

    A block with an infinity or a NaN makes NaN of every product, one whose magnitudes are below 1e-30 is zeros.
    """
    rows = room(device, *x.shape, space=space_for(x.shape[0]), x=x)
    grid = (rows.space, -(-x.shape[1] // _THREADS))
    sizes = (np.int64(x.strides[0] // 4), np.int32(x.shape[0]), np.int32(x.shape[1]))
    device.launch("quantise", "quantise", grid, (_THREADS,), (x, rows.values, rows.scales, *sizes))
    return rows
