"""Rows of activations as int8 with scales, for integer products (kernels/dot_int8.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.models.spec import Activation

#: Of more than 16 rows, so many are a group of their own.
GROUP_ROWS = 32
#: Columns that share a scale: a section (the last one padded with zeros), or a quant block.
SECTION, BLOCK = 128, 32
# Columns that a block of kernels/quantise.cu takes, and its threads.
_THREADS = 128
_COLUMNS = 4 * _THREADS


@dataclass(frozen=True)
class Quantised:
    """`count` rows of `cols` columns as int8, in the layout of kernels/quantise.h."""

    count: int
    cols: int
    #: columns that share a scale, their largest magnitude / 127: SECTION or BLOCK
    group: int
    #: the rows that kernels are built for; those from `count` on are zeros. Of more than 16 rows, those of a group
    padded: int
    #: uint8 [groups * sections, section_bytes], a group for `padded` rows: rounded quotients of columns and scales, the
    #: scales, sums of quotients
    data: Array
    #: float32 [count, cols]: the rows before rounding, for products that need them; None without such products
    x: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.count, self.cols


def padded_rows(device: Device, count: int) -> int:
    """The rows of the kernel variant for `count` rows (kernels/matmul_int8.cu); of more than 16, those of a group.

    Two rows have a variant for devices without tensor cores alone: an H200 takes 7.40 ms for two rows of a 27B model by
    it, and 6.99 for four by tiles.
    """
    if count == 1 or (count == 2 and "BF16" not in device.products):
        return count
    return 8 if count <= 8 else 16 if count <= 16 else GROUP_ROWS


def section_bytes(padded: int, group: int) -> int:
    """Bytes of a section of `padded` rows (section_bytes of kernels/quantise.h)."""
    return padded * (SECTION + (28 if group == SECTION and padded in (8, 16, 32) else 16))


def empty_quantised(
    device: Device, count: int, cols: int, group: int, *, padded: int | None = None, x: Array | None = None
) -> Quantised:
    """Rows that a kernel is about to write (kernels/quantise.h); `padded` defaults to padded_rows."""
    padded = padded_rows(device, count) if padded is None else padded
    data = device.empty((-(-count // padded) * -(-cols // SECTION), section_bytes(padded, group)), np.uint8)
    return Quantised(count, cols, group, padded, data, x)


def as_arguments(rows: Quantised | None) -> tuple[Array | None, np.int32, np.int32]:
    """Arguments of kernels that write int8 or floats: data, padded rows (0: floats), whether sections share scales."""
    if rows is None:
        return None, np.int32(0), np.int32(0)
    return rows.data, np.int32(rows.padded), np.int32(rows.group == SECTION)


def quantise(device: Device, x: Array, group: int, *, padded: int | None = None) -> Quantised:
    """x float32 [n, cols] with n > 0 (any row stride) on a GPU; cols is a multiple of 32.

    `padded` defaults to the rows of the kernels. An infinity or a NaN makes every product with its
    group NaN; a group whose magnitudes are below 1e-30 becomes zeros.
    """
    n, cols = x.shape
    rows = empty_quantised(device, n, cols, group, padded=padded, x=x)
    facts = (n, cols, rows.padded, group == SECTION)
    sizes = (np.int64(x.strides[0] // 4), *(np.int32(fact) for fact in facts))
    device.launch("quantise", "quantise", _grid(rows), (_THREADS,), (x, rows.data, *sizes))
    return rows


def quantise_pairs(
    device: Device, x: Array, group: int, order: Array, tiles: Array, k: int, count: int, tile_rows: int
) -> Quantised:
    """x float32 [n, cols] (any row stride) on a GPU for `count` tiles of `tile_rows` rows, a group each.

    order int32 [n * k] and tiles int32 [chosen, 3] as luce.ops.moe.Groups has them; behind the rows of their pairs
    those of x in order, if `count` is more than `chosen`. With k = 0 x has the rows of all tiles one after the other.
    Rows that a tile lacks become zeros; a tile of none is not written.
    """
    n, cols = x.shape
    rows = empty_quantised(device, count * tile_rows, cols, group, padded=tile_rows)
    facts = (n, cols, tile_rows, group == SECTION, len(tiles), k)
    args = (x, order, tiles, rows.data, np.int64(x.strides[0] // 4), *(np.int32(fact) for fact in facts))
    device.launch("quantise", "quantise_pairs", _grid(rows), (_THREADS,), args)
    return rows


def quantise_gated(device: Device, gate: Array, up: Array, activation: Activation, group: int) -> Quantised:
    """gated_activation, silu or gelu, of 0 < n <= 16 rows on a GPU as int8 only: `quantise` of its result.

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
    return -(-rows.count // rows.padded) * rows.padded, -(-rows.cols // _COLUMNS)
