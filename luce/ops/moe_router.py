"""One row's norm, its product with a router and the choice of its experts in one launch (kernels/moe_router.cu), with
the bits of the launches that it replaces: on CUDA devices that multiply matrices by four waves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.moe import MAX_EXPERTS, Routing, RoutingOptions
from luce.ops.norm import Unnormed
from luce.ops.quantise import BLOCK, SECTION, Quantised, empty_quantised
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device

# The constants of kernels/moe_router.cu.
_WAVES, _FEATURES = 4, 2
_MOST_COLUMNS = 2048
_MOST_EXPERTS = (256, MAX_EXPERTS)
_EMPTY_SLOT = -1


@dataclass(frozen=True)
class RowRouter:
    """A router for single rows, and memory by which blocks of a launch meet. The next launch finds it as this one
    leaves it, so all launches with it are of one stream."""

    part: WeightPart
    cols: int
    experts: int
    #: int32 [experts]
    slots: Array


def row_router(device: Device, router: Weight, experts: int) -> RowRouter | None:
    """The router, whose first rows are those of `experts`, for `norm_route`; None where that cannot serve it."""
    if "WGMMA" not in device.products or router.bias is not None or len(router.parts) != 1:
        return None
    (part,) = router.parts
    fits = part.type == GGMLQuantizationType.F32 and router.cols % BLOCK == 0 and router.cols <= _MOST_COLUMNS
    if not fits or experts > MAX_EXPERTS:
        return None
    return RowRouter(part, router.cols, experts, device.upload(np.full(experts, _EMPTY_SLOT, np.int32)))


def norm_route(
    device: Device, x: Unnormed, router: RowRouter, group: int, options: RoutingOptions
) -> tuple[Quantised, Routing, Array | None]:
    """rms_norm of a row as int8 in `group`, its experts as luce.ops.moe.route chooses them, and its products with the
    router's rows behind those of the experts: float32 [1, rows], None without such.

    Raises ValueError as `route`.
    """
    experts = router.experts
    options.check(experts)
    others = router.part.rows - experts
    quantised = empty_quantised(device, 1, router.cols, group)
    ids, weights = device.empty((1, options.top_k), np.int32), device.empty((1, options.top_k))
    gate = device.empty((1, others)) if others else None
    args = (
        router.part.data.view(np.float32),
        x.x,
        x.weight,
        np.float32(x.eps),
        router.slots,
        gate,
        quantised.data,
        np.int32(group == SECTION),
        options.bias,
        options.expert_scale,
        ids,
        weights,
        np.int32(router.part.rows),
        np.int32(router.cols),
        np.int32(experts),
        *options.arguments,
    )
    grid, block = (-(-router.part.rows // _FEATURES),), (_WAVES * device.lanes,)
    defines = {"EXPERTS": next(most for most in _MOST_EXPERTS if experts <= most)}
    device.launch("moe_router", "norm_route", grid, block, args, defines=defines)
    return quantised, Routing(ids, weights, None), gate
