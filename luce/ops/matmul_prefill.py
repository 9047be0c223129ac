"""Products of many rows with weight matrices: rows as halves, then a BLAS library or the kernel of tiles.

x is rounded to halves, each row scaled by a power of two into their range; so are the weights, but for those that the
file has in F32, which meet x as it is. Sums are accumulated in float32. A product's mean squared error is 1e-7 of its
mean square (Q4_K, 5120 columns); with bfloat16, which needs no scale, it would be 6e-6.

From BLAS_ROWS rows on, weights are unpacked into a buffer, a slice of features at a time, for the device's BLAS
library, if it has one: it chooses its algorithm by the shape, so that a row's last bits may change with the number of
rows. Weights that are kept unpacked (`keep_halves`) are multiplied in the same slices, which gives the same bits. The
kernel of tiles unpacks weights as it multiplies, and a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device

_T = GGMLQuantizationType
#: rows from which unpacking the weights for a library pays: on an H200 both ways take as long at 100 to 140 rows
BLAS_ROWS = 144
# Bytes of the buffer of unpacked weights. A prompt of 8192 tokens of a 27B model took 901 ms with 128 MB, 893 with 256
# and 881 with room for whole matrices, of 350 MB (weights kept, H200); at 2048 rows, 64 MB cost 5%.
_BUFFER = 256 << 20
# The library wants rows of whole 16 bytes.
_BLAS_COLS = 8
#: the constants of kernels/tile.h
TILE_ROWS, TILE_FEATURES, TILE_THREADS = 64, 128, 128
#: columns that the tiles take at a time: halves come in rows of whole slices
_SLICE = 128
# A matrix of few features is cut along its columns into parts for as many blocks as keep a large GPU busy, but not into
# parts so short that adding them up counts.
_BLOCKS, _PART_SLICES = 528, 4
#: threads of dequant.cu, and for a row in half.cu
_UNPACK_THREADS, _ROW_THREADS = 128, 256


@dataclass(frozen=True)
class Halves:
    """values float16 [rows, padded]: x divided by scale float32 [rows], with zeros beyond the columns of x."""

    values: Array
    scale: Array


def halves(device: Device, x: Array) -> Halves:
    """Rows of x, float32 [n, cols] or [n, slots, cols] with any strides but the last, as halves [n * slots, padded]."""
    n, cols = x.shape[0], x.shape[-1]
    slots, x_slot = (x.shape[1], x.strides[1] // 4) if x.ndim == 3 else (1, 0)
    padded = -(-cols // _SLICE) * _SLICE
    made = Halves(device.empty((n * slots, padded), np.float16), device.empty(n * slots))
    # From the row's length alone: 8 columns a thread, and again.
    threads = min(256, max(64, 1 << (padded // 8 - 1).bit_length()))
    sizes = (np.int32(slots), np.int32(cols), np.int32(padded), np.int64(x.strides[0] // 4), np.int64(x_slot))
    device.launch("half", "half_rows", (n * slots,), (threads,), (x, made.values, made.scale, *sizes))
    return made


def matmul_many(device: Device, x: Array, weight: Weight, out: Array) -> None:
    """out = x W^T: x float32 [n, cols] (any row stride), out float32 [n, rows]."""
    cols = weight.cols
    blas = device.blas and x.shape[0] >= BLAS_ROWS and cols % _BLAS_COLS == 0
    made = halves(device, x) if any(part.type != _T.F32 for part in weight.parts) else None
    packed: list[WeightPart] = []
    for part in weight.parts:
        if made is not None and blas and part.type not in (_T.F32, _T.F16):
            packed.append(part)
            continue
        to = _columns(out, part.first, part.first + part.rows)
        if made is None or part.type == _T.F32:
            if blas:
                device.gemm(x, part.data.view(np.float32), to)
            else:
                _tiles(device, x, None, part, cols, to)
        elif blas:
            _multiply(device, made, part.data.view(np.float16), to)
        else:
            _tiles(device, made.values, made.scale, part, cols, to)
    if made is not None and packed:
        _multiply_packed(device, made, packed, weight, out)


def _multiply(device: Device, x: Halves, weight: Array, out: Array) -> None:
    """out = x weight^T by the BLAS library; weight float16 [rows, cols]."""
    n, rows = out.shape
    device.gemm(_columns(x.values, 0, weight.shape[1]), weight, out)
    args = (out, x.scale, np.int32(rows), np.int64(out.strides[0] // 4))
    device.launch("half", "rescale_rows", (n,), (_ROW_THREADS,), args)


def _columns(array: Array, begin: int, end: int) -> Array:
    """array[:, begin:end], itself where that is all of it: CuPy takes microseconds for a view."""
    return array if not begin and end == array.shape[1] else array[:, begin:end]


def _multiply_packed(device: Device, x: Halves, parts: list[WeightPart], weight: Weight, out: Array) -> None:
    """The results of parts in blocks by the BLAS library, from slices of their weights as halves."""
    cols = weight.cols
    # Slices that begin at odd features cost the library its fast kernels: 8.5 ms instead of 1.2 (H200, 2048 rows).
    most = max(1, _BUFFER // (2 * cols * TILE_FEATURES)) * TILE_FEATURES
    kept = weight.halves
    size = min(most, sum(part.rows for part in parts))
    buffer = device.empty((size, cols), np.float16) if kept is None else kept

    def multiply(begin: int, end: int) -> None:
        own = buffer[: end - begin] if kept is None else buffer[begin:end]
        _multiply(device, x, own, _columns(out, begin, end))

    begin = end = parts[0].first  # features of the slice
    for part in parts:
        done = 0
        while done < part.rows:
            if end != part.first + done or end - begin == most:
                multiply(begin, end)
                begin = end = part.first + done
            count = min(most - (end - begin), part.rows - done)
            if kept is None:
                _unpack(device, part.data[done : done + count], part.type, buffer[end - begin : end - begin + count])
            done += count
            end += count
    multiply(begin, end)


def _unpack(device: Device, data: Array, type: GGMLQuantizationType, to: Array) -> None:
    """Rows of blocks as halves: to float16 [rows, cols]."""
    args, defines = (data, to, np.int32(to.shape[1])), {"QTYPE": type.name}
    device.launch("dequant", "dequant", (len(data),), (_UNPACK_THREADS,), args, defines=defines)


def halves_bytes(device: Device, weight: Weight) -> int:
    """Bytes that `keep_halves` takes; 0 if the weight is never unpacked as a whole."""
    packed = any(part.type not in (_T.F16, _T.F32) for part in weight.parts)
    return 2 * weight.rows * weight.cols if packed and device.blas and weight.cols % _BLAS_COLS == 0 else 0


def keep_halves(device: Device, weight: Weight) -> None:
    """Unpack a weight for good: products of many rows then skip that. Raises OutOfMemoryError."""
    if weight.halves is None:
        weight.halves = device.empty((weight.rows, weight.cols), np.float16)
    for part in weight.parts:
        if part.type not in (_T.F16, _T.F32):
            _unpack(device, part.data, part.type, weight.halves[part.first : part.first + part.rows])


def _tiles(device: Device, x: Array, scale: Array | None, part: WeightPart, cols: int, out: Array) -> None:
    """One part's results by the kernel of tiles; x is halves with a scale, or float32 for weights in F32."""
    n, rows = out.shape
    slices = -(-cols // _SLICE)
    features = -(-rows // TILE_FEATURES)
    parts = max(1, min(_BLOCKS // features, slices // _PART_SLICES))
    part_slices = -(-slices // parts)
    parts = -(-slices // part_slices)
    to = out if parts == 1 else device.empty((parts, n, rows))
    sizes = (n, rows, cols, x.strides[0] // x.itemsize, to.strides[-2] // 4, part_slices * _SLICE)
    device.launch(
        "matmul_tile",
        "matmul_tile",
        (-(-n // TILE_ROWS), features, parts),
        (TILE_THREADS,),
        # Without a scale, a pointer that is not followed.
        (part.data, x, to if scale is None else scale, to, *(np.int32(size) for size in sizes)),
        defines={"QTYPE": part.type.name},
    )
    if parts > 1:
        grid = (n, -(-rows // _ROW_THREADS))
        args = (to, out, np.int32(parts), np.int32(rows), np.int64(out.strides[0] // 4))
        device.launch("half", "add_parts", grid, (_ROW_THREADS,), args)
