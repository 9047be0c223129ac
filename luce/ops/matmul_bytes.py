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

from luce.models.spec import Activation
from luce.ops.quantise import BLOCK, Quantised, room
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device

_T = GGMLQuantizationType
#: what kernels/quants_s8.h reads
BYTE_TYPES = frozenset({_T.Q4_0, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K})
# The constants of dot_s8.h and of the kernels that use it: rows of a tile, threads of a worker, columns of a unit; log2
# of the most chains, and units of each in flight.
_TILE, _WORKER, _UNIT_COLS = 16, 32, 256
_MOST_DOT, _PARTIAL_PAD = 2, 4
_BITS, _STAGES = 2, 2
_GATED_TILES, _GATED_BITS, _GATED_STAGES = 4, 1, 2
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
    shape = block_shape(part.type, cols, x.space, 1, _BITS, _STAGES, device.lanes)
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


def takes_gates(gate_up: Weight) -> bool:
    """Whether `gated` takes a weight that stacks gates and ups: both of one type, whole blocks of results."""
    return len(gate_up.parts) == 1 and gate_up.parts[0].type in BYTE_TYPES and gate_up.rows % (2 * BLOCK) == 0


def gated(device: Device, x: Quantised, gate_up: Weight, activation: Activation) -> Quantised:
    """act(gate x) * up x, quantised, of x with n <= 16 rows; gate_up as takes_gates says, its first half the gates."""
    (part,) = gate_up.parts
    half, cols = part.rows // 2, gate_up.cols
    shape = gated_shape(part.type, cols, x.space, device.lanes)
    out = room(device, x.count, half, space=x.space)
    sizes = (half, cols, shape.chain_bits, activation == "gelu")
    device.launch(
        "matmul_s8",
        "gated_s8",
        (half // BLOCK,),
        (shape.threads,),
        (part.data, x.values, x.scales, out.values, out.scales, *(np.int32(size) for size in sizes)),
        defines={"QTYPE": part.type.name, "ROWS": x.space},
        shared=shape.shared,
    )
    return out


@lru_cache(1024)
def gated_shape(type: GGMLQuantizationType, cols: int, space: int, lanes: int) -> Shape:
    """The block of a kernel that makes 32 gates and their 32 ups. Chains come from type and columns, not from space."""
    most = _GATED_BITS
    if max(block_shape(type, cols, n, _GATED_TILES, most, _GATED_STAGES, lanes).shared for n in (1, 16)) > MOST_SHARED:
        most = 0
    return block_shape(type, cols, space, _GATED_TILES, most, _GATED_STAGES, lanes)


@lru_cache(4096)
def block_shape(
    type: GGMLQuantizationType, cols: int, space: int, tiles: int, most_bits: int, stages: int, lanes: int
) -> Shape:
    """The block for `tiles` tiles: as many chains as there are units, at most 1 << most_bits, a power of two."""
    units = -(-cols // _UNIT_COLS)
    bits = min(most_bits, units.bit_length() - 1)
    chains = 1 << bits
    elements, size = GGML_QUANT_SIZES[type]
    odd = size % 16 != 0
    run = -(-(chains * (_UNIT_COLS // elements) * size + (18 if odd else 0)) // 16) * 16
    if not odd:
        run = -(-(run - 32) // 64) * 64 + 32 if space > _MOST_DOT else -(-(run - 16) // 32) * 32 + 16
    shared = max(stages * _TILE * tiles * run, 4 * chains * space * (_TILE * tiles + _PARTIAL_PAD))
    return Shape(bits, -(-_WORKER * tiles * chains // lanes) * lanes, shared)
