"""Rows of activations and weights as fp16, for products of many rows (luce.ops.matmul_prefill, luce.ops.moe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.models.spec import Activation

#: fp16 rows are padded with zeros to a multiple of so many columns, which the tile kernel takes at a time
PADDING = 128
#: of rows whose products are float32, however large: the range of fp16
TOP = 15
#: rows of a block whose waves have a row each: FP16_ROWS of kernels/fp16_rows.h
BLOCK_ROWS = 4
# Threads of dequant.cu, for a row in fp16.cu, and at most those that add a row's parts.
_DEQUANT_THREADS, _ROW_THREADS, _PART_THREADS = 128, 256, 320
#: columns that a thread of fp16.cu converts at a time
GROUP = 8
#: the numbers of kernels/fp16.cu and int8_rows.cu
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "clamped_swiglu": 2}


@dataclass(frozen=True)
class Fp16Rows:
    """Rows x as `values` times `scale`."""

    #: columns of x
    cols: int
    #: float16 [rows, padded]: x divided by the row's scale, with zeros beyond the columns of x
    values: Array
    #: float32 [rows]: 1, or a power of two that brings the row into the range of fp16
    scale: Array
    #: the magnitudes of finite values are 2^top at most
    top: int = TOP

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of x."""
        return self.values.shape[0], self.cols


