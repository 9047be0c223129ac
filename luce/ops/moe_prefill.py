"""Products of a prompt's rows with the weights of the experts chosen for them, where four waves multiply together.

For rows of long prompts, on a device with such products (WGMMA), kernels/moe_prefill.cu replaces the tile kernel of
moe_matmul.cu. Both round x to fp16, each row with its scale, and weights to fp16, and add in the same order. The kernel
takes x in an arrangement of its own, which depends on the weights' type. Gates and ups of one type give act(gate) * up
without being written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.fp16 import ACTIVATIONS, BLOCK_ROWS, Fp16Rows, empty_fp16
from luce.ops.matmul_prefill import is_long
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.models.spec import Activation
    from luce.ops.moe import Groups

# The constants of kernels/moe_prefill.cu.
#: most rows of a tile
TILE_ROWS = 96
_GROUPS, _STAGES, _SLICE = 4, 4, 128
_THREADS = 128 * _GROUPS
_SHARED = _STAGES * 2 * _SLICE * TILE_ROWS + 12 * TILE_ROWS
# Features that a block multiplies at a time, and how often where a tile's rows stay in shared memory. H200, 256 experts
# of 35B A3B, downs in Q6_K 220, 199, 188 us with 2, 4, 8, and 237, 221, 238 where experts have uneven numbers of rows.
_FEATURES, _GATED_FEATURES, _TURNS = 64 * _GROUPS, 32 * _GROUPS, 4


def serves(device: Device, rows: int) -> bool:
    """Whether these products serve a step of so many rows, as those of a library do for dense weights."""
    return "WGMMA" in device.products and is_long(device, rows)


def arrange(device: Device, x: Array, type: GGMLQuantizationType) -> Fp16Rows:
    """Rows of x, float32 [n, cols] or [n, slots, cols] with any strides but the last, as `luce.ops.fp16.to_fp16` has
    them, but arranged for weights of a type."""
    n, cols = x.shape[0], x.shape[-1]
    slots, x_slot = (x.shape[1], x.strides[1] // 4) if x.ndim == 3 else (1, 0)
    rows = empty_fp16(device, n * slots, cols)
    padded = rows.values.shape[1]
    sizes = (np.int32(size) for size in (n * slots, slots, cols, padded))
    args = (x, rows.values, rows.scale, *sizes, np.int64(x.strides[0] // 4), np.int64(x_slot))
    grid, threads = (-(-n * slots // BLOCK_ROWS),), (BLOCK_ROWS * device.lanes,)
    defines = {"QTYPE": type.name, "GATED": 0}
    device.launch("moe_prefill", "arrange_rows", grid, threads, args, defines=defines)
    return rows


def multiply(
    device: Device, x: Fp16Rows, part: WeightPart, experts: int, groups: Groups, share: int, out: Array
) -> None:
    """out[pair, part.first // experts + j] = x[pair / share] times row j of the pair's expert.

    x arranged for the part's type, which is not F32; groups of tiles of TILE_ROWS; out float32 [pairs, features].
    """
    rows, first = part.rows // experts, part.first // experts
    _launch(device, x, part.data, part.data, part.type, (rows, rows), groups, share, 0, out[:, first : first + rows])


def multiply_gated(
    device: Device, x: Array, gate_up: Weight, experts: int, groups: Groups, activation: Activation
) -> Array | None:
    """act(gate) * up of each pair: x float32 [n, cols], gate_up an expert's gates before as many ups -> float32 [pairs,
    gates]. None if the weight's parts are of two types, or F32, or it has biases, or for another activation."""
    types = {part.type for part in gate_up.parts}
    inner = gate_up.rows // experts // 2
    plain = gate_up.bias is None and activation in ("silu", "gelu")
    if not plain or len(types) != 1 or GGMLQuantizationType.F32 in types or gate_up.rows % (2 * experts):
        return None
    (type,), parts = types, gate_up.parts
    if len(parts) == 1:
        gates, ups, between = parts[0].data, parts[0].data[inner:], 2 * inner
    else:
        gates, ups, between = parts[0].data, parts[1].data, inner
    if len(parts) > 2 or len(gates) != experts * between:
        return None
    pairs = groups.order.shape[0]
    out = device.empty((pairs, inner))
    rows = arrange(device, x, type)
    _launch(device, rows, gates, ups, type, (inner, between), groups, pairs // len(x), 1 + ACTIVATIONS[activation], out)
    return out


def _launch(
    device: Device,
    x: Fp16Rows,
    weight: Array,
    ups: Array,
    type: GGMLQuantizationType,
    rows: tuple[int, int],
    groups: Groups,
    share: int,
    gated: int,
    out: Array,
) -> None:
    """`rows`: features of an expert, and rows from one expert to the next."""
    padded = x.values.shape[1]
    assert len(out) * out.strides[0] < 1 << 34, "the kernel counts results in 32 bits"
    turns = 1 if gated or padded > _STAGES * _SLICE else _TURNS
    features = (_GATED_FEATURES if gated else _FEATURES) * turns
    sizes = (share, *rows, turns, x.cols, padded, out.strides[0] // 4)
    args = (weight, ups, x.values, x.scale, groups.order, groups.tiles, out, *(np.int32(size) for size in sizes))
    grid = (groups.tiles.shape[0], -(-rows[0] // features))
    defines = {"QTYPE": type.name, "GATED": gated}
    device.launch("moe_prefill", "expert_rows", grid, (_THREADS,), args, defines=defines, shared=_SHARED)
