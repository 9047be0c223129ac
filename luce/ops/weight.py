"""Weight matrices in device memory: raw quant blocks of the GGUF file on a GPU, float32 on the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from luce.gguf.model_file import FileRows
from luce.gguf.quants import dequantize
from luce.ops.int8_rows import Int8Rows
from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.gguf.reader import TensorInfo

_T = GGMLQuantizationType
#: the types that kernels/quants.h dequantises
KERNEL_TYPES = frozenset(
    {_T.F32, _T.F16, _T.BF16, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K}
    | {_T.IQ4_NL, _T.IQ4_XS, _T.IQ3_S, _T.IQ3_XXS, _T.IQ2_S, _T.IQ2_XS, _T.IQ2_XXS, _T.IQ1_M, _T.IQ1_S}
    | {_T.MXFP4, _T.NVFP4, _T.TQ1_0, _T.TQ2_0}
)
# Elements converted at a time, so that the float32 copy is small compared with the matrix.
_CONVERT = 1 << 24


@dataclass(frozen=True)
class RawTensor:
    """A matrix as in the file."""

    name: str
    #: uint8 [rows, row_bytes]
    raw: NDArray[np.uint8] | FileRows
    type: GGMLQuantizationType
    #: elements of a row
    cols: int

    @property
    def rows(self) -> int:
        """Output features."""
        return int(self.raw.shape[0])


@dataclass(frozen=True)
class WeightPart:
    """`rows` output features of a weight from `first` on, of one type."""

    #: uint8 [rows, row_bytes], or float32 [rows, cols] on the host
    data: Array
    type: GGMLQuantizationType
    first: int
    rows: int


@dataclass(frozen=True)
class Int8Experts:
    """Experts' matrices as int8 with a scale for each row, as kernels/moe_prefill_int8.cu reads them."""

    #: int8 [experts * pieces, slices, bytes of a piece]
    values: Array
    #: float32 [experts * pieces * rows of a piece]
    scale: Array
    experts: int
    #: results of an expert: its rows, or with `gated` half of them, which are gates before as many ups
    features: int
    gated: bool


@dataclass
class Weight:
    """A matrix [rows, cols] computing y = W x + bias, possibly of several tensors stacked along the rows (q, k and v,
    say)."""

    rows: int
    cols: int
    parts: tuple[WeightPart, ...]
    #: a copy of the parts in quant blocks as float16 [rows, cols], or as int8 (luce.ops.matmul_prefill.store_copy)
    copy: Array | Int8Rows | None = None
    #: whether products of many rows with the parts in quant blocks are those of int8 rows
    int8: bool = False
    #: magnitudes of rows of x with which no product overflows fp16 are 2^top at most; None where products are float32
    #: (luce.ops.half_products)
    top: int | None = None
    #: a copy of experts' matrices (luce.ops.moe_prefill_int8.store_experts)
    int8_experts: Int8Experts | None = None
    #: float32 [rows]
    bias: Array | None = None
    #: int64, arguments of the CPU's compiled product (luce.ops.matmul_packed)
    plan: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(int(part.data.nbytes) for part in self.parts) + (0 if self.bias is None else int(self.bias.nbytes))

    @property
    def matrix(self) -> Any:
        """The float32 [rows, cols] array of a weight on the host."""
        (part,) = self.parts
        return part.data

    def cut(self, rows: range) -> Weight:
        """The matrix of some consecutive rows: views of the same memory."""
        parts, at = [], 0
        for part in self.parts:
            low, high = max(rows.start, part.first), min(rows.stop, part.first + part.rows)
            if low < high:
                parts.append(WeightPart(part.data[low - part.first : high - part.first], part.type, at, high - low))
                at += high - low
        bias = None if self.bias is None else self.bias[rows.start : rows.stop]
        return Weight(at, self.cols, tuple(parts), bias=bias, int8=self.int8)


