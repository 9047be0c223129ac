"""Experts for more than 16 quantised rows, where tensor cores multiply int8 (kernels/moe_rows.cu).

The sums are those of few rows (moe_int8.py), so a row has the bits that it has alone. Pairs of a row and a slot are
sorted by expert, and each expert's weights are read once for a tile of its pairs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.matmul_int8 import Shape, group_for, tile_shape
from luce.ops.moe import combine, group_tiles
from luce.ops.moe_int8 import ExpertWeights, down_bits, gated_bits
from luce.ops.quantise import quantise_pairs
from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.models.spec import Activation

# The constants of kernels/moe_rows.cu: weight rows of a tile and tiles of a block, columns of a unit.
_TILE, _TILES, _UNIT_COLS = 16, 2, 256
# Rows of a tile: few where an expert has at most _FEW_PAIRS pairs of a step of _STEP_ROWS rows, if all have as many. A
# model has one of the two, so that no number of rows compiles another kernel.
_SMALL_TILE, _LARGE_TILE, _STEP_ROWS, _FEW_PAIRS = 8, 16, 64, 4


def serves(device: Device) -> bool:
    """Whether the device multiplies so."""
    return "BF16" in device.products


def expert_mlp_rows(
    device: Device,
    x: Array,
    ids: Array,
    weights: Array,
    chosen: ExpertWeights,
    activation: Activation,
    shared: ExpertWeights | None,
    shared_gate: Array | None,
) -> Array:
    """As luce.ops.moe_int8.expert_mlp, of x float32 [n, cols] (any row stride) with n > 0, and with its bits."""
    n, k = ids.shape
    tile_rows = _SMALL_TILE if k * _STEP_ROWS <= _FEW_PAIRS * chosen.experts else _LARGE_TILE
    groups = group_tiles(device, ids, chosen.experts, tile_rows)
    own = len(groups.tiles)
    tiles = own + (0 if shared is None else -(-n // tile_rows))
    rows = quantise_pairs(device, x, group_for(chosen.type), groups.order, groups.tiles, k, tiles, tile_rows)
    # Without a shared expert, the kernels do not dereference its weights, nor shared_out.
    other = chosen if shared is None else shared
    inner = device.empty((tiles * tile_rows, chosen.inner))
    shape = _shape(chosen.type, tile_rows, chosen.cols, gated_bits(chosen.type, chosen.cols))
    sizes = (own, chosen.experts, chosen.expert_rows, chosen.inner, chosen.cols, activation == "gelu")
    device.launch(
        "moe_rows",
        "expert_gated_rows",
        (chosen.inner // _TILE, tiles),
        (shape.threads,),
        (
            *(chosen.gates, chosen.ups, other.gates, other.ups, groups.tiles, rows.data, inner),
            *(np.int32(size) for size in sizes),
        ),
        defines={"QTYPE": chosen.type.name, "ROWS": tile_rows, "CHAINS": 1 << shape.chain_bits, "GATED": 1},
        shared=shape.shared,
    )
    down = chosen.downs
    rows = quantise_pairs(device, inner, group_for(down.type), groups.order, groups.tiles, 0, tiles, tile_rows)
    features = down.rows // chosen.experts
    out = device.empty((n, k, features))
    shared_out = out if shared is None else device.empty((n, features))
    shape = _shape(down.type, tile_rows, chosen.inner, down_bits(down.type, chosen.inner))
    device.launch(
        "moe_rows",
        "expert_down_rows",
        (-(-features // (_TILE * _TILES)), tiles),
        (shape.threads,),
        (
            *(down.data, other.downs.data, groups.order, groups.tiles, rows.data, out, shared_out),
            *(np.int32(size) for size in (own, chosen.experts, n, features, chosen.inner)),
        ),
        defines={"QTYPE": down.type.name, "ROWS": tile_rows, "CHAINS": 1 << shape.chain_bits, "GATED": 0},
        shared=shape.shared,
    )
    return combine(device, out, weights, None if shared is None else shared_out, shared_gate)


@lru_cache(64)
def _shape(type: GGMLQuantizationType, tile_rows: int, cols: int, bits: int) -> Shape:
    # A single step fills no second stage.
    stages = 1 if cols <= _UNIT_COLS << bits else 2
    return tile_shape(type, tile_rows, bits, _TILES, shared_x=True, stages=stages)
