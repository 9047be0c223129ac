"""Integer products of few quantised rows with weights in block formats (kernels/dot_s8.h).

Weights stay as the file has them and become signed bytes as they are multiplied; x is quantised (quantise.py). The sum
of a group's products is exact, and all other sums have an order that the columns alone decide: a row has the same bits
for any number of rows, alone or among others, on every device with kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.ops.quantise import Quantised
from luce.ops.weight import WeightPart
from luce.runtime.device import Array, Device

_T = GGMLQuantizationType
#: what kernels/quants_s8.h reads
BYTE_TYPES = frozenset({_T.Q4_0, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K})
# The constants of dot_s8.h: rows of a tile, threads of a worker, columns of a unit, and units in flight per chain.
_TILE, _WORKER, _UNIT_COLS, _STAGES = 16, 32, 256, 2
_MOST_DOT, _PARTIAL_PAD = 2, 4
# Rows of a weight that take fewer blocks than GPUs of today have multiprocessors.
_FEW_FEATURES = 1024
_ROWS = (1, 16)
#: what every supported GPU gives a block
MOST_SHARED = 65536


@dataclass(frozen=True)
class Shape:
    """How a block goes about its tiles of weight rows: log2 of the chains per row, threads, bytes of shared memory."""

    chain_bits: int
    threads: int
    shared: int


def multiply(device: Device, x: Quantised, part: WeightPart, cols: int, out: Array) -> None:
    """One part's columns of out [n, rows] = x W^T: x of n <= 16 rows, the part of a type in BYTE_TYPES."""
    shape = _shape(part.type, part.rows, cols, x.space, device.lanes)
    sizes = (x.count, part.rows, cols, shape.chain_bits, out.strides[0] // 4, part.first)
    device.launch(
        "matmul_s8",
        "matmul_s8",
        (-(-part.rows // _TILE),),
        (shape.threads,),
        (part.data, x.values, x.scales, out, *(np.int32(size) for size in sizes)),
        defines={"QTYPE": part.type.name, "ROWS": x.space},
        shared=shape.shared,
    )


#: formats of two parts that kernels/matmul_s8_pair.cu takes
_PAIRS = frozenset({(_T.Q5_K, _T.Q4_K), (_T.Q4_K, _T.Q6_K)})


def pairs(first: WeightPart, second: WeightPart, cols: int, lanes: int) -> bool:
    """Whether multiply_pair takes these parts: formats that there is a kernel for, and as many chains."""
    if (first.type, second.type) not in _PAIRS:
        return False
    shapes = (_shape(part.type, part.rows, cols, 1, lanes) for part in (first, second))
    return len({shape.chain_bits for shape in shapes}) == 1


def multiply_pair(device: Device, x: Quantised, first: WeightPart, second: WeightPart, cols: int, out: Array) -> None:
    """Two parts' columns, in one launch: blocks of the second fill what the first leaves of the multiprocessors."""
    shapes = [_shape(part.type, part.rows, cols, x.space, device.lanes) for part in (first, second)]
    chain_bits = shapes[0].chain_bits
    sizes = (x.count, first.rows, second.rows, cols, chain_bits, out.strides[0] // 4, first.first, second.first)
    device.launch(
        "matmul_s8_pair",
        "matmul_s8_pair",
        (-(-first.rows // _TILE) - (-second.rows // _TILE),),
        (shapes[0].threads,),
        (first.data, second.data, x.values, x.scales, out, *(np.int32(size) for size in sizes)),
        defines={"FIRST": first.type.name, "SECOND": second.type.name, "ROWS": x.space},
        shared=max(shape.shared for shape in shapes),
    )


@lru_cache(1024)
def _shape(type: GGMLQuantizationType, rows: int, cols: int, space: int, lanes: int) -> Shape:
    """The block of a dense product. Chains come from the weight alone.

    Eight chains read faster than four (H200, Q4_K 5120 x 17408: 17.3 us and 19.7) unless a tenth or more of them idles
    in the last of their steps, or there is one step only (Q5_K 10240 x 5120, 20 units: 15.8 us and 12.3). Where so few
    rows leave most of a GPU idle, fewer steps are all that counts.
    """
    units = -(-cols // _UNIT_COLS)
    steps = -(-units // 8)
    most = rows <= _FEW_FEATURES or (steps > 1 and 8 * steps <= 1.1 * units)
    return block_shape(type, cols, space, 1, most_chains(type, cols, 1, 3 if most else 2), lanes)


def most_chains(type: GGMLQuantizationType, cols: int, tiles: int, bits: int) -> int:
    """log2 of the chains of `tiles` tiles: `bits`, or less where there are fewer units, or not enough shared memory."""
    bits = min(bits, (-(-cols // _UNIT_COLS)).bit_length() - 1)
    while bits and max(block_shape(type, cols, space, tiles, bits, 32).shared for space in _ROWS) > MOST_SHARED:
        bits -= 1
    return bits


def block_shape(
    type: GGMLQuantizationType, cols: int, space: int, tiles: int, bits: int, lanes: int, stages: int = _STAGES
) -> Shape:
    """The block of block_sums for `tiles` tiles, 1 << bits chains and up to `stages` units of each in flight."""
    chains = 1 << bits
    elements, size = GGML_QUANT_SIZES[type]
    odd = size % 16 != 0
    run = -(-(chains * (_UNIT_COLS // elements) * size + (18 if odd else 0)) // 16) * 16
    if not odd:
        run = -(-(run - 32) // 64) * 64 + 32 if space > _MOST_DOT else -(-(run - 16) // 32) * 32 + 16
    if cols <= chains * _UNIT_COLS:
        stages = 1  # one step fills no other
    shared = max(stages * _TILE * tiles * run, 4 * chains * space * (_TILE * tiles + _PARTIAL_PAD))
    return Shape(bits, -(-_WORKER * tiles * chains // lanes) * lanes, shared)
