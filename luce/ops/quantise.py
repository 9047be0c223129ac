"""Rows of activations as signed bytes with scales, for integer products (kernels/dot_int8.h)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from luce.models.spec import Activation
from luce.runtime.device import Array, Device

#: the columns that may share a scale: a section, or a block, whole ones of which a row has
SECTION, BLOCK = 128, 32
# Columns that a block of kernels/quantise.cu takes, and its threads.
_THREADS = 128
_COLUMNS = 4 * _THREADS


@dataclass(frozen=True)
class Quantised:
    """Rows to be multiplied: `count` rows of `cols` columns, as kernels/quantise.h has them.

    group  how many columns share a scale, their largest magnitude / 127: SECTION or BLOCK
    data   uint8 [sections, section_bytes]: rounded quotients of columns and scales, the scales, sums of quotients
    x      float32 [count, cols] the rows as they were, for products that take them so; None if there is none

    Rows beyond `count` are zeros, up to `padded`, the rows that kernels want.
    """

    count: int
    cols: int
    group: int
    padded: int
    data: Array
    x: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.count, self.cols


def padded_rows(count: int) -> int:
    """The rows that kernels for up to 16 rows come in (the variants of kernels/matmul_int8.cu)."""
    return count if count <= 2 else 8 if count <= 8 else 16


def section_bytes(padded: int, group: int) -> int:
    """Bytes of a section of `padded` rows (section_bytes of kernels/quantise.h)."""
    return padded * (SECTION + (28 if group == SECTION and padded in (8, 16) else 16))


def empty_quantised(
    device: Device, count: int, cols: int, group: int, *, padded: int | None = None, x: Array | None = None
) -> Quantised:
    """Rows that a kernel is about to write (kernels/quantise.h); `padded` defaults to padded_rows(count)."""
    padded = padded_rows(count) if padded is None else padded
    data = device.empty((-(-cols // SECTION), section_bytes(padded, group)), np.uint8)
    return Quantised(count, cols, group, padded, data, x)


def as_arguments(rows: Quantised | None) -> tuple[Array | None, np.int32, np.int32]:
    """Bytes, room and whether they are wide, as kernels take them that write bytes or floats; no room means floats."""
    if rows is None:
        return None, np.int32(0), np.int32(0)
    return rows.data, np.int32(rows.padded), np.int32(rows.group == SECTION)


def quantise(device: Device, x: Array, group: int, *, padded: int | None = None) -> Quantised:
    """x float32 [n, cols] with n > 0 (any row stride) on a GPU; cols is a multiple of 32.

    With room for `padded` rows, or as many as products of n <= 16 rows want. An infinity or a NaN makes NaN of every
    product with its group, one whose magnitudes are below 1e-30 is zeros.
    """
    n, cols = x.shape
    rows = empty_quantised(device, n, cols, group, padded=padded, x=x)
    sizes = (np.int64(x.strides[0] // 4), np.int32(n), np.int32(cols), np.int32(group == SECTION))
    device.launch("quantise", "quantise", _grid(rows), (_THREADS,), (x, rows.data, *sizes))
    return rows


def quantise_gated(device: Device, gate: Array, up: Array, activation: Activation, group: int) -> Quantised:
    """gated_activation of 0 < n <= 16 rows on a GPU, in bytes only: those that quantise makes of it.

    gate and up float32 [n, cols] (any row stride); cols is a multiple of 32.
    """
    n, cols = gate.shape
    rows = empty_quantised(device, n, cols, group)
    strides = np.int64(gate.strides[0] // 4), np.int64(up.strides[0] // 4)
    sizes = (np.int32(n), np.int32(cols), np.int32(activation == "gelu"), np.int32(group == SECTION))
    args = (gate, strides[0], up, strides[1], rows.data, *sizes)
    device.launch("quantise", "quantise_gated", _grid(rows), (_THREADS,), args)
    return rows


def _grid(rows: Quantised) -> tuple[int, int]:
    return rows.padded, -(-rows.cols // _COLUMNS)
