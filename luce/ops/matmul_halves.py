"""Products of many rows with weights in F32 where four waves multiply together (kernels/matmul_halves.cu).

Floats of x and of weights are split into sums of two fp16 numbers, slice by slice, for tensor cores. A product errs
less than a float32 sum of as many columns, and its bits depend on the row and the weight alone: columns are split into
as many parts as the weight's shape says.
"""

from __future__ import annotations

import numpy as np

from luce.ops.fp16 import add_parts
from luce.ops.weight import WeightPart
from luce.runtime.device import Array, Device

# The constants of kernels/matmul_halves.cu: rows, features and threads of a block, columns of a slice, stages, and
# those of factors.
_ROWS, _FEATURES, _THREADS, _SLICE, _STAGES, _FACTORS = 128, 128, 256, 64, 2, 4
# Its shared memory: parts of weights, floats that arrive, and factors.
_SHARED = _STAGES * 4 * _SLICE * (_ROWS + 2 * _FEATURES) + _FACTORS * 4 * _FEATURES
# Columns are split into parts where there are fewer tiles of features, but into none shorter: 2048 rows of a router of
# 256 experts are 128 blocks.
_TILES, _PART_COLS = 8, 512


def serves(device: Device) -> bool:
    """Whether a device has these products."""
    return "WGMMA" in device.products and device.shared_limit >= _SHARED


def multiply(device: Device, x: Array, part: WeightPart, cols: int, out: Array) -> None:
    """out = x W^T: x float32 [n, cols], n > 0, a part in F32, out float32 [n, part.rows] (any row stride)."""
    n, rows = out.shape
    tiles = max(1, rows // _FEATURES + (rows % _FEATURES > 1))
    parts = max(1, min(_TILES // tiles, cols // _PART_COLS))
    part_cols = -(-cols // (parts * _SLICE)) * _SLICE
    parts = -(-cols // part_cols)
    to = out if parts == 1 else device.empty((parts, n, rows))
    sizes = (n, rows, cols, x.strides[0] // 4, to.strides[-2] // 4, part_cols)
    args = (x, part.data.view(np.float32), to, *(np.int32(size) for size in sizes))
    grid = (-(-n // _ROWS), tiles, parts)
    device.launch("matmul_halves", "matmul_halves", grid, (_THREADS,), args, shared=_SHARED)
    if parts > 1:
        add_parts(device, to, out)
