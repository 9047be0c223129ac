"""Products of many rows that are rounded to fp16, of sums in float32: half of the bytes to write, and to read again.

None overflows: a product's magnitude is at most the norm of its row of x times that of its row of the weight
(Cauchy-Schwarz). `measure` finds the largest norm of a weight's rows, and with it `Weight.top`: rows of x are scaled by
powers of two such that their magnitudes stay below 2^top (luce.ops.fp16), and with them those of products below 65504.
With rows of 5120 columns and norms of 3.5 that is 2^8. Beside the error of the rounded x and weights, the mean squared
error of products is 5e-8 of their mean square, unless all are so small (2^-13) that fp16 has fewer bits for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.fp16 import Fp16Rows, Halves, to_fp16
from luce.ops.int8_rows import Int8Rows
from luce.ops.matmul_prefill import is_long, slices
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device

_THREADS = 256
# The largest fp16 number, less what sums in float32 may exceed the exact ones by.
_MOST = 65504 / 1.01
# Magnitudes of rows: where more is possible it is not needed, and with less fp16 has few bits for the rest of a row.
_LEAST_TOP, _MOST_TOP = -2, 15
# The wide accesses of the library, and of the kernels that read halves.
_FEATURES = 8
#: With fewer features the library's kernels for fp16 results lose more than their bytes gain: 2048 x 1024 x 2048 takes
#: 54 us, and 45 with results in float32 (H200).
LEAST_FEATURES = 4096


def expect(device: Device, weights: Sequence[Weight]) -> None:
    """Let steps that run dry multiply as they will after `measure`."""
    for weight in weights:
        weight.top = 0 if _fits(device, weight) else None


def measure(device: Device, weights: Sequence[Weight]) -> None:
    """Set `top` of weights whose products may be fp16: none in F32 or F16, nor with a bias."""
    fitting = [weight for weight in weights if _fits(device, weight)]
    if not fitting:
        return
    squares = device.zeros(len(fitting), np.int32)
    for i, weight in enumerate(fitting):
        for begin, end, own in slices(device, [*weight.parts], weight):
            args = (own, squares[i : i + 1], np.int32(weight.cols))
            device.launch("fp16", "largest_square", (end - begin,), (_THREADS,), args)
    for weight, square in zip(fitting, device.download(squares).view(np.float32), strict=True):
        weight.top = _top(float(square), weight.cols)


def _top(square: float, cols: int) -> int | None:
    """The top of x where the largest sum of squares of a weight's row is `square`."""
    if not math.isfinite(square):
        return None
    norms = math.sqrt(square * cols)
    top = _MOST_TOP if norms * 2.0**_MOST_TOP <= _MOST else math.floor(math.log2(_MOST / norms))
    return top if top >= _LEAST_TOP else None


def _fits(device: Device, weight: Weight) -> bool:
    plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    packed = all(part.type not in plain for part in weight.parts)
    multiplied = not device.host and device.blas and weight.cols % 8 == 0
    pays = weight.rows >= LEAST_FEATURES and weight.rows % _FEATURES == 0
    return multiplied and pays and packed and not weight.int8 and weight.bias is None


def has_halves(device: Device, x: Array | Quantised | Fp16Rows | Int8Rows, weight: Weight) -> bool:
    """Whether `halves` multiplies x with the weight."""
    if weight.top is None or not is_long(device, x.shape[0]) or isinstance(x, Quantised | Int8Rows):
        return False
    return not isinstance(x, Fp16Rows) or x.top <= weight.top


def halves(device: Device, x: Array | Fp16Rows, weight: Weight) -> Halves:
    """x W^T in fp16, where `has_halves` says so: x float32 [n, cols], or rows already rounded."""
    assert weight.top is not None
    rows = x if isinstance(x, Fp16Rows) else to_fp16(device, x, weight.top)
    out = device.empty((x.shape[0], weight.rows), np.float16)
    for begin, end, own in slices(device, [*weight.parts], weight):
        device.gemm(rows.values[:, : weight.cols], own, out[:, begin:end])
    return Halves(out, rows.scale)
