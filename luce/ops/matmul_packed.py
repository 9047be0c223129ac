"""Products with packed weights on the CPU (luce/cpu_kernels/product.py), which stay as in the file.

Rows of x are quantised once for all parts of a weight in quant blocks, in groups of 32 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from luce.cpu_kernels.dimensions import RECORD
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array

if TYPE_CHECKING:
    from luce.runtime.cpu import CpuDevice

_FLOATS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
# Work below which a product stays on the caller's thread: bytes of weights times rows, 10 us or so.
_ALONE = 1 << 17
# Parts for each thread: a thread that the system stops holds up a fraction of the work.
_PARTS = 4


def multiply_packed(device: CpuDevice, x: Array, weight: Weight, out: Array) -> None:
    """Write out [n, rows] = x W^T: x float32 [n, cols] with n > 0 (any row stride), out float32 of contiguous rows."""
    plan = weight.plan
    if plan is None:
        plan = weight.plan = _plan(device, weight.parts, weight.cols)
    product = device.kernels.product_words
    words = plan[product.head :].reshape(-1, product.weight)
    own = _Rows(device, x, weight.cols)
    for part, row in zip(weight.parts, words, strict=True):
        rows = own.floats() if part.type in _FLOATS else own.quantised()
        row[product.x :] = (
            rows.ctypes.data,
            rows.strides[0],
            len(x),
            out.ctypes.data + 4 * part.first,
            out.strides[0],
        )
    _run(device, plan, weight.nbytes * len(x))


def multiply_experts(
    device: CpuDevice, x: Array, weight: Weight, experts: int, order: NDArray[np.intp], counts: NDArray[np.intp]
) -> Array:
    """The products of pairs of a row and an expert, sorted by expert: float32 [pairs, rows of an expert].

    x float32 [pairs, cols] in that order; `order`: the experts that have pairs; `counts`: how many each has.
    """
    product = device.kernels.product_words
    rows = weight.rows // experts
    out = device.empty((len(x), rows))
    begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
    plan = np.empty((len(weight.parts), len(order), product.weight), np.int64)
    own = _Rows(device, x, weight.cols)
    for part, words in zip(weight.parts, plan, strict=True):
        share = part.rows // experts
        words[:] = _words(device, WeightPart(part.data, part.type, 0, share), weight.cols)
        words[:, 0] += order * (share * part.data.strides[0])
        values = own.floats() if part.type in _FLOATS else own.quantised()
        words[:, product.x] = values.ctypes.data + begins * values.strides[0]
        words[:, product.x + 1] = values.strides[0]
        words[:, product.x + 2] = counts
        words[:, product.x + 3] = out.ctypes.data + begins * out.strides[0] + 4 * (part.first // experts)
        words[:, product.x + 4] = out.strides[0]
    head = np.array([plan.shape[0] * plan.shape[1], 1], np.int64)
    _run(device, np.concatenate([head, plan.reshape(-1)]), weight.nbytes // experts * len(x))
    return out


class _Rows:
    """Rows of x in the forms that products read, each made once."""

    def __init__(self, device: CpuDevice, x: Array, cols: int) -> None:
        self._device = device
        self._x = np.ascontiguousarray(x)
        self._cols = cols
        self._quantised: Array | None = None

    def quantised(self) -> Array:
        """int8 [n, bytes] (luce/cpu_kernels/quantised_rows.py)."""
        if self._quantised is None:
            self._quantised = self._device.empty((len(self._x), self._cols // 32 * RECORD), np.int8)
            self._device.kernels.quantise_rows(self._x, self._quantised)
        return self._quantised

    def floats(self) -> Array:
        """float32 [n, columns], zeros behind the last column up to a multiple of 16."""
        rest = -self._cols % 16
        return np.pad(self._x, ((0, 0), (0, rest))) if rest else self._x


def _plan(device: CpuDevice, parts: Sequence[WeightPart], cols: int) -> NDArray[np.int64]:
    words = [_words(device, part, cols) for part in parts]
    return np.concatenate([[len(parts), 1], *words]).astype(np.int64)


def _words(device: CpuDevice, part: WeightPart, cols: int) -> NDArray[np.int64]:
    kernels = device.kernels
    elements, size = GGML_QUANT_SIZES[part.type]
    kind = int(part.type)
    cols += -cols % 16 if part.type in _FLOATS else 0
    facts = kernels.offsets.get(kind, 0), kind not in kernels.groups16, kind in kernels.with_minimums
    own = (part.data.ctypes.data, part.data.strides[0], kind, part.rows, cols, elements, size, *facts)
    return np.array([*own, 0, 0, 0, 0, 0], np.int64)


def _run(device: CpuDevice, plan: NDArray[np.int64], work: int) -> None:
    parts = 1 if work < _ALONE else _PARTS * device.pool.threads
    plan[1] = parts
    device.pool.run(device.kernels.product, plan, parts)
