"""Rows of activations and weights as fp16, for products of many rows (luce.ops.matmul_prefill, luce.ops.moe)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from luce.runtime.device import Array, Device

#: fp16 rows are padded with zeros to a multiple of so many columns, which the tile kernel takes at a time
PADDING = 128
# Threads of dequant.cu, and for a row in fp16.cu.
_DEQUANT_THREADS, _ROW_THREADS = 128, 256


@dataclass(frozen=True)
class Fp16Rows:
    """Rows x as `values` times `scale`."""

    #: float16 [rows, padded]: x divided by the row's scale, with zeros beyond the columns of x
    values: Array
    #: float32 [rows]: 1, or a power of two that brings the row into the range of fp16
    scale: Array


def to_fp16(device: Device, x: Array) -> Fp16Rows:
    """Rows of x, float32 [n, cols] or [n, slots, cols] with any strides but the last, as fp16 [n * slots, padded]."""
    n, cols = x.shape[0], x.shape[-1]
    slots, x_slot = (x.shape[1], x.strides[1] // 4) if x.ndim == 3 else (1, 0)
    padded = -(-cols // PADDING) * PADDING
    rows = Fp16Rows(device.empty((n * slots, padded), np.float16), device.empty(n * slots))
    # Chosen by the row's length alone: 8 columns a thread, and again.
    threads = min(256, max(64, 1 << (padded // 8 - 1).bit_length()))
    sizes = (np.int32(slots), np.int32(cols), np.int32(padded), np.int64(x.strides[0] // 4), np.int64(x_slot))
    device.launch("fp16", "rows_to_fp16", (n * slots,), (threads,), (x, rows.values, rows.scale, *sizes))
    return rows


def rescale(device: Device, out: Array, scale: Array) -> None:
    """out[r] *= scale[r], after a product of Fp16Rows.values: out float32 [n, rows] (any row stride)."""
    n, rows = out.shape
    args = (out, scale, np.int32(rows), np.int64(out.strides[0] // 4))
    device.launch("fp16", "rescale_rows", (n,), (_ROW_THREADS,), args)


def dequantise(device: Device, data: Array, type: GGMLQuantizationType, to: Array) -> None:
    """Rows of quant blocks (uint8 [rows, row_bytes]) as fp16: to float16 [rows, cols]."""
    args, defines = (data, to, np.int32(to.shape[1])), {"QTYPE": type.name}
    device.launch("dequant", "dequant", (len(data),), (_DEQUANT_THREADS,), args, defines=defines)
