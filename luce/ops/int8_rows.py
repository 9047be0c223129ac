"""Rows of activations and weights as int8 with a scale for each row, for products of many rows in integers
(luce.ops.matmul_prefill)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from luce.ops.fp16 import PADDING, Fp16Rows
from luce.runtime.device import Array, Device

# The constants of kernels/int8_rows.cu.
_THREADS, _COLUMNS = 256, 4


@dataclass(frozen=True)
class Int8Rows:
    """Rows x as `values` times `scale`."""

    #: int8 [rows, padded]: round(127 x / the row's largest |x|), with zeros beyond the columns of x
    values: Array
    #: float32 [rows]
    scale: Array

    def __getitem__(self, rows: slice) -> Int8Rows:
        return Int8Rows(self.values[rows], self.scale[rows])


def empty_int8(device: Device, rows: int, cols: int) -> Int8Rows:
    """Rows that `to_int8` writes."""
    return Int8Rows(device.empty((rows, padded_columns(cols)), np.int8), device.empty(rows))


def padded_columns(cols: int) -> int:
    """Columns of rows of `cols`, and bytes: the library needs rows in multiples of 16 bytes."""
    return -(-cols // PADDING) * PADDING


def to_int8(device: Device, x: Array | Fp16Rows, to: Int8Rows) -> None:
    """Write float16 [n, cols] rows, cols a multiple of 8, or rows with scales, n > 0."""
    values, plain = (x.values, False) if isinstance(x, Fp16Rows) else (x, True)
    n, cols = x.shape
    sizes = (np.int32(plain), np.int32(cols), np.int32(to.values.shape[1]), np.int64(values.strides[0] // 2))
    # Without scales, a pointer that the kernel does not dereference.
    factor = x.scale if isinstance(x, Fp16Rows) else to.scale
    args = (values, factor, to.values.view(np.uint8), to.scale, *sizes)
    device.launch("int8_rows", "rows_to_int8", (n,), (_THREADS,), args)


def multiply(device: Device, x: Int8Rows, weight: Int8Rows, out: Array) -> None:
    """out = x weight^T by the BLAS library: exact sums in int32, then scaled. out float32 [n, rows], any row stride."""
    device.gemm(x.values, weight.values, out.view(np.int32))
    n, rows = out.shape
    grid = (n, -(-rows // (_THREADS * _COLUMNS)))
    args = (out, x.scale, weight.scale, np.int32(rows), np.int64(out.strides[0] // 4))
    device.launch("int8_rows", "sums_to_float", grid, (_THREADS,), args)
