"""Rows of activations as two int8 each, for products with packed weights.

32 columns of a row are a record of RECORD bytes; the last record of a row is padded with zeros. With s = largest |x| /
127,

    0       int8 [32]    q = round(x / s)
    REST    int8 [32]    r = round(254 (x / s - q)): x is s / 254 times 254 q + r, to one part in 32,000 of the largest
    SCALE   float32      s / 254
    SUMS    int32 [3]    the sum of 254 q + r: of the first 16, of the last 16, of all
    SCALED  float32 [3]  the same times s / 254

Where products take int16 (lowering.PAIRS), the first 64 bytes are 32 int16 instead, 254 q + r: the even ones of
16 columns, then the odd ones, and the same of the other 16.

One int8 would err 254 times as much: of a small model's near ties, it decides some otherwise than float32 does.

An infinity or a NaN makes every product with its record NaN; a record whose magnitudes are below 1e-30 becomes zeros.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from luce.cpu_kernels.dimensions import FINER, RECORD, REST, ROWS, SCALE, SCALED, SUMS
from luce.cpu_kernels.jit import compiled
from luce.cpu_kernels.jobs import run_job
from luce.cpu_kernels.lowering import PAIRS
from luce.cpu_kernels.memory import stack_words
from luce.cpu_kernels.vectors import as_float, pointer, word


@compiled
def _quantise(x, out):
    """x float32 [n, cols], cols a multiple of 32, to records: int8 [n, cols / 32 * RECORD]."""
    bits, floats, ints, pairs = x.view(np.int32), out.view(np.float32), out.view(np.int32), out.view(np.int16)
    for row in range(x.shape[0]):
        for record in range(x.shape[1] // 32):
            column, byte, word = record * 32, record * RECORD, record * RECORD // 4
            # The bits of magnitudes are in the order of the magnitudes, and NaN comes last.
            most = np.int32(0)
            for i in range(32):
                most = max(most, bits[row, column + i] & np.int32(0x7FFFFFFF))
            # 0x7F800000 is infinity, 0x0DA24260 is 1e-30.
            finite = most < np.int32(0x7F800000)
            small = most <= np.int32(0x0DA24260)
            largest = as_float(most)
            factor = np.float32(127.0) / largest if finite and not small else np.float32(0.0)
            first, last = np.int32(0), np.int32(0)
            for i in range(32):
                value, rest = np.int32(0), np.int32(0)
                if factor > 0:
                    quotient = x[row, column + i] * factor
                    whole = np.float32(np.rint(quotient))
                    value = np.int32(whole)
                    rest = np.int32(np.rint((quotient - whole) * np.float32(FINER)))
                both = value * np.int32(FINER) + rest
                if PAIRS:
                    pairs[row, byte // 2 + i // 16 * 16 + i % 2 * 8 + i % 16 // 4 * 2 + i % 4 // 2] = both
                else:
                    out[row, byte + i], out[row, byte + REST + i] = value, rest
                if i < 16:
                    first += both
                else:
                    last += both
            scale = np.float32(0.0)
            if not small:
                scale = largest / np.float32(127 * FINER) if finite else np.float32(np.nan)
            floats[row, word + SCALE // 4] = scale
            sums, scaled = word + SUMS // 4, word + SCALED // 4
            ints[row, sums], ints[row, sums + 1], ints[row, sums + 2] = first, last, first + last
            floats[row, scaled] = np.float32(first) * scale
            floats[row, scaled + 1] = np.float32(last) * scale
            floats[row, scaled + 2] = np.float32(first + last) * scale


@compiled
def quantise_part(arguments, part, scratch):
    """ROWS rows of those that int64 arguments name: addresses of x and of the records, rows, columns."""
    rows, cols = word(arguments, 2), word(arguments, 3)
    x = carray(pointer(word(arguments, 0)), (rows, cols), np.float32)
    out = carray(pointer(word(arguments, 1)), (rows, cols // 32 * RECORD), np.int8)
    own = slice(part * ROWS, min(part * ROWS + ROWS, rows))
    _quantise(x[own], out[own])


@compiled
def quantise_rows(slot, kernel, x, to):
    """Write the records of x float32 [n, cols] to an address: int8 [n, cols / 32 * RECORD]. `kernel`: the address of
    quantise_part."""
    if len(x) <= ROWS:
        _quantise(x, carray(pointer(to), (len(x), x.shape[1] // 32 * RECORD), np.int8))
    else:
        arguments = stack_words(4)
        arguments[0], arguments[1], arguments[2], arguments[3] = x.ctypes.data, to, len(x), x.shape[1]
        run_job(slot, kernel, arguments, (len(x) + ROWS - 1) // ROWS)