def upload_weight(device: Device, tensors: Sequence[RawTensor]) -> Weight:
    """Upload tensors of equal `cols`, stacked along the rows: dequantised once on a device that does not keep them
    packed.

    On other devices they stay as in the file, and adjacent tensors of one type become one part. Types without a kernel,
    which only a later `gguf` package can have, become F16: correct to 11 bits, at 2 bytes an element.
    """
    cols = tensors[0].cols
    rows = sum(t.rows for t in tensors)
    if not device.packed:
        # OpenBLAS streams a matrix times a vector faster along the longer dimension (2 cores, 3072 x 576: 31 GB/s
        # against 24 the other way; 576 x 1536: 29 against 15). The shape stays [rows, cols].
        whole = device.empty((cols, rows)).T if rows >= cols else device.empty((rows, cols))
        at = 0
        for t in tensors:
            whole[at : at + t.rows] = dequantize(np.asarray(t.raw), t.type)
            at += t.rows
        return Weight(rows, cols, (WeightPart(whole, GGMLQuantizationType.F32, 0, rows),))
    if device.host:
        places = itertools.accumulate((t.rows for t in tensors), initial=0)
        return Weight(rows, cols, tuple(map(_held, tensors, places)))
    parts: list[WeightPart] = []
    for type, run in itertools.groupby(tensors, lambda t: t.type if t.type in KERNEL_TYPES else _T.F16):
        same = list(run)
        count, first = sum(t.rows for t in same), sum(part.rows for part in parts)
        if len(same) == 1:
            data = _load(device, same[0])
        else:
            # One part needs one launch per product.
            data = device.empty((count, _row_bytes(type, cols)), np.uint8)
            at = 0
            for t in same:
                _load(device, t, data[at : at + t.rows])
                at += t.rows
        parts.append(WeightPart(data, type, first, count))
    return Weight(rows, cols, tuple(parts))


def _held(t: RawTensor, first: int) -> WeightPart:
    """A tensor in host memory, as in the file, and without a copy where the file can be mapped. Rows of floats become a
    multiple of 16 columns, and a matrix in quant blocks 16 rows, so that compiled products read no memory behind it."""
    raw, type = t.raw, t.type
    if type not in KERNEL_TYPES:
        raw, type = _as_fp16(t), _T.F16
    if type in (_T.F32, _T.F16, _T.BF16):
        missing = (0, 0), (0, -t.cols % 16 * _row_bytes(type, 1))
    else:
        missing = (0, max(0, 16 - t.rows)), (0, 0)
    if np.any(missing):
        raw = np.pad(np.asarray(raw), missing)
    return WeightPart(raw.held() if isinstance(raw, FileRows) else raw, type, first, t.rows)


def _load(device: Device, t: RawTensor, to: Array | None = None) -> Array:
    return device.load(t.raw if t.type in KERNEL_TYPES else _as_fp16(t), to)


def _row_bytes(type: GGMLQuantizationType, cols: int) -> int:
    elements, size = GGML_QUANT_SIZES[type]
    return cols // int(elements) * int(size)


def upload_experts(device: Device, tensors: Sequence[RawTensor], experts: int) -> Weight:
    """Upload tensors that each hold the matrices of all experts in sequence: [experts * own rows, cols].

    Weight.rows counts the rows of all experts and all tensors. Each part is one tensor; divided by `experts`, its
    `first` and `rows` are those within the results of one expert. On the host there is one part, float32 [experts, rows
    of one, cols], in which the rows of all tensors follow each other: one product serves an expert.
    """
    cols = tensors[0].cols
    if device.packed:
        places = itertools.accumulate((t.rows for t in tensors), initial=0)
        if device.host:
            return Weight(sum(t.rows for t in tensors), cols, tuple(map(_held, tensors, places)))
        parts = [
            WeightPart(_load(device, t), t.type if t.type in KERNEL_TYPES else _T.F16, first, t.rows)
            for t, first in zip(tensors, places, strict=False)
        ]
        return Weight(sum(t.rows for t in tensors), cols, tuple(parts))
    total = sum(t.rows for t in tensors)
    rows = total // experts
    # Along the longer dimension, as in upload_weight.
    whole = device.empty((experts, cols, rows)).swapaxes(1, 2) if rows > cols else device.empty((experts, rows, cols))
    at = 0
    for t in tensors:
        own = t.rows // experts
        for expert in range(experts):
            whole[expert, at : at + own] = dequantize(t.raw[expert * own : (expert + 1) * own], t.type)
        at += own
    return Weight(total, cols, (WeightPart(whole, _T.F32, 0, total),))


def stored_bytes(info: TensorInfo) -> int:
    """Bytes of a matrix on a GPU: as in the file, or as F16 if no kernel reads its type."""
    return info.nbytes if info.type in KERNEL_TYPES else 2 * info.rows * info.cols


def _as_fp16(t: RawTensor) -> NDArray[np.uint8]:
    """The tensor as F16: uint8 [rows, 2 cols]."""
    values = np.empty((t.rows, t.cols), np.float16)
    step = max(1, _CONVERT // t.cols)
    with np.errstate(over="ignore"):
        for at in range(0, t.rows, step):
            values[at : at + step] = dequantize(t.raw[at : at + step], t.type)
    return values.view(np.uint8)
