"""Products of up to 16 rows with bfloat16 weights by tiles (kernels/matmul_bf16.cu).

Each value of x becomes two bfloat16 numbers, which hold 16 of its 24 bits: a product errs by 2^-18 of its factors'
size, far less than the rounding of the weights. With float32 products of single values, 16 rows of 5120 columns and 3.4
GB of weights take 7.1 ms on an H200, six times as long as reading the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from luce.ops.weight import WeightPart
from luce.runtime.device import Array, Device

# The constants of matmul_bf16.cu.
_STEP, _THREADS, _SPLIT_THREADS = 32, 256, 256


@dataclass(frozen=True)
class Split:
    """Rows of x as pairs of bfloat16."""

    count: int
    #: the rows of the kernel's tiles; those from `count` on are zeros
    padded: int
    #: uint16 [steps, padded / 8, 32 lanes, high or low, 8]
    values: Array


def takes_tiles(device: Device, part: WeightPart, cols: int) -> bool:
    """Whether a bfloat16 part is multiplied in tiles, whatever the number of rows."""
    return "BF16" in device.products and cols % _STEP == 0


def split_rows(device: Device, x: Array) -> Split:
    """x float32 [n, cols], 0 < n <= 16 (any row stride), cols in whole steps of 32."""
    n, cols = x.shape
    padded = 8 if n <= 8 else 16
    lanes = cols // _STEP * (padded // 8) * 32
    split = Split(n, padded, device.empty((cols // _STEP, padded // 8, 32, 2, 8), np.uint16))
    sizes = (np.int32(n), np.int32(cols), np.int32(x.strides[0] // 4))
    defines = {"ROWS": padded, "TILES": 1}
    grid = (-(-lanes // _SPLIT_THREADS),)
    device.launch("matmul_bf16", "split_rows", grid, (_SPLIT_THREADS,), (x, split.values, *sizes), defines=defines)
    return split


def multiply_bf16(device: Device, x: Split, part: WeightPart, cols: int, out: Array) -> None:
    """Write the part's columns of out float32 [n, features]."""
    # With more tiles per block, x is read less often; with fewer, more of a large GPU is busy.
    tiles = 4 if part.rows >= 8192 else 2 if part.rows >= 4096 else 1
    sizes = (x.count, part.rows, cols, out.strides[0] // 4, part.first)
    args = (part.data, x.values, out, *map(np.int32, sizes))
    grid = (-(-part.rows // (16 * tiles)),)
    device.launch("matmul_bf16", "matmul_bf16", grid, (_THREADS,), args, defines={"ROWS": x.padded, "TILES": tiles})
