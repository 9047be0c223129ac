"""Products with packed weights on the CPU (luce/cpu_kernels/product.py), which stay as in the file.

Rows of x are quantised once for all parts of a weight in quant blocks, in groups of 32 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from luce.cpu_kernels.catalogue import format_kernels
from luce.cpu_kernels.dimensions import LANES
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array

if TYPE_CHECKING:
    from luce.runtime.cpu import CpuDevice

_FLOATS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


def multiply_packed(device: CpuDevice, x: Array, weight: Weight, out: Array) -> None:
    """Write out [n, rows] = x W^T: x float32 [n, cols] with n > 0 (any row stride), out float32 of contiguous rows."""
    plan = weight.plan
    if plan is None:
        words = [_words(device, part, part.rows, 4 * part.first, weight.cols) for part in weight.parts]
        plan = weight.plan = _plan(words, sum(part.data.nbytes for part in weight.parts))
    _multiply(device, plan, x, out, whole=True)


def multiply_experts(
    device: CpuDevice, x: Array, weight: Weight, experts: int, order: NDArray[np.intp], counts: NDArray[np.intp]
) -> Array:
    """The products of pairs of a row and an expert, sorted by expert: float32 [pairs, rows of an expert].

    x float32 [pairs, cols] in that order; `order`: the experts that have pairs; `counts`: how many each has.
    """
    product = device.kernels.product_words
    out = device.empty((len(x), weight.rows // experts))
    begins = np.cumsum(counts) - counts
    words = np.empty((len(weight.parts), len(order), product.weight), np.int64)
    for part, own in zip(weight.parts, words, strict=True):
        rows = part.rows // experts
        own[:] = _words(device, part, rows, 4 * (part.first // experts), weight.cols)
        own[:, 0] += order * (rows * part.data.strides[0])
        own[:, product.first], own[:, product.rows] = begins, counts
    _multiply(device, _plan(words.reshape(-1, product.weight), weight.nbytes // experts), x, out, whole=False)
    return out


def _multiply(device: CpuDevice, plan: NDArray[np.int64], x: Array, out: Array, *, whole: bool) -> None:
    """`whole`: each weight multiplies all rows of x, whatever the plan says."""
    if not x.flags.c_contiguous:
        x = device.compute(np.ascontiguousarray, x.shape, x)
    n, cols = x.shape
    rest = -cols % LANES
    padded = device.compute(partial(np.pad, pad_width=((0, 0), (0, rest))), (n, cols + rest), x) if rest else x
    device.run(device.kernels.multiply, plan, x, padded, out, whole, device.pool.threads)


def _plan(words: Sequence[NDArray[np.int64]] | NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The plan of products, whose weights have `size` bytes."""
    return np.concatenate([[len(words), 0, size], *words])


def _words(device: CpuDevice, part: WeightPart, rows: int, place: int, cols: int) -> NDArray[np.int64]:
    """The words of `rows` rows of a matrix, whose results lie `place` bytes behind the first of a row."""
    product = device.kernels.product_words
    elements, size = GGML_QUANT_SIZES[part.type]
    words = np.zeros(product.weight, np.int64)
    if part.type in _FLOATS:
        cols += -cols % LANES
        facts: tuple[int, ...] = ()
    else:
        functions = format_kernels(int(part.type))
        facts = functions.offset, not functions.groups16, functions.minimums
        words[product.functions : product.functions + 2] = functions.unpack, functions.one_row
    own = (part.data.ctypes.data, part.data.strides[0], int(part.type), rows, cols, elements, size, *facts)
    words[: len(own)], words[product.place] = own, place
    return words
