"""Rows of activations as int8, for products with packed weights.

32 columns of a row are a record of RECORD bytes, one cache line; the last record of a row is padded with zeros:

    0       int8 [32]    round(x / s), s = largest |x| / 127
    SCALE   float32      s
    SUMS    int32 [3]    the sum of the int8: of the first 16, of the last 16, of all
    SCALED  float32 [3]  the same times s

An infinity or a NaN makes every product with its record NaN; a record whose magnitudes are below 1e-30 becomes zeros.
"""

from __future__ import annotations

import numpy as np

from luce.cpu_kernels.jit import compiled_as
from luce.cpu_kernels.vectors import as_float

RECORD, COLUMNS = 64, 32
SCALE, SUMS, SCALED = 32, 36, 48


def row_bytes(cols: int) -> int:
    """Bytes of a quantised row of `cols` columns."""
    return -(-cols // COLUMNS) * RECORD


@compiled_as("void(float32[:, ::1], int8[:, ::1])")
def quantise_rows(x, out):
    """x float32 [n, cols], cols a multiple of 32, to records: int8 [n, row_bytes(cols)]."""
    bits, floats, ints = x.view(np.int32), out.view(np.float32), out.view(np.int32)
    for row in range(x.shape[0]):
        for record in range(x.shape[1] // 32):
            column, byte, word = record * 32, record * 64, record * 16
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
            if factor > 0:
                for i in range(16):
                    value = np.int32(np.rint(x[row, column + i] * factor))
                    out[row, byte + i] = value
                    first += value
                for i in range(16, 32):
                    value = np.int32(np.rint(x[row, column + i] * factor))
                    out[row, byte + i] = value
                    last += value
            else:
                for i in range(32):
                    out[row, byte + i] = 0
            scale = np.float32(0.0)
            if not small:
                scale = largest / np.float32(127.0) if finite else np.float32(np.nan)
            floats[row, word + 8] = scale
            ints[row, word + 9], ints[row, word + 10], ints[row, word + 11] = first, last, first + last
            floats[row, word + 12] = np.float32(first) * scale
            floats[row, word + 13] = np.float32(last) * scale
            floats[row, word + 14] = np.float32(first + last) * scale
