"""Products of more than 16 quantised rows where four waves multiply together (kernels/matmul_rows_wgmma.cu).

They replace kernels/matmul_rows.cu for the types whose sums of integers are exact in fp16 products, with the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.ops.matmul_int8 import chain_bits
from luce.ops.quantise import GROUP_ROWS, Quantised
from luce.ops.weight import WeightPart
from luce.runtime.device import Array, Device

# The constants of kernels/matmul_rows_wgmma.cu: features and threads of a block, those of them that multiply, columns
# of a unit; stages of units and of facts in shared memory; rows of x of a tile.
_FEATURES, _THREADS, _MULTIPLYING, _UNIT_COLS = 128, 512, 256, 256
_STAGES, _FACT_STAGES = 3, 4
_ROWS = (32, 64)
_T = GGMLQuantizationType
# Bytes of facts of a section of 32 rows: sums, where there are minimums, and scales.
_FACTS = {_T.Q4_K: 640, _T.Q5_K: 640, _T.Q6_K: 128}
# What adding chains takes beyond the products, in units of a tile: a launch, and each tile's sums through memory.
_ADDING, _ADDING_SUMS = 1.5, 0.01


def serves(device: Device, type: GGMLQuantizationType) -> bool:
    """Whether these products replace those of kernels/matmul_rows.cu for weights of a type."""
    return "WGMMA" in device.products and type in _FACTS and _shared(type, _ROWS[-1]) <= device.shared_limit


def multiply(device: Device, x: Quantised, part: WeightPart, cols: int, out: Array) -> None:
    """Write one part's columns of out [n, rows] = x W^T: x of n > 16 rows in the group of its type."""
    tile = _ROWS[x.count > _ROWS[0]]
    bits = chain_bits(part.type, part.rows, cols)
    turns = -(-x.count // tile)
    dealing = dealt(-(-part.rows // _FEATURES), turns, cols // _UNIT_COLS, bits, device.multiprocessors)
    split, count = part.rows - dealing.whole // turns * _FEATURES, (1 << bits) - dealing.together + 1
    chains = device.empty((count, x.count, split)) if split > 0 else None
    stride = out.strides[0] // 4
    defines = {"QTYPE": part.type.name, "ROWS": tile}
    sizes = (x.count, part.rows, cols, stride, part.first, bits, dealing.whole, dealing.together)
    device.launch(
        "matmul_rows_wgmma",
        "matmul_rows_wgmma",
        (min(dealing.items, device.multiprocessors),),
        (_THREADS,),
        (part.data, x.data, out, chains, *(np.int32(size) for size in sizes)),
        defines=defines,
        shared=_shared(part.type, tile),
    )
    if chains is not None:
        facts = (x.count, split, stride, part.first + part.rows - split, count)
        args = (chains, out, *(np.int32(fact) for fact in facts))
        grid = (-(-split // _MULTIPLYING), x.count)
        device.launch("matmul_rows_wgmma", "add_chains", grid, (_MULTIPLYING,), args, defines=defines)


class Dealing(NamedTuple):
    """What blocks take in turn: `whole` tiles, then of each other tile the first `together` chains, then the others.

    Of these others a block takes `together` at a time. `items`: how many all these are.
    """

    whole: int
    together: int
    items: int


@lru_cache(1024)
def dealt(tiles: int, turns: int, units: int, bits: int, blocks: int) -> Dealing:
    """The fastest dealing of `tiles` for each of `turns` tiles of rows of x, of 1 << bits chains, to `blocks`.

    Where the last tiles are too few for all blocks, their chains fill these better. Which block takes what changes no
    bits.
    """
    count, chains = tiles * turns, 1 << bits

    def dealing(whole: int, together: int) -> Dealing:
        split = count - whole
        return Dealing(whole, together, whole + split + -(-split * (chains - together) // together))

    def duration(dealing: Dealing) -> float:
        """In units of a tile."""
        whole, together, items = dealing
        lengths = [-(-(units - chain) // chains) for chain in range(chains)]  # the first are the longest
        longest = max(sum(lengths[:together]), together * lengths[min(together, chains - 1)])
        sums = (count - whole) * (chains - together + 1)
        apart = -(-(items - whole) // blocks) * longest + _ADDING + _ADDING_SUMS * sums
        return -(-whole // blocks) * units + (apart if items > whole else 0)

    wholes = (count, count // blocks * blocks // turns * turns, 0)
    return min((dealing(whole, k) for whole in wholes for k in range(chains, 0, -1)), key=duration)


@lru_cache(64)
def _shared(type: GGMLQuantizationType, rows: int) -> int:
    """Bytes of shared memory: Shared of the kernel."""
    elements, size = GGML_QUANT_SIZES[type]
    unit = _UNIT_COLS // elements * size
    stride = -(-(unit + (14 if unit % 16 else 0)) // 16) * 16 | 16
    facts = _FACT_STAGES * 2 * (rows // GROUP_ROWS) * _FACTS[type]
    told = _FACT_STAGES * 48
    used = _STAGES * (2 * _UNIT_COLS * rows + _FEATURES * stride) + facts + 2 * rows * _MULTIPLYING + told
    return -(-int(used) // 1024) * 1024