@dataclass(frozen=True)
class Halves:
    """A product of Fp16Rows, rounded to fp16: out[r, j] = values[r, j] rows[r]."""

    #: float16 [n, features], a multiple of GROUP
    values: Array
    #: float32 [n], the scales of x
    rows: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and features."""
        return self.values.shape[0], self.values.shape[1]


def empty_fp16(device: Device, rows: int, cols: int, top: int = TOP) -> Fp16Rows:
    """Rows that a kernel is about to write (kernels/fp16_rows.h)."""
    padded = -(-cols // PADDING) * PADDING
    return Fp16Rows(cols, device.empty((rows, padded), np.float16), device.empty(rows), top)


def to_fp16(device: Device, x: Array, top: int = TOP) -> Fp16Rows:
    """Rows of x, float32 [n, cols] or [n, slots, cols] with any strides but the last, as fp16 [n * slots, padded].

    Larger magnitudes than 2^top, -6 < top < 16, give the row a scale.
    """
    n, cols = x.shape[0], x.shape[-1]
    slots, x_slot = (x.shape[1], x.strides[1] // 4) if x.ndim == 3 else (1, 0)
    rows = empty_fp16(device, n * slots, cols, top)
    sizes = (np.int32(size) for size in (n * slots, slots, cols, rows.values.shape[1]))
    args = (x, rows.values, rows.scale, *sizes, np.int64(x.strides[0] // 4), np.int64(x_slot), np.int32(top))
    device.launch("fp16", "rows_to_fp16", (-(-n * slots // BLOCK_ROWS),), (BLOCK_ROWS * device.lanes,), args)
    return rows


def gated_to_fp16(device: Device, gate: Array, up: Array, activation: Activation, top: int = TOP) -> Fp16Rows:
    """`to_fp16` of luce.ops.activation.gated_activation, on a GPU, n > 0: the same bits."""
    n, cols = gate.shape
    rows = empty_fp16(device, n, cols, top)
    sizes = (np.int32(ACTIVATIONS[activation]), np.int32(cols), np.int32(rows.values.shape[1]))
    strides = np.int64(gate.strides[0] // 4), np.int64(up.strides[0] // 4)
    args = (gate, up, rows.values, rows.scale, *sizes, *strides, np.int32(top))
    device.launch("fp16", "gated_to_fp16", (n,), _threads(rows), args)
    return rows


def gated_halves_to_fp16(device: Device, gate_up: Halves, activation: Activation, top: int = TOP) -> Fp16Rows:
    """Rows act(gate) up of products [n, 2 cols], gates first, n > 0, cols a multiple of 8, as fp16."""
    n, cols = gate_up.shape[0], gate_up.shape[1] // 2
    rows = empty_fp16(device, n, cols, top)
    sizes = (np.int32(ACTIVATIONS[activation]), np.int32(cols), np.int32(rows.values.shape[1]))
    args = (gate_up.values, gate_up.rows, rows.values, rows.scale, *sizes, np.int32(top))
    device.launch("fp16", "gated_halves_to_fp16", (n,), _threads(rows), args)
    return rows


def sigmoid_gate_to_fp16(device: Device, x: Array, gate: Array, top: int = TOP) -> Fp16Rows:
    """`to_fp16` of luce.ops.activation.sigmoid_gate, on a GPU, n > 0: the same bits."""
    n, heads, d = x.shape
    rows = empty_fp16(device, n, heads * d, top)
    sizes = (np.int32(heads), np.int32(d), np.int32(rows.values.shape[1]))
    strides = np.int64(gate.strides[0] // 4), np.int64(gate.strides[1] // 4)
    args = (x, gate, rows.values, rows.scale, *sizes, *strides, np.int32(top))
    device.launch("fp16", "sigmoid_gate_to_fp16", (n,), _threads(rows), args)
    return rows


def sigmoid_halves_to_fp16(device: Device, x: Array, gate: Halves, top: int = TOP) -> Fp16Rows:
    """`sigmoid_gate_to_fp16` of a gate float16 [n, heads, d] (any row and head strides that are multiples of GROUP, as
    d is) times its rows' scales."""
    n, heads, d = x.shape
    rows = empty_fp16(device, n, heads * d, top)
    sizes = (np.int32(heads), np.int32(d), np.int32(rows.values.shape[1]))
    strides = np.int64(gate.values.strides[0] // 2), np.int64(gate.values.strides[1] // 2)
    args = (x, gate.values, gate.rows, rows.values, rows.scale, *sizes, *strides, np.int32(top))
    device.launch("fp16", "sigmoid_halves_to_fp16", (n,), _threads(rows), args)
    return rows


def _threads(rows: Fp16Rows) -> tuple[int]:
    # Chosen by the row's length alone: 8 columns a thread, and again.
    return (min(256, max(64, 1 << (rows.values.shape[1] // 8 - 1).bit_length())),)


def rescale(device: Device, out: Array, scale: Array) -> None:
    """out[r] *= scale[r], after a product of Fp16Rows.values: out float32 [n, rows] (any row stride)."""
    n, rows = out.shape
    args = (out, scale, np.int32(rows), np.int64(out.strides[0] // 4))
    device.launch("fp16", "rescale_rows", (n,), (_ROW_THREADS,), args)


def to_floats(device: Device, halves: Halves) -> Array:
    """The product, float32 [n, features]."""
    n, features = halves.shape
    out = device.empty((n, features))
    grid = (n, -(-features // (GROUP * _ROW_THREADS)))
    args = (halves.values, halves.rows, out, np.int32(features))
    device.launch("fp16", "halves_to_float", grid, (_ROW_THREADS,), args)
    return out


def add_parts(device: Device, parts: Array, out: Array) -> None:
    """out = the sum over the parts, in their order: parts float32 [count, n, rows] contiguous, out float32 [n, rows]
    (any row stride)."""
    count, n, rows = parts.shape
    # A product of 257 features takes one block for each row.
    threads = min(_PART_THREADS, -(-rows // 32) * 32)
    args = (parts, out, np.int32(count), np.int32(rows), np.int64(out.strides[0] // 4))
    device.launch("fp16", "add_parts", (n, -(-rows // threads)), (threads,), args)


def dequantise(device: Device, data: Array, type: GGMLQuantizationType, to: Array) -> None:
    """Rows of quant blocks (uint8 [rows, row_bytes]) as fp16: to float16 [rows, cols]."""
    args, defines = (data, to, np.int32(to.shape[1])), {"QTYPE": type.name}
    device.launch("dequant", "dequant", (len(data),), (_DEQUANT_THREADS,), args, defines=defines)
