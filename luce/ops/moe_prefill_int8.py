"""Products of a prompt's rows with the weights of the experts chosen for them, as int8 rows (--prompt-precision int8).

For rows of long prompts, a device with products of four waves (WGMMA) multiplies weights in quant blocks by
kernels/moe_prefill_int8.cu, instead of moe_prefill.py. It reads a copy of the weights as int8 (`store_experts`); where
there is no memory to keep one, each step makes it anew, with the same bits. Rows of x and of the weights are rounded as
for dense products (luce.ops.int8_rows), and sums are exact, so a row's bits depend on nothing else. Gates and ups give
act(gate) * up at once. These and the results, which most bytes are moved for, are written as bfloat16: that adds a
hundredth to the errors of int8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops import moe_prefill
from luce.ops.fp16 import ACTIVATIONS, dequantise
from luce.ops.int8_rows import Int8Rows, padded_columns, to_int8
from luce.ops.matmul_prefill import BLAS_COLS, BUFFER_BYTES
from luce.ops.weight import Int8Experts, Weight
from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.models.spec import Activation
    from luce.ops.moe import Groups

# The constants of kernels/moe_prefill_int8.cu.
#: most rows of a tile
TILE_ROWS = 128
_GROUPS, _STAGES, _X_STAGES, _FEATURES, _SLICE = 2, 3, 4, 64, 128
_THREADS = 128 * _GROUPS
_SHARED = _X_STAGES * TILE_ROWS * _SLICE + _STAGES * _GROUPS * _FEATURES * _SLICE + 8 * TILE_ROWS
# Pieces of features that a group multiplies one after the other, where a tile's rows stay in shared memory.
_TURNS = 4
_PLACE_SLICES, _PLACE_THREADS = 16, 128
_ACTIVATIONS = ("silu", "gelu")


def copy_bytes(device: Device, weight: Weight, experts: int, *, gated: bool) -> int:
    """Bytes of the copy that `store_experts` makes; 0 if products of int8 rows are not for this device or weight.

    `gated`: an expert's rows are gates before as many ups.
    """
    packed = all(part.type not in (GGMLQuantizationType.F16, GGMLQuantizationType.F32) for part in weight.parts)
    plain = packed and weight.bias is None and weight.cols % BLAS_COLS == 0 and weight.rows // experts % 2 == 0
    if not weight.int8 or "WGMMA" not in device.products or not plain:
        return 0
    return experts * _pieces(weight, experts, gated=gated) * _FEATURES * (padded_columns(weight.cols) + 4)


def _pieces(weight: Weight, experts: int, *, gated: bool) -> int:
    """Runs of _FEATURES weight rows of an expert, each with as many gates as ups."""
    features = weight.rows // experts
    return -(-features // 2 // (_FEATURES // 2)) if gated else -(-features // _FEATURES)


def store_experts(device: Device, weight: Weight, experts: int, *, gated: bool) -> None:
    """Give a weight, as upload_experts places it and `copy_bytes` accepts it, its copy as int8. Raises
    OutOfMemoryError."""
    if weight.int8_experts is None:
        weight.int8_experts = _empty(device, weight, experts, gated=gated)
    _write(device, weight, weight.int8_experts)


def _empty(device: Device, weight: Weight, experts: int, *, gated: bool) -> Int8Experts:
    features, pieces, slices = weight.rows // experts, _pieces(weight, experts, gated=gated), -(-weight.cols // _SLICE)
    # Places that no row takes are multiplied too.
    make = device.empty if pieces * _FEATURES == features else device.zeros
    values = make((experts * pieces, slices, _FEATURES * _SLICE), np.int8)
    scale = make((experts * pieces * _FEATURES,))
    return Int8Experts(values, scale, experts, features // 2 if gated else features, gated=gated)


def _write(device: Device, weight: Weight, copy: Int8Experts) -> None:
    features, (blocks, slices, _) = weight.rows // copy.experts, copy.values.shape
    most = max(1, BUFFER_BYTES // (3 * weight.cols))
    for part in weight.parts:
        for done in range(0, part.rows, most):
            count = min(most, part.rows - done)
            half = device.empty((count, weight.cols), np.float16)
            dequantise(device, part.data[done : done + count], part.type, half)
            own = to_int8(device, half)
            own_rows, first, pieces = part.rows // copy.experts, part.first // copy.experts, blocks // copy.experts
            sizes = (done, own_rows, first, features, pieces, slices)
            args = (own.values.view(np.uint8), own.scale, copy.values.view(np.uint8), copy.scale, *map(np.int32, sizes))
            grid, defines = (count, -(-slices // _PLACE_SLICES)), {"GATED": int(copy.gated)}
            device.launch("moe_prefill_int8", "place_rows", grid, (_PLACE_THREADS,), args, defines=defines)


def multiplies_int8(
    device: Device, rows: int, gate_up: Weight, down: Weight, experts: int, activation: Activation
) -> bool:
    """Whether these products serve `rows` rows with a layer's experts."""
    if activation not in _ACTIVATIONS or not moe_prefill.serves(device, rows):
        return False
    return copy_bytes(device, gate_up, experts, gated=True) > 0 and copy_bytes(device, down, experts, gated=False) > 0


def multiply_gated(
    device: Device, x: Int8Rows, gate_up: Weight, experts: int, groups: Groups, activation: Activation
) -> Array:
    """act(gate) * up of each pair: x [n, cols] -> bfloat16 (uint16) [pairs, gates]; groups of tiles of TILE_ROWS."""
    return _launch(device, x, _copy(device, gate_up, experts, gated=True), groups, 1 + ACTIVATIONS[activation])


def multiply(device: Device, x: Int8Rows, weight: Weight, experts: int, groups: Groups) -> Array:
    """Each pair's row times the weights of its expert: x [pairs, cols] -> bfloat16 (uint16) [pairs, features]."""
    return _launch(device, x, _copy(device, weight, experts, gated=False), groups, 0)


def _copy(device: Device, weight: Weight, experts: int, *, gated: bool) -> Int8Experts:
    """The copy of a weight, or one for this step."""
    copy = weight.int8_experts
    if copy is None:
        copy = _empty(device, weight, experts, gated=gated)
        _write(device, weight, copy)
    assert copy.gated == gated
    return copy


def _launch(device: Device, x: Int8Rows, copy: Int8Experts, groups: Groups, gated: int) -> Array:
    pairs, (count, slices, _) = groups.order.shape[0], copy.values.shape
    out = device.empty((pairs, copy.features), np.uint16)
    assert out.size < 1 << 32, "the kernel counts results in 32 bits"
    turns, pieces = _TURNS if slices <= _X_STAGES else 1, count // copy.experts
    sizes = (pairs // x.shape[0], turns, pieces, slices, copy.features, copy.features)
    values = copy.values.view(np.uint8), copy.scale, x.values.view(np.uint8), x.scale
    args = (*values, groups.order, groups.tiles, out, *map(np.int32, sizes))
    grid = (groups.tiles.shape[0], -(-pieces // (_GROUPS * turns)))
    defines = {"GATED": gated}
    device.launch("moe_prefill_int8", "expert_rows_int8", grid, (_THREADS,), args, defines=defines, shared=_SHARED)
    return out
