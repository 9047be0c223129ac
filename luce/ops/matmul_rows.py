"""Integer products of more than 16 quantised rows (kernels/matmul_rows.cu): many sequences, and short prompts.

The sums are those of few rows (luce.ops.matmul_int8), so a row has the bits that it has alone. Where four waves
multiply together, matmul_rows_wgmma.py does it, with the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.ops import matmul_rows_wgmma
from luce.ops.matmul_int8 import chain_bits, group_for
from luce.ops.quantise import GROUP_ROWS, SECTION, Quantised, section_bytes
from luce.ops.weight import WeightPart
from luce.runtime.device import Array, Device

# The constants of kernels/matmul_rows.cu: units of a step, features and threads of a block, stages; columns of a unit.
_SLOTS, _FEATURES, _THREADS, _STAGES, _UNIT_COLS = 4, 32, 256, 2, 256
_T = GGMLQuantizationType
# Q8_0 and Q4_0, of which a wave has four sums of 32 columns, are slower so than as fp16: 64 rows of Q8_0 5120 x
# 17408 took 150 us instead of 113.
_TYPES = frozenset({_T.Q4_K, _T.Q5_K, _T.Q6_K})


def takes_rows(device: Device, part: WeightPart, cols: int) -> bool:
    """Whether multiply_rows takes a part on this device."""
    if "BF16" not in device.products or part.type not in _TYPES:
        return False
    return chain_bits(part.type, part.rows, cols) in (2, 3) and _shared(part.type) <= device.shared_limit


def multiply_rows(device: Device, x: Quantised, part: WeightPart, cols: int, out: Array) -> None:
    """Write one part's columns of out [n, rows] = x W^T: x of n > 16 rows in the group of its type."""
    if matmul_rows_wgmma.serves(device, part.type):
        matmul_rows_wgmma.multiply(device, x, part, cols, out)
        return
    tiles = -(-x.count // GROUP_ROWS) * -(-part.rows // _FEATURES)
    sizes = (x.count, part.rows, cols, out.strides[0] // 4, part.first)
    device.launch(
        "matmul_rows",
        "matmul_rows",
        (min(tiles, device.multiprocessors),),
        (_THREADS,),
        (part.data, x.data, out, *(np.int32(size) for size in sizes)),
        defines={"QTYPE": part.type.name, "PHASES": (1 << chain_bits(part.type, part.rows, cols)) // _SLOTS},
        shared=_shared(part.type),
    )


@lru_cache(256)
def _shared(type: GGMLQuantizationType) -> int:
    """Bytes of shared memory: 2 * STAGE, and the chains' sums."""
    elements, size = GGML_QUANT_SIZES[type]
    run = _SLOTS * (_UNIT_COLS // elements) * size + (18 if size % 16 else 0)
    stride = -(-run // 16) * 16 | 16
    x = _SLOTS * (_UNIT_COLS // SECTION) * section_bytes(GROUP_ROWS, group_for(type))
    return int(_STAGES * (_FEATURES * stride + x) + 4 * _SLOTS * GROUP_ROWS * (_FEATURES + 4))
