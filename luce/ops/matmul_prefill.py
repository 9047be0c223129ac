"""Products of many rows (a prompt's) with weight matrices, in fp16 or int8: by a BLAS library, or by a kernel of tiles.

x is rounded to fp16, each row scaled by a power of two into its range (luce.ops.fp16). The weights are rounded to fp16
too, except those that the file has in F32, which are multiplied with x as float32. Sums are accumulated in float32. A
product's mean squared error is 1e-7 of its mean square (Q4_K, 5120 columns); with bfloat16, which needs no scale, it
would be 6e-6.

For rows of long prompts (`is_long`), a device with a BLAS library dequantises the weights into a buffer, a slice of
features at a time, and the library multiplies. The library chooses its algorithm by the shape, so a row's last bits may
change with the number of rows. Weights with a copy (`store_copy`) are multiplied in the same slices, which gives the
same bits.

Of weights with `int8` (--prompt-precision) the library gets int8 rows, and of x (luce.ops.int8_rows). Its sums are
exact: bits depend neither on the number of rows nor on slices. What makes x may make it as int8 at once, and what reads
the product may read the sums (`int8_sums`). Where x and the weights are normal, a product's mean
squared error is 1e-4 of its mean square; an outlier in a row takes bits from the rest of that row.

For those rows, a device on which four waves multiply together has a kernel for weights in F32 (matmul_halves.py), whose
bits depend on the row alone.

The tile kernel (kernels/matmul_tile.cu) dequantises weights as it multiplies; a row's bits do not depend on the
other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops import matmul_halves
from luce.ops.fp16 import PADDING, Fp16Rows, add_parts, dequantise, rescale, to_fp16
from luce.ops.int8_rows import Int8Rows, Int8Sums, empty_int8, multiply, padded_columns, to_int8
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device

_T = GGMLQuantizationType
#: from so many rows on, dequantising the weights for a BLAS library pays: on an H200 both ways break even at 100 to
#: 140 rows
BLAS_ROWS = 144
#: Bytes of the buffer of dequantised weights. A prompt of 8192 tokens of a 27B model took 901 ms with 128 MB, 893 with
#: 256 and 881 with a buffer for whole matrices, of 350 MB (no fp16 copies, H200); at 2048 rows, 64 MB cost 5%. With
#: fp16 copies, whose products have the same slices, it took 916 ms with 256 MB and 909 with 384 (H100).
BUFFER_BYTES = 384 << 20
#: The library needs rows in multiples of 16 bytes.
BLAS_COLS = 8
#: the constants of kernels/tile.h
TILE_ROWS, TILE_FEATURES, TILE_THREADS = 64, 128, 128
# A matrix of few features is split along its columns (split-K) into enough blocks to keep a large GPU busy, but not
# into parts so short that adding them up takes time.
_BLOCKS, _PART_SLICES = 528, 4


def is_long(device: Device, rows: int) -> bool:
    """Whether so many rows are multiplied as a long prompt's: at least BLAS_ROWS, unless the step is batch-invariant.

    Products of long prompts are faster, but the bits of a row may depend on the number of rows.
    """
    return rows >= BLAS_ROWS and not device.batch_invariant


def matmul_prefill(device: Device, x: Array | Fp16Rows | Int8Rows, weight: Weight, out: Array) -> None:
    """out = x W^T: x float32 [n, cols] (any row stride) or, for weights without F32, fp16, or int8 where
    `multiplies_int8` says so, out float32 [n, rows]."""
    if isinstance(x, Int8Rows) or multiplies_int8(device, x.shape[0], weight):
        _multiply_packed(device, _as_int8(device, x), [*weight.parts], weight, out)
        return
    cols, long = weight.cols, is_long(device, x.shape[0])
    blas = device.blas and long and cols % BLAS_COLS == 0
    if isinstance(x, Fp16Rows):
        fp16: Fp16Rows | None = x
    else:
        fp16 = to_fp16(device, x) if reads_fp16(weight) else None
    packed: list[WeightPart] = []
    for part in weight.parts:
        if fp16 is not None and blas and part.type not in (_T.F32, _T.F16):
            packed.append(part)
            continue
        to = _columns(out, part.first, part.first + part.rows)
        if fp16 is None or part.type == _T.F32:
            assert not isinstance(x, Fp16Rows)
            if long and matmul_halves.serves(device):
                matmul_halves.multiply(device, x, part, cols, to)
            elif blas:
                device.gemm(x, part.data.view(np.float32), to)
            else:
                _tiles(device, x, None, part, cols, to)
        elif blas:
            _multiply(device, fp16, part.data.view(np.float16), to)
        else:
            _tiles(device, fp16.values, fp16.scale, part, cols, to)
    if fp16 is not None and packed:
        _multiply_packed(device, fp16, packed, weight, out)


def reads_fp16(weight: Weight) -> bool:
    """Whether products of many rows read x as fp16, for any part of the weight."""
    return any(part.type != _T.F32 for part in weight.parts)


def multiplies_int8(device: Device, rows: int, weight: Weight) -> bool:
    """Whether products of `rows` rows with all parts of the weight are those of int8 rows."""
    packed = all(part.type not in (_T.F32, _T.F16) for part in weight.parts)
    return weight.int8 and packed and device.blas and is_long(device, rows) and weight.cols % BLAS_COLS == 0


def has_int8_sums(device: Device, rows: int, weight: Weight) -> bool:
    """Whether products of `rows` rows with the weight are exact sums of int8 rows, which no bias follows."""
    return weight.bias is None and multiplies_int8(device, rows, weight)


def int8_sums(device: Device, x: Array | Fp16Rows | Int8Rows, weight: Weight) -> Int8Sums:
    """The exact sums of x W^T, without its bias: x float32 [n, cols], or rows already rounded. `multiplies_int8` is
    true of n and of the weight."""
    rows = _as_int8(device, x)
    sums = device.empty((x.shape[0], weight.rows), np.int32)
    if isinstance(weight.copy, Int8Rows):
        device.gemm(rows.values, weight.copy.values, sums)
        return Int8Sums(sums, rows.scale, weight.copy.scale)
    features = device.empty(weight.rows)
    for begin, end, own in slices(device, [*weight.parts], weight):
        made = empty_int8(device, end - begin, weight.cols)
        to_int8(device, own, replace(made, scale=features[begin:end]))
        device.gemm(rows.values, made.values, _columns(sums, begin, end))
    return Int8Sums(sums, rows.scale, features)


def _multiply(device: Device, x: Fp16Rows, weight: Array, out: Array) -> None:
    """out = x weight^T by the BLAS library; weight float16 [rows, cols]."""
    device.gemm(_columns(x.values, 0, weight.shape[1]), weight, out)
    rescale(device, out, x.scale)


def _columns(array: Array, begin: int, end: int) -> Array:
    """array[:, begin:end], or the array itself if that is all of it: CuPy takes microseconds for a view."""
    return array if not begin and end == array.shape[1] else array[:, begin:end]


def _multiply_packed(
    device: Device, x: Fp16Rows | Int8Rows, parts: list[WeightPart], weight: Weight, out: Array
) -> None:
    """The results of parts in quant blocks by the BLAS library, from slices of their weights as fp16 or int8."""
    rows = _as_int8(device, x) if weight.int8 else x
    for begin, end, own in slices(device, parts, weight):
        to = _columns(out, begin, end)
        if isinstance(rows, Int8Rows):
            multiply(device, rows, own if isinstance(own, Int8Rows) else to_int8(device, own), to)
        else:
            _multiply(device, rows, own, to)


def slices(device: Device, parts: list[WeightPart], weight: Weight) -> Iterator[tuple[int, int, Any]]:
    """The first feature of a slice, the one behind it, and its weights: float16 [features, cols], which hold until the
    next slice, or Int8Rows of the weight's copy."""
    cols = weight.cols
    # With slices that begin at odd features, the library uses slow kernels: 8.5 ms instead of 1.2 (H200, 2048 rows).
    most = max(1, BUFFER_BYTES // (2 * cols * TILE_FEATURES)) * TILE_FEATURES
    copy = weight.copy
    size = min(most, sum(part.rows for part in parts))
    buffer: Any = device.empty((size, cols), np.float16) if copy is None else copy
    begin = end = parts[0].first  # features of the slice
    for part in parts:
        done = 0
        while done < part.rows:
            if end != part.first + done or end - begin == most:
                yield begin, end, buffer[: end - begin] if copy is None else buffer[begin:end]
                begin = end = part.first + done
            count = min(most - (end - begin), part.rows - done)
            if copy is None:
                dequantise(device, part.data[done : done + count], part.type, buffer[end - begin : end - begin + count])
            done += count
            end += count
    yield begin, end, buffer[: end - begin] if copy is None else buffer[begin:end]


def _as_int8(device: Device, x: Array | Fp16Rows | Int8Rows) -> Int8Rows:
    """Float32 rows, and those already rounded, as int8."""
    return x if isinstance(x, Int8Rows) else to_int8(device, x)


def copy_bytes(device: Device, weight: Weight) -> int:
    """Bytes of the copy that `store_copy` makes; 0 if products never dequantise the weight."""
    packed = any(part.type not in (_T.F16, _T.F32) for part in weight.parts)
    if not packed or not device.blas or weight.cols % BLAS_COLS:
        return 0
    return weight.rows * (padded_columns(weight.cols) + 4 if weight.int8 else 2 * weight.cols)


def store_copy(device: Device, weight: Weight) -> None:
    """Give a weight a copy as its products of many rows read it, so that they need not dequantise it. Raises
    OutOfMemoryError."""
    if weight.copy is None:
        rows, cols = weight.rows, weight.cols
        weight.copy = empty_int8(device, rows, cols) if weight.int8 else device.empty((rows, cols), np.float16)
    most = max(1, BUFFER_BYTES // (2 * weight.cols))
    for part in weight.parts:
        if part.type in (_T.F16, _T.F32):
            continue
        for done in range(0, part.rows, most):
            count = min(most, part.rows - done)
            to = weight.copy[part.first + done : part.first + done + count]
            half = device.empty((count, weight.cols), np.float16) if isinstance(to, Int8Rows) else to
            dequantise(device, part.data[done : done + count], part.type, half)
            if isinstance(to, Int8Rows):
                to_int8(device, half, to)


def _tiles(device: Device, x: Array, scale: Array | None, part: WeightPart, cols: int, out: Array) -> None:
    """One part's results by the tile kernel; x is fp16 with a scale, or float32 for weights in F32."""
    n, rows = out.shape
    slices = -(-cols // PADDING)
    features = -(-rows // TILE_FEATURES)
    parts = max(1, min(_BLOCKS // features, slices // _PART_SLICES))
    part_slices = -(-slices // parts)
    parts = -(-slices // part_slices)
    to = out if parts == 1 else device.empty((parts, n, rows))
    sizes = (n, rows, cols, x.strides[0] // x.itemsize, to.strides[-2] // 4, part_slices * PADDING)
    device.launch(
        "matmul_tile",
        "matmul_tile",
        (-(-n // TILE_ROWS), features, parts),
        (TILE_THREADS,),
        # Without a scale, a pointer that the kernel does not dereference.
        (part.data, x, to if scale is None else scale, to, *(np.int32(size) for size in sizes)),
        defines={"QTYPE": part.type.name},
    )
    if parts > 1:
        add_parts(device, to, out)
