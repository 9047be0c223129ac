"""Integer products of few quantised rows with weights in quant blocks (kernels/dot_int8.h).

Weights stay as in the file; kernels convert them to int8 as they multiply. x is quantised (quantise.py). The sum of a
group's products is exact, and the columns alone determine the order of all other sums: a row has the same bits for any
number of rows, alone or among others, on every device with kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.ops.norm import Unnormed
from luce.ops.quantise import BLOCK, SECTION, Quantised, section_bytes
from luce.ops.weight import WeightPart
from luce.runtime.device import Array, Device

_T = GGMLQuantizationType
#: the types that kernels/quants_int8.h reads
INT8_TYPES = frozenset({_T.Q4_0, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K})
# The types with a float scale for every 32 weights; the others' scales are integers.
_FLOAT_SCALES = frozenset({_T.Q4_0, _T.Q8_0})
# The constants of dot_int8.h and mma_int8.h: rows of a tile, threads of a worker, columns of a unit, units in flight.
_TILE, _WORKER, _UNIT_COLS, _STAGES = 16, 32, 256, 2
_PARTIAL_PAD = 4
# Of a product that norms its row (kernels/product_int8.h): log2 of the chains, the most units of one, features of a
# block, bytes of shared memory for the waves' sums.
_NORM_BITS, _NORM_UNITS, _NORM_FEATURES, _NORM_SUMS = 2, 2, 48, 128
# Features of a dense block of few rows, by the bits of its chains.
_FEATURES = (16, 16, 16, 8)
# A weight of so few rows makes fewer blocks than large GPUs have multiprocessors.
_FEW_FEATURES = 1024
# From so many rows of x on, tensor cores multiply; log2 of the chains that their kernels are built with.
_TILE_ROWS, _TILE_BITS = 8, (2, 3)
_ROWS = (1, 16)
#: bytes of shared memory that a block can have on every supported GPU
MOST_SHARED = 65536

#: how a product adds to its result, and whether the next launch may start beside it (kernels/product_int8.h)
ADDS, ADDS_EARLY = 1, 2


def group_for(type: GGMLQuantizationType) -> int:
    """How many columns of x share a scale for products with a type in INT8_TYPES: as many as have exact sums."""
    return BLOCK if type in _FLOAT_SCALES else SECTION


@dataclass(frozen=True)
class Shape:
    """The shape of a thread block for its tiles of weight rows."""

    #: log2 of the chains: partial sums of a row that run side by side
    chain_bits: int
    threads: int
    #: bytes of shared memory
    shared: int
    #: weight rows per block
    features: int
    #: further defines of the kernel
    defines: Mapping[str, int | str] = field(default_factory=dict)


def multiply(
    device: Device,
    x: Quantised | Unnormed,
    parts: Sequence[WeightPart],
    cols: int,
    out: Array,
    *,
    adds: int = 0,
) -> None:
    """Write the columns of one part, or of two that `pairs` joins, of out [n, rows] = x W^T in one launch: the second
    part's blocks use multiprocessors that the first leaves idle.

    x of n <= 16 rows in the group of the types, which are in INT8_TYPES, or one row where `norms` is true. `adds`: of
    one quantised row, out += that, as ADDS or ADDS_EARLY says.
    """
    shapes = [_part_shape(device, x, part, cols) for part in parts]
    kernel, defines = "matmul_int8", {"QTYPE": parts[0].type.name}
    if len(parts) > 1:
        kernel, defines = "matmul_int8_pair", {"FIRST": parts[0].type.name, "SECOND": parts[1].type.name}
    data, rows, firsts = zip(*((part.data, part.rows, part.first) for part in parts), strict=True)
    row: tuple[Any, ...] = (x.x, x.weight, np.float32(x.eps)) if isinstance(x, Unnormed) else (x.data,)
    sizes: tuple[int, ...] = (*rows, cols, *firsts)
    if isinstance(x, Quantised):
        sizes = (x.count, *rows, cols, out.strides[0] // 4, *firsts, adds)
    features = shapes[0].features
    device.launch(
        kernel,
        f"norm_{kernel}" if isinstance(x, Unnormed) else kernel,
        (sum(-(-count // features) for count in rows),),
        (shapes[0].threads,),
        (*data, *row, out, *(np.int32(size) for size in sizes)),
        defines={**defines, "ROWS": x.padded if isinstance(x, Quantised) else 1, **shapes[0].defines},
        shared=max(shape.shared for shape in shapes),
    )


# Types of two parts that kernels/matmul_int8_pair.cu multiplies.
_PAIRS = frozenset({(_T.Q5_K, _T.Q4_K), (_T.Q4_K, _T.Q6_K)})


def pairs(device: Device, x: Quantised, first: WeightPart, second: WeightPart, cols: int) -> bool:
    """Whether `multiply` joins these parts: a kernel has both types, with as many chains and at most a tile a block."""
    if (first.type, second.type) not in _PAIRS:
        return False
    one, other = (_part_shape(device, x, part, cols) for part in (first, second))
    return one.chain_bits == other.chain_bits and one.features == other.features <= _TILE


def norms(device: Device, parts: Sequence[WeightPart], cols: int) -> bool:
    """Whether one launch multiplies all parts with a row that its blocks norm."""
    types = tuple(part.type for part in parts)
    if not INT8_TYPES.issuperset(types) or (len(types) > 1 and types not in _PAIRS):
        return False
    shapes = [norm_shape(part.type, part.rows, cols, device.lanes) for part in parts]
    fit = all(shape.chain_bits == _NORM_BITS and shape.shared + _NORM_SUMS <= device.shared_limit for shape in shapes)
    return fit and cols <= _NORM_UNITS * _UNIT_COLS << _NORM_BITS


def _part_shape(device: Device, x: Quantised | Unnormed, part: WeightPart, cols: int) -> Shape:
    if isinstance(x, Unnormed):
        return norm_shape(part.type, part.rows, cols, device.lanes)
    limit = device.shared_limit if "BF16" in device.products else 0
    return dense_shape(part.type, part.rows, cols, x.padded, device.lanes, limit)


@lru_cache(1024)
def norm_shape(type: GGMLQuantizationType, rows: int, cols: int, lanes: int) -> Shape:
    """The thread block of a dense product that norms its row, which lies in front of the units in shared memory."""
    shape = block_shape(type, cols, 1, _NORM_FEATURES, chain_bits(type, rows, cols), lanes)
    row = -(-cols // SECTION) * section_bytes(1, group_for(type))
    return replace(shape, shared=shape.shared + row)


@lru_cache(1024)
def dense_shape(type: GGMLQuantizationType, rows: int, cols: int, padded: int, lanes: int, limit: int) -> Shape:
    """The thread block of a dense product. `limit`: the shared memory of a block on a device whose tensor cores
    multiply int8, 0 on other devices."""
    bits = chain_bits(type, rows, cols)
    if not limit or padded < _TILE_ROWS or bits not in _TILE_BITS:
        return block_shape(type, cols, padded, _FEATURES[bits], bits, lanes)
    tiles = tiles_per_block(type, rows, cols, padded, bits)
    shape = tile_shape(type, padded, bits, tiles, shared_x=tiles > 1 or type in _FLOAT_SCALES)
    # If two blocks of one tile do not fit a multiprocessor, x is better left to the caches.
    return shape if shape.shared <= limit // (2 if tiles == 1 else 1) else tile_shape(type, padded, bits, 1)


def tiles_per_block(type: GGMLQuantizationType, rows: int, cols: int, padded: int, bits: int) -> int:
    """Tiles of weight rows per block: one, or three that share x if single tiles would fetch x from beyond the
    first-level cache.

    A block of three takes a whole multiprocessor, of which an H200 has 132: there may not be more blocks than that, nor
    much fewer. Trials there with 16 rows, us with one tile and with three: Q4_K 5120 x 17408 25.9 and 23.1, 5120 x 6144
    10.0 and 9.5, Q5_K 5120 x 17408 29.2 and 27.3, but Q4_K 34816 x 5120 36.5 and 40.5. 8 rows do better with one (17.3
    and 19.8, 7.7 and 8.4, Q5_K 21.6 and 23.7).
    """
    long = type in (_T.Q4_K, _T.Q5_K) and padded == 16 and bits == 3 and cols >= 6144
    return 3 if long and 2 * _TILE * 132 < rows <= 3 * _TILE * 132 else 1


def tile_shape(
    type: GGMLQuantizationType, padded: int, bits: int, tiles: int, shared_x: bool = False, stages: int = _STAGES
) -> Shape:
    """The thread block of tile_sums (kernels/mma_int8.h), with x in shared memory or read through the caches.

    Types with a scale for 32 weights leave no registers in which x could wait. Trials on an H200, us through the caches
    and in shared memory: 16 rows Q8_0 34816 x 5120 104.4 and 72.4, 5120 x 17408 80.6 and 39.9, 6144 x 5120 25.1 and
    17.9, Q4_0 34816 x 5120 54.7 and 51.9, 5120 x 17408 59.1 and 34.0; 8 rows 82.9 and 61.8, 67.1 and 34.0, 23.4 and
    16.7, 47.3 and 41.0, 32.3 and 25.2. Other types do better through the caches: 16 rows Q4_K 36.7 and 43.3, Q6_K 38.9
    and 53.9.
    """
    chains = 1 << bits
    x = chains * (_UNIT_COLS // SECTION) * section_bytes(padded, group_for(type)) if shared_x else 0
    weights = _TILE * tiles * _stride(type, chains)
    shared = max(stages * (weights + x), 4 * chains * padded * (_TILE * tiles + _PARTIAL_PAD))
    defines = {"CHAINS": chains} | ({"TILES": tiles} if tiles > 1 else {}) | ({"SHARED_X": 1} if shared_x else {})
    return Shape(bits, _WORKER * chains, int(shared), _TILE * tiles, defines)


def _stride(type: GGMLQuantizationType, chains: int) -> int:
    """TILE_STRIDE of kernels/dot_int8.h: bytes from one row's units of a step to the next row's in shared memory."""
    elements, size = GGML_QUANT_SIZES[type]
    run = chains * (_UNIT_COLS // elements) * size + (18 if size % 16 else 0)
    return int(-(-run // 16) * 16 | 16)


@lru_cache(1024)
def chain_bits(type: GGMLQuantizationType, rows: int, cols: int) -> int:
    """log2 of the chains of a dense product's rows, from the weight alone.

    Eight chains read faster than four (H200, Q4_K 5120 x 17408: 17.3 us and 19.7), unless a tenth or more of them are
    idle in the last step, or there is only one step (Q5_K 10240 x 5120, 20 units: 15.8 us and 12.3). If few rows leave
    most of a GPU idle, only the number of steps counts.
    """
    units = -(-cols // _UNIT_COLS)
    steps = -(-units // 8)
    most = rows <= _FEW_FEATURES or (steps > 1 and 8 * steps <= 1.1 * units)
    return most_chains(type, cols, 1, 3 if most else 2)


def most_chains(type: GGMLQuantizationType, cols: int, tiles: int, bits: int) -> int:
    """log2 of the chains of `tiles` tiles: `bits`, or less if there are fewer units or too little shared memory."""

    def shared(bits: int) -> int:
        return max(block_shape(type, cols, padded, _TILE * tiles, bits, 32).shared for padded in _ROWS)

    bits = min(bits, (-(-cols // _UNIT_COLS)).bit_length() - 1)
    while bits and shared(bits) > MOST_SHARED:
        bits -= 1
    return bits


def block_shape(
    type: GGMLQuantizationType, cols: int, padded: int, features: int, bits: int, lanes: int, stages: int = _STAGES
) -> Shape:
    """The thread block of block_sums for `features` weight rows, 1 << bits chains and up to `stages` units of each in
    flight."""
    chains = 1 << bits
    stages = min(stages, -(-cols // (chains * _UNIT_COLS)))  # no more than there are steps to fill
    shared = max(stages * features * _stride(type, chains), 4 * chains * padded * (features + _PARTIAL_PAD))
    threads = _WORKER * features * chains // _TILE
    return Shape(bits, -(-threads // lanes) * lanes, shared, features, {"CHAINS": chains})
