"""Integer products of more than 16 quantised rows (kernels/matmul_rows.cu): many sequences, and short prompts.

The sums are those of few rows (luce.ops.matmul_int8), so a row has the bits that it has alone.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.ops.matmul_int8 import chain_bits, group_for
from luce.ops.quantise import SECTION, Quantised, section_bytes
from luce.ops.weight import WeightPart
from luce.runtime.device import Array, Device

# The constants of kernels/matmul_rows.cu: rows of a group and of a block, units of a step, halves of the features,
# threads, stages; columns of a unit. With 512 threads, whose waves have one group each, 64 sequences of a 27B model
# took 35.0 ms a step on an H100 instead of 32.2.
_GROUP_ROWS, _ROWS, _SLOTS, _SIDES, _THREADS, _STAGES, _UNIT_COLS = 16, 32, 4, 2, 256, 2, 256
_T = GGMLQuantizationType
# Q8_0 and Q4_0, of which a wave has four sums of 32 columns, are slower so than as fp16: 64 rows of Q8_0 5120 x
# 17408 took 150 us instead of 113.
_TYPES = frozenset({_T.Q4_K, _T.Q5_K, _T.Q6_K})
#: with fewer features, blocks of 64 would leave multiprocessors of a large GPU idle: 80 blocks of 5120 features, times
#: two for 64 rows, where an H200 has 132
MANY_FEATURES = 8192


def takes_rows(device: Device, part: WeightPart, cols: int) -> bool:
    """Whether multiply_rows takes a part on this device."""
    if "BF16" not in device.products or part.type not in _TYPES:
        return False
    bits = chain_bits(part.type, part.rows, cols)
    return bits in (2, 3) and _shared(part.type, _tiles(part.rows, bits)) <= device.shared_limit


def multiply_rows(device: Device, x: Quantised, part: WeightPart, cols: int, out: Array) -> None:
    """Write one part's columns of out [n, rows] = x W^T: x of n > 16 rows in the group of its type."""
    bits = chain_bits(part.type, part.rows, cols)
    tiles = _tiles(part.rows, bits)
    sizes = (x.count, part.rows, cols, out.strides[0] // 4, part.first)
    device.launch(
        "matmul_rows",
        "matmul_rows",
        (-(-x.count // _ROWS), -(-part.rows // (_SIDES * 16 * tiles))),
        (_THREADS,),
        (part.data, x.data, out, *(np.int32(size) for size in sizes)),
        defines={"QTYPE": part.type.name, "PHASES": (1 << bits) // _SLOTS, "TILES": tiles},
        shared=_shared(part.type, tiles),
    )


def _tiles(rows: int, bits: int) -> int:
    """Tiles of 16 features of a wave: two take all registers, for which waves with two chains have none left."""
    return 2 if bits == 2 and rows >= MANY_FEATURES else 1


@lru_cache(256)
def _shared(type: GGMLQuantizationType, tiles: int) -> int:
    """Bytes of shared memory: 2 * STAGE."""
    elements, size = GGML_QUANT_SIZES[type]
    run = _SLOTS * (_UNIT_COLS // elements) * size + (18 if size % 16 else 0)
    stride = -(-run // 16) * 16 | 16
    x = _SLOTS * (_UNIT_COLS // SECTION) * section_bytes(_GROUP_ROWS, group_for(type))
    return int(_STAGES * (_SIDES * 16 * tiles * stride + _ROWS // _GROUP_ROWS * x))
