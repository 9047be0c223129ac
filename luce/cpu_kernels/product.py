"""Products of rows of x with packed weights: out [n, rows] = x W^T, for one or more weights with the same rows of x.

Weights in quant blocks: a tile of 16 weight rows is unpacked 256 columns at a time (unpack.py), and multiplied by all
rows of x, which are quantised (quantised_rows.py), before the next 256; a single row has functions of its own
(one_row.py). Sums over a group of columns are exact integers; the groups' results are added in float32 in the order of
the columns.

Weights in floats: x is float32. Each lane sums every 16th column in order, then lanes are added in halves.

So a result's bits depend on its row and its weight row alone: neither on the number of rows, nor on threads.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from numba import carray, int32

from luce.cpu_kernels.dimensions import MINIMUMS, RECORD, SCALE, SCALED, SCALES, SLICE, UNPACKED_BYTES
from luce.cpu_kernels.jit import compiled, compiled_as, inlined
from luce.cpu_kernels.jobs import call_kernel, run_job
from luce.cpu_kernels.lowering import ROWS_AT_A_TIME
from luce.cpu_kernels.memory import allocate, release
from luce.cpu_kernels.narrow import load_bfloats, load_halves
from luce.cpu_kernels.quantised_rows import quantise_rows
from luce.cpu_kernels.vector_rows import (
    add_products,
    add_rows,
    add_scaled,
    load_rows,
    store_rows,
    store_totals,
    sum_group,
    zero_rows,
)
from luce.cpu_kernels.vectors import (
    load_floats,
    move_float,
    pointer,
    prefetch,
    splat,
    store,
    to_floats,
    word,
)

TILE = 16
#: most rows of x that a tile is unpacked for at a time
_ROWS = 256
#: bytes of memory that a thread needs
SCRATCH = UNPACKED_BYTES + _ROWS * 64
#: int64 in front of the weights' own: the number of weights, of parts, and of the weights' bytes
HEAD_WORDS = 3
#: int64 of a weight: of the matrix the address, stride of rows, type, rows, columns, elements and bytes of a block, the
#: type's offset, whether groups have 32 columns and whether there are minimums; of its rows of x (quantised, or floats
#: for a matrix of floats) the address, stride and number, and of the results address and stride, which `multiply`
#: writes; its first row of x, and the bytes in front of its results in a row; the addresses of the type's C functions
#: that unpack and that multiply one row (0: none)
WEIGHT_WORDS = 19
ROWS_OF_X, COUNT, RESULTS, FIRST, PLACE, FUNCTIONS = 10, 12, 13, 15, 16, 17
# Work below which a product stays on the caller's thread: bytes of weights times rows, 10 us or so.
_ALONE = 1 << 17
# Parts for each thread: a thread that the system stops holds up a fraction of the work.
_PARTS = 4

_F16, _BF16, _F32 = (int(t) for t in (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F32))


@inlined
def _add_slice(count, totals, unpacked, x, stride, columns, offset, wide, minimums):
    """Add the products of a slice with `count` rows of x to their totals. `wide`: groups have 32 columns."""
    sums = load_rows(count, totals)
    for record in range(columns // 32):
        at, words = x + record * RECORD, unpacked + record * 512
        if wide:
            products = sum_group(sums, 8, words, 0, at, stride, int32(offset))
            sums = add_rows(sums, products, load_floats(unpacked + SCALES + record * 64), at + SCALE, stride)
            if minimums:
                sums = add_scaled(sums, load_floats(unpacked + MINIMUMS + record * 64), at + SCALED + 8, stride)
        else:
            scale, minimum = unpacked + SCALES + record * 128, unpacked + MINIMUMS + record * 128
            products = sum_group(sums, 4, words, 0, at, stride, int32(offset))
            sums = add_rows(sums, products, load_floats(scale), at + SCALE, stride)
            if minimums:
                sums = add_scaled(sums, load_floats(minimum), at + SCALED, stride)
            products = sum_group(sums, 4, words + 256, 4, at, stride, int32(offset))
            sums = add_rows(sums, products, load_floats(scale + 64), at + SCALE, stride)
            if minimums:
                sums = add_scaled(sums, load_floats(minimum + 64), at + SCALED + 4, stride)
    store_rows(sums, totals)


@compiled
def _add_slices(count, totals, unpacked, x, stride, columns, offset, wide, minimums):
    row = 0
    if ROWS_AT_A_TIME == 8:
        while row + 8 <= count:
            at = x + row * stride
            _add_slice(8, totals + row * 64, unpacked, at, stride, columns, offset, wide, minimums)
            row += 8
    while row + 4 <= count:
        at = x + row * stride
        _add_slice(4, totals + row * 64, unpacked, at, stride, columns, offset, wide, minimums)
        row += 4
    if row + 2 <= count:
        at = x + row * stride
        _add_slice(2, totals + row * 64, unpacked, at, stride, columns, offset, wide, minimums)
        row += 2
    if row < count:
        at = x + row * stride
        _add_slice(1, totals + row * 64, unpacked, at, stride, columns, offset, wide, minimums)


@inlined
def _float_rows(count, kind, weight, cols, x, stride, out, out_stride):
    """The products of one weight row with `count` float rows; the last columns of a row are beyond whole vectors."""
    sums = zero_rows(count)
    for col in range(0, cols, 16):
        if kind == _F16:
            values = load_halves(weight + col * 2)
        elif kind == _BF16:
            values = load_bfloats(weight + col * 2)
        else:
            values = load_floats(weight + col * 4)
        sums = add_products(sums, values, x + col * 4, stride)
    store_totals(sums, out, out_stride)


@compiled
def _float_product(kind, weights, stride, rows, cols, x, x_stride, count, out, out_stride):
    for feature in range(rows):
        weight, to = weights + feature * stride, out + feature * 4
        row = 0
        while row + 8 <= count:
            _float_rows(8, kind, weight, cols, x + row * x_stride, x_stride, to + row * out_stride, out_stride)
            row += 8
        if row + 4 <= count:
            _float_rows(4, kind, weight, cols, x + row * x_stride, x_stride, to + row * out_stride, out_stride)
            row += 4
        if row + 2 <= count:
            _float_rows(2, kind, weight, cols, x + row * x_stride, x_stride, to + row * out_stride, out_stride)
            row += 2
        if row < count:
            _float_rows(1, kind, weight, cols, x + row * x_stride, x_stride, to + row * out_stride, out_stride)


@compiled
def _prefetch(address, size, col, columns, cols):
    """Ask for a share of the tile after the next: the CPU's own prefetching loses 16 rows side by side."""
    for at in range(size * col // cols // 64 * 64, size * (col + columns) // cols, 64):
        prefetch(address + at)


@compiled
def _tile_product(weight, tile, scratch):
    """A tile of a weight in quant blocks, times all rows of x."""
    stride, rows, cols = word(weight, 1), word(weight, 3), word(weight, 4)
    elements, size, offset = word(weight, 5), word(weight, 6), word(weight, 7)
    wide, minimums = word(weight, 8) != 0, word(weight, 9) != 0
    x, x_stride, count = word(weight, 10), word(weight, 11), word(weight, 12)
    totals, zero = scratch + UNPACKED_BYTES, to_floats(splat(0))
    # The last tile overlaps the one before it: both compute the same bits. A weight of fewer rows is padded.
    first = max(0, min(tile * TILE, rows - TILE))
    base, out, out_stride = word(weight, 0) + first * stride, word(weight, 13) + first * 4, word(weight, 14)
    unpack, one_row = word(weight, FUNCTIONS), word(weight, FUNCTIONS + 1)
    for row in range(0, count, _ROWS):
        some = min(_ROWS, count - row)
        if count == 1 and one_row != 0:
            call_kernel(one_row, (base, stride, cols, x, totals))
        else:
            for i in range(some):
                store(totals + i * 64, zero)
            for col in range(0, cols, SLICE):
                columns = min(SLICE, cols - col)
                if row == 0:
                    _prefetch(base + 2 * TILE * stride, TILE * stride, col, columns, cols)
                call_kernel(unpack, (base + col // elements * size, stride, columns, scratch))
                own = x + row * x_stride + col // 32 * RECORD
                _add_slices(some, totals, scratch, own, x_stride, columns, offset, wide, minimums)
        for i in range(some):
            to = out + (row + i) * out_stride
            if rows >= TILE:
                store(to, load_floats(totals + i * 64))
            else:
                for feature in range(rows):
                    move_float(to + feature * 4, totals + i * 64 + feature * 4)


@compiled
def product(arguments, part, scratch):
    """Part `part` of the products. `arguments`: HEAD_WORDS, then WEIGHT_WORDS for each weight; `scratch`: SCRATCH bytes
    that begin at a multiple of 64."""
    weights, parts = word(arguments, 0), word(arguments, 1)
    tiles = 0
    for number in range(weights):
        tiles += (word(arguments, HEAD_WORDS + number * WEIGHT_WORDS + 3) + TILE - 1) // TILE
    # Threads take parts in turns: each has a run of rows of its own, whose next rows are on their way to its cache.
    threads = max(1, parts // _PARTS)
    part = part % threads * (parts // threads) + part // threads
    begin, end = tiles * part // parts, tiles * (part + 1) // parts
    for number in range(weights):
        weight = arguments + (HEAD_WORDS + number * WEIGHT_WORDS) * 8
        kind, rows, cols = word(weight, 2), word(weight, 3), word(weight, 4)
        own = (rows + TILE - 1) // TILE
        for tile in range(max(begin, 0), min(end, own)):
            if kind in (_F16, _BF16, _F32):
                first, stride = tile * TILE, word(weight, 1)
                some, at = min(TILE, rows - first), word(weight, 0) + first * stride
                x, x_stride, count = word(weight, 10), word(weight, 11), word(weight, 12)
                out, out_stride = word(weight, 13) + first * 4, word(weight, 14)
                _float_product(kind, at, stride, some, cols, x, x_stride, count, out, out_stride)
            else:
                _tile_product(weight, tile, scratch)
        begin, end = begin - own, end - own


_X = "float32[:, ::1]"


@compiled_as(f"void(int64, UniTuple(int64, 2), int64[::1], {_X}, {_X}, {_X}, boolean, int64)")
def multiply(slot, kernels, plan, x, padded, out, whole, threads):
    """The products of a plan's weights with rows of x, written to out. `padded`: x for matrices of floats, whose rows
    are multiples of 16 columns. `whole`: each weight multiplies all rows of x."""
    # Another thread may multiply the same weights.
    size, row_bytes, quantised = len(plan) * 8, x.shape[1] // 32 * RECORD, False
    memory = allocate((size + len(x) * row_bytes,))
    own_plan = carray(pointer(memory), len(plan), np.int64)
    for i in range(len(plan)):
        own_plan[i] = plan[i]
    for number in range(own_plan[0]):
        own = own_plan[HEAD_WORDS + number * WEIGHT_WORDS :]
        if whole:
            own[COUNT] = len(x)
        if own[2] == _F16 or own[2] == _BF16 or own[2] == _F32:
            rows, stride = padded.ctypes.data, padded.strides[0]
        else:
            if not quantised:
                quantise_rows(slot, kernels[1], x, memory + size)
                quantised = True
            rows, stride = memory + size, row_bytes
        own[ROWS_OF_X], own[ROWS_OF_X + 1] = rows + own[FIRST] * stride, stride
        own[RESULTS] = out.ctypes.data + own[FIRST] * out.strides[0] + own[PLACE]
        own[RESULTS + 1] = out.strides[0]
    own_plan[1] = 1 if own_plan[2] * len(x) < _ALONE else _PARTS * threads
    run_job(slot, kernels[0], own_plan, own_plan[1])
    release((memory,))
