"""Products with weight matrices: y = x W^T, plus a bias if the weight has one.

This module and expert_matmul (moe.py) choose the way of each product:

| rows of x         | types of the weights     | way                                                                |
|-------------------|--------------------------|--------------------------------------------------------------------|
| any, on the CPU   | quant blocks, packed     | x quantised to int8, integer products (matmul_packed.py)           |
| any, on the CPU   | floats, packed           | float32 (matmul_packed.py)                                         |
| any, on the CPU   | any, as float32          | float32, by NumPy                                                  |
| 1 .. FEW_ROWS     | Q4_0 Q8_0 Q4_K Q5_K Q6_K | x quantised to int8, integer products (matmul_int8.py)             |
| 1 .. FEW_ROWS     | BF16, with such products in hardware | x as pairs of bfloat16, in tiles (matmul_bf16.py)      |
| 1 .. FEW_ROWS     | the other types          | float32 (kernels/matmul_vec.cu)                                    |
| .. MANY_ROWS      | F32, and Q4_K Q5_K Q6_K with such products in hardware, alone | as few (matmul_rows.py)     |
| more              | any                      | x and weights as fp16, F32 weights as float32 (matmul_prefill.py)  |

While `device.batch_invariant` is set, any more rows than FEW_ROWS are multiplied as up to MANY_ROWS are.

What makes x may make it as int8 or as fp16 at once (int8_group, fp16_top, and multiplies_int8 of
matmul_prefill.py). A product of one row may take it without its norm (`norms_row`), and add its result to the stream
(`adds_row`): then the norm is no launch, which takes longer than its work.

For up to FEW_ROWS rows (decoding, verification) a kernel reads each quant block of the weights once for all rows. The
order of the sums is the same for every such number of rows, so a row has the same bits in all of them.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.activation import add_bias
from luce.ops.fp16 import TOP, Fp16Rows
from luce.ops.half_products import halves, has_halves
from luce.ops.int8_rows import Int8Rows
from luce.ops.matmul_bf16 import Split, multiply_bf16, split_rows, takes_tiles
from luce.ops.matmul_int8 import ADDS, ADDS_EARLY, INT8_TYPES, group_for, multiply, norms, pairs
from luce.ops.matmul_packed import multiply_packed
from luce.ops.matmul_prefill import BLAS_ROWS, has_int8_sums, int8_sums, is_long, matmul_prefill
from luce.ops.matmul_rows import multiply_rows, takes_rows
from luce.ops.norm import Unnormed
from luce.ops.quantise import Quantised, quantise
from luce.ops.scaled_products import Product
from luce.ops.weight import Weight, WeightPart
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

#: up to so many rows, the bits of a row do not depend on the number of rows
FEW_ROWS = 16
#: most rows of a short prompt: up to so many above FEW_ROWS, the bits of a row do not depend on the number of rows, and
#: are those of few rows if _takes_rows is true of the weight
MANY_ROWS = BLAS_ROWS - 1
# The constant of kernels/matmul_vec.cu.
_WAVES = 4
# Elements of a weight whose blocks norm a row: each of them reads it from the second-level cache. 27B has more.
_NORM_ELEMENTS = 1 << 25


#: rows as products read them
Rows = Array | Quantised | Fp16Rows | Int8Rows | Unnormed


def matmul(device: Device, x: Rows, weight: Weight) -> Array:
    """x float32 [n, cols] (any row stride) times weight [rows, cols] transposed, plus its bias: float32 [n, rows].

    Quantised rows need no float32 values if all parts of the weight multiply int8 in the rows' groups. Rows are fp16
    only where `fp16_top` says so, int8 where `multiplies_int8` does, and not normed where `norms_row` does. Sums are
    accumulated in float32. Raises ValueError if the inner dimensions differ.
    """
    if x.shape[1] != weight.cols:
        raise ValueError(f"matmul: x has {x.shape[1]} features, the weight {weight.cols}")
    out = device.empty((x.shape[0], weight.rows))
    if isinstance(device, CpuDevice):
        if x.shape[0]:
            multiply_packed(device, x, weight, out)
    elif device.host:
        _host(x, weight, out)
    elif isinstance(x, Unnormed):
        multiply(device, x, weight.parts, weight.cols, out)
    elif isinstance(x, Fp16Rows | Int8Rows):
        matmul_prefill(device, x, weight, out)
    elif x.shape[0] > FEW_ROWS and not is_long(device, x.shape[0]) and _takes_rows(device, weight):
        _many(device, x, weight, out)
    elif x.shape[0] > FEW_ROWS:
        matmul_prefill(device, x, weight, out)
    elif x.shape[0]:
        _few(device, x, weight, out)
    if weight.bias is not None and x.shape[0]:
        add_bias(device, out, weight.bias)
    return out


def norms_row(device: Device, rows: int, weight: Weight) -> bool:
    """Whether products of `rows` rows with the weight take the row as Unnormed."""
    if isinstance(device, HostDevice) or rows != 1 or weight.rows * weight.cols > _NORM_ELEMENTS:
        return False
    return norms(device, weight.parts, weight.cols)


def adds_row(device: Device, rows: int, weight: Weight) -> bool:
    """Whether `add_product` takes the weight and `rows` rows."""
    if isinstance(device, HostDevice) or rows != 1 or weight.bias is not None:
        return False
    return all(part.type in INT8_TYPES for part in weight.parts)


def add_product(device: Device, x: Array | Quantised, weight: Weight, to: Array, *, early: bool = False) -> None:
    """to += x W^T, where `adds_row` is true: the bits of `add` of the product. x of one row; to float32 [1, rows].

    `early`: the next launch has few small blocks, which begin with a long wait for weights. It starts beside this one.
    """
    _few(device, x, weight, to, adds=ADDS_EARLY if early and len(weight.parts) == 1 else ADDS)


def matmul_row(device: Device, x: Array, row: Weight) -> Array:
    """x float32 [n, cols] contiguous times a weight of one row in F32, on a GPU: float32 [n, 1].

    x takes the place of the weight, and the row that of x, in the kernel of few rows: a library would multiply a whole
    tile of features.
    """
    (part,), n = row.parts, x.shape[0]
    out = device.empty((n, 1))
    weight = Weight(n, row.cols, (WeightPart(x.view(np.uint8), GGMLQuantizationType.F32, 0, n),))
    _vec(device, part.data.view(np.float32), weight.parts[0], weight, out.reshape(1, n))
    return out


def invariant_rows(device: Device, weight: Weight) -> int:
    """Up to how many rows the bits of a row of a product do not depend on the number of rows, as far as that is known:
    FEW_ROWS or MANY_ROWS."""
    keeps = isinstance(device, CpuDevice) if device.host else _takes_rows(device, weight)
    return MANY_ROWS if keeps else FEW_ROWS


def product(device: Device, x: Rows, weight: Weight) -> Product:
    """`matmul`, or its sums where it is a product of int8 rows without a bias, or its halves where there are such."""
    if isinstance(x, Quantised | Unnormed):
        return matmul(device, x, weight)
    if has_int8_sums(device, x.shape[0], weight):
        return int8_sums(device, x, weight)
    if has_halves(device, x, weight):
        assert not isinstance(x, Int8Rows)
        return halves(device, x, weight)
    return matmul(device, x, weight)


def fp16_top(device: Device, rows: int, weight: Weight) -> int | None:
    """The `top` of `rows` rows for products with the weight, if all of its parts multiply them as fp16; else None."""
    if isinstance(device, HostDevice) or rows <= FEW_ROWS:
        return None
    if not is_long(device, rows) and _takes_rows(device, weight):
        return None
    if any(part.type == GGMLQuantizationType.F32 for part in weight.parts):
        return None
    return TOP if weight.top is None else weight.top


def int8_group(device: Device, rows: int, weight: Weight) -> int:
    """The group (see Quantised) in which `rows` rows are quantised for the first part of the weight that multiplies
    int8; 0 if no part does."""
    if isinstance(device, HostDevice) or not 0 < rows <= FEW_ROWS:
        return 0
    return next((group_for(part.type) for part in weight.parts if part.type in INT8_TYPES), 0)


def sole_int8_group(device: Device, rows: int, weight: Weight) -> int:
    """The group in which `rows` rows are quantised for all parts of the weight; 0 if parts differ or read floats."""
    group = int8_group(device, rows, weight)
    if not group:
        return 0
    alone = all(part.type in INT8_TYPES and group_for(part.type) == group for part in weight.parts)
    return group if alone else 0


def _few(device: Device, x: Array | Quantised, weight: Weight, out: Array, *, adds: int = 0) -> None:
    quantised = {x.group: x} if isinstance(x, Quantised) else {}
    floats = x.x if isinstance(x, Quantised) else x
    split: Split | None = None
    joined = None
    for part, following in itertools.zip_longest(weight.parts, weight.parts[1:]):
        if part is joined:
            continue
        if part.type in INT8_TYPES:
            group = group_for(part.type)
            own = quantised[group] = quantised.get(group) or quantise(device, floats, group)
            together = [part]
            if following is not None and pairs(device, own, part, following, weight.cols):
                together.append(joined := following)
            multiply(device, own, together, weight.cols, out, adds=adds)
        elif part.type == GGMLQuantizationType.BF16 and takes_tiles(device, part, weight.cols):
            split = split or split_rows(device, floats)
            multiply_bf16(device, split, part, weight.cols, out)
        else:
            _vec(device, floats, part, weight, out)


def _takes_rows(device: Device, weight: Weight) -> bool:
    floats = GGMLQuantizationType.F32
    return all(part.type == floats or takes_rows(device, part, weight.cols) for part in weight.parts)


def _many(device: Device, x: Array, weight: Weight, out: Array) -> None:
    quantised: dict[int, Quantised] = {}
    for part in weight.parts:
        if part.type == GGMLQuantizationType.F32:
            _vec(device, x, part, weight, out)
            continue
        group = group_for(part.type)
        own = quantised[group] = quantised.get(group) or quantise(device, x, group)
        multiply_rows(device, own, part, weight.cols, out)


def _vec(device: Device, x: Array, part: WeightPart, weight: Weight, out: Array) -> None:
    kernel, grid, block, sizes, defines = _plan(
        x.shape[0], x.strides[0] // 4, weight.rows, weight.cols, part.rows, part.first, int(part.type), device.lanes
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
    count = min(FEW_ROWS, 1 << (n - 1).bit_length())
    features = 4 if count >= 8 else 2
    grid = (-(-rows // features), -(-n // count))
    return "matmul_vec", grid, (_WAVES * lanes,), sizes, {"ROWS": count, **defines}


def _host(x: Array, weight: Weight, out: Array) -> None:
    w = weight.matrix
    if x.shape[0] <= FEW_ROWS:
        # One gemv per row is about as fast as a skinny gemm of OpenBLAS (2 cores, AVX-512: 41 against 48 ms at 8 rows,
        # 63 against 55 at 16), and keeps the sums of a row independent of its neighbours.
        for row in range(x.shape[0]):
            np.dot(w, x[row], out=out[row])
    else:
        np.matmul(x, w.T, out=out)
