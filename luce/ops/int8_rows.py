"""Rows of activations and weights as int8 with a scale for each row, for products of many rows in integers
(luce.ops.matmul_prefill)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from luce.ops.fp16 import ACTIVATIONS, PADDING, Fp16Rows
from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.models.spec import Activation

# The constants of kernels/int8_rows.cu: threads of a row, most of a row of gates, columns of sums of a thread, and
# waves of a block where each has a row.
_THREADS, _GATED_THREADS, _COLUMNS, _WAVES = 256, 512, 4, 4


@dataclass(frozen=True)
class Int8Rows:
    """Rows x as `values` times `scale`."""

    #: columns of x
    cols: int
    #: int8 [rows, padded]: round(127 x / the row's largest |x|), with zeros beyond the columns of x
    values: Array
    #: float32 [rows]
    scale: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of x."""
        return self.values.shape[0], self.cols

    def __getitem__(self, rows: slice) -> Int8Rows:
        return replace(self, values=self.values[rows], scale=self.scale[rows])


@dataclass(frozen=True)
class Int8Sums:
    """A product of int8 rows of x and of a weight: out[r, j] = values[r, j] rows[r] features[j]."""

    #: int32 [n, features], exact
    values: Array
    #: float32 [n], the scales of x
    rows: Array
    #: float32 [features], those of the weight
    features: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and features."""
        return self.values.shape[0], self.values.shape[1]


def empty_int8(device: Device, rows: int, cols: int) -> Int8Rows:
    """Rows that a kernel is about to write (kernels/int8_rows.h)."""
    return Int8Rows(cols, device.empty((rows, padded_columns(cols)), np.int8), device.empty(rows))


def padded_columns(cols: int) -> int:
    """Columns of rows of `cols`, and bytes: the library needs rows in multiples of 16 bytes."""
    return -(-cols // PADDING) * PADDING


def to_int8(device: Device, x: Array | Fp16Rows, to: Int8Rows | None = None) -> Int8Rows:
    """Rows [n, cols], n > 0, as int8; written to `to` if given. x is float32; or float16, rows with scales, or bfloat16
    (uint16), of which cols and the row stride are multiples of 8."""
    if to is None:
        to = empty_int8(device, *x.shape)
    if not isinstance(x, Fp16Rows) and x.dtype != np.float16:
        kernel = "floats_to_int8" if x.dtype == np.float32 else "bf16_to_int8"
        (n, cols), padded = x.shape, to.values.shape[1]
        sizes = (np.int32(n), np.int32(cols), np.int32(padded), np.int64(x.strides[0] // x.itemsize))
        to_rows = to.values.view(np.uint8), to.scale
        device.launch("int8_rows", kernel, (-(-n // _WAVES),), (_WAVES * device.lanes,), (x, *to_rows, *sizes))
        return to
    values, plain = (x.values, False) if isinstance(x, Fp16Rows) else (x, True)
    n, cols = x.shape
    sizes = (np.int32(plain), np.int32(cols), np.int32(to.values.shape[1]), np.int64(values.strides[0] // 2))
    # Without scales, a pointer that the kernel does not dereference.
    factor = x.scale if isinstance(x, Fp16Rows) else to.scale
    args = (values, factor, to.values.view(np.uint8), to.scale, *sizes)
    device.launch("int8_rows", "rows_to_int8", (n,), (_THREADS,), args)
    return to


def gated_to_int8(device: Device, gate_up: Int8Sums, activation: Activation) -> Int8Rows:
    """Rows act(gate) up of products [n, 2 cols], gates first, n > 0, cols a multiple of 8, as int8."""
    n, cols = gate_up.values.shape[0], gate_up.values.shape[1] // 2
    made = empty_int8(device, n, cols)
    kept = 4 * cols if 4 * cols <= device.shared_limit else 0
    sizes = (ACTIVATIONS[activation], cols, made.values.shape[1], kept > 0)
    args = (gate_up.values, gate_up.rows, gate_up.features, made.values.view(np.uint8), made.scale)
    # As many columns for each thread, or one group more for some; whole waves of all GPUs.
    turns = -(-cols // (_GATED_THREADS * _COLUMNS))
    threads = -(-cols // (turns * _COLUMNS * 64)) * 64
    device.launch("int8_rows", "gated_to_int8", (n,), (threads,), (*args, *map(np.int32, sizes)), shared=kept)
    return made


def multiply(device: Device, x: Int8Rows, weight: Int8Rows, out: Array) -> None:
    """out = x weight^T by the BLAS library: exact sums in int32, then scaled. out float32 [n, rows], any row stride."""
    device.gemm(x.values, weight.values, out.view(np.int32))
    to_floats(device, Int8Sums(out, x.scale, weight.scale))


def to_floats(device: Device, sums: Int8Sums) -> Array:
    """The product, float32 [n, features], in the memory of its sums."""
    out = sums.values.view(np.float32)
    n, features = out.shape
    grid = (n, -(-features // (_THREADS * _COLUMNS)))
    args = (out, sums.rows, sums.features, np.int32(features), np.int64(out.strides[0] // 4))
    device.launch("int8_rows", "sums_to_float", grid, (_THREADS,), args)
    return out
