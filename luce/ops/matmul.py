"""Products with weight matrices: y = x W^T, for few rows (decode, verification) and for many (prefill).

Up to FEW_ROWS rows one kernel per format reads each weight block once and serves all rows; the order of the sums is the
same for every such row count. More rows become halves and go to tensor cores (matmul_many.py), with other bits.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.matmul_many import matmul_many
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device

#: rows up to which a row of the product has the same bits, however many there are
FEW_ROWS = 16
# One gemv per row beats a skinny gemm of OpenBLAS up to here (2 cores, AVX-512: 41 against 48 ms at 8 rows, 63 against
# 55 at 16), and keeps the sums of a row independent of its neighbours.
_HOST_GEMV_ROWS = 8
# The constant of matmul_vec.cu.
_WAVES = 4


def matmul(device: Device, x: Array, weight: Weight) -> Array:
    """x float32 [n, cols] (any row stride) times weight [rows, cols] transposed: float32 [n, rows].

    Sums are accumulated in float32; of more than FEW_ROWS rows on a GPU, x and weights are rounded to halves first.
    Raises ValueError if the inner dimensions differ.
    """
    if x.shape[1] != weight.cols:
        raise ValueError(f"matmul: x has {x.shape[1]} features, the weight {weight.cols}")
    out = device.empty((x.shape[0], weight.rows))
    if device.host:
        _host(x, weight, out)
    elif x.shape[0] > FEW_ROWS:
        matmul_many(device, x, weight, out)
    elif x.shape[0]:
        _launch(device, x, weight, out)
    return out


def _launch(device: Device, x: Array, weight: Weight, out: Array) -> None:
    n, stride, lanes = x.shape[0], x.strides[0] // 4, device.lanes
    for part in weight.parts:
        kernel, grid, block, sizes, defines = _plan(
            n, stride, weight.rows, weight.cols, part.rows, part.first, int(part.type), lanes
        )
        device.launch(kernel, kernel, grid, block, (part.data, x, out, *sizes), defines=defines)


# A decode step launches hundreds of products of the same few shapes. With this cache one costs 1.2 us of Python before
# the device's own launch, without it 4.0.
@lru_cache(4096)
def _plan(
    n: int, x_stride: int, out_stride: int, cols: int, rows: int, first: int, type: int, lanes: int
) -> tuple[str, tuple[int, ...], tuple[int], tuple[np.int32, ...], dict[str, int | str]]:
    """Source (and kernel), grid, block, the scalar arguments and the defines of one part's launch."""
    sizes = tuple(np.int32(v) for v in (n, rows, cols, x_stride, out_stride, first))
    defines: dict[str, int | str] = {"QTYPE": GGMLQuantizationType(type).name}
    count = 1 << (n - 1).bit_length()
    features = 4 if count >= 8 else 2
    return "matmul_vec", (-(-rows // (_WAVES * features)),), (_WAVES * lanes,), sizes, {"ROWS": count, **defines}


def _host(x: Array, weight: Weight, out: Array) -> None:
    w = weight.matrix
    if x.shape[0] <= _HOST_GEMV_ROWS:
        for row in range(x.shape[0]):
            np.dot(w, x[row], out=out[row])
    else:
        np.matmul(x, w.T, out=out)
