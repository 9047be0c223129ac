"""Mixture of experts: routing, products with experts' weights, and the weighted sum of their results.

A row has k slots, one per chosen expert. As in matmul, few rows and many rows use different kernels. Up to FEW_ROWS
rows, one launch computes each pair of a row and a slot by itself. More rows are sorted by expert on the device and
rounded to fp16 (matmul_prefill.py), so that each tile of rows reads an expert's weights once; for a prompt's rows some
devices have kernels of their own (moe_prefill.py, and on request moe_prefill_int8.py). The bits of a result depend
neither on other rows nor on the rows that share its expert, except that they change between FEW_ROWS and FEW_ROWS + 1
rows, and may where moe_prefill.py begins; on the host they may change once an expert has more than FEW_ROWS rows.
Nothing waits for the device: shapes alone determine the grids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops import moe_prefill
from luce.ops.activation import add, add_gated, gated_activation
from luce.ops.fp16 import Fp16Rows, to_fp16
from luce.ops.matmul import FEW_ROWS, MANY_ROWS, matmul
from luce.ops.matmul_packed import multiply_experts
from luce.ops.matmul_prefill import TILE_FEATURES, TILE_ROWS, TILE_THREADS
from luce.ops.weight import Weight, WeightPart
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

if TYPE_CHECKING:
    from luce.models.spec import Activation, ExpertGroups, Gating

#: most experts of a layer
MAX_EXPERTS = 512
#: most experts chosen for a row
MAX_CHOSEN = 16
#: most groups of experts: lanes of the narrowest wave
MAX_GROUPS = 32
# The constants of moe.cu and moe_matmul.cu.
_GROUP_THREADS = 512
_WAVES, _FEATURES = 4, 2
_COMBINE_THREADS, _COMBINE_EACH = 256, 4


@dataclass(frozen=True)
class Groups:
    """Pairs of a row and a slot, sorted by expert, in tiles of at most `tile_rows`."""

    #: int32 [pairs]: row * k + slot
    order: Array
    #: int32 [tiles, 3]: an expert, the first place in `order`, and the number of pairs in the tile, 0 if it is unused
    tiles: Array
    tile_rows: int


@dataclass(frozen=True)
class RoutingOptions:
    """How the experts of a row follow from its logits.

    p is the softmax over all experts or the sigmoid of each, in float32. The experts with the largest p + bias are
    chosen; on ties the lowest number, NaN last. A weight is p without the bias, divided by the sum over the chosen
    experts if `normalise`, times `scale`, times expert_scale[id]. With `groups` (DeepSeek-V3, arXiv 2412.19437, section
    2.1.2) only experts of the best groups are chosen.
    """

    top_k: int
    gating: Gating
    #: float32 [experts]; None: 0
    bias: Array | None = None
    normalise: bool = True
    scale: float = 1.0
    #: float32 [experts]; None: 1
    expert_scale: Array | None = None
    groups: ExpertGroups | None = None

    def check(self, experts: int) -> None:
        """Raise ValueError for more than MAX_EXPERTS experts, a top_k beyond MAX_CHOSEN or the number of experts that
        can be chosen, or groups that are too many or of unequal size."""
        top_k, groups = self.top_k, self.groups
        if experts > MAX_EXPERTS or not 0 < top_k <= min(experts, MAX_CHOSEN):
            raise ValueError(
                f"route: {top_k} of {experts} experts; at most {MAX_CHOSEN} of at most {MAX_EXPERTS} can be chosen"
            )
        if groups is not None:
            size, fits = experts // groups.count, 0 < groups.used <= groups.count <= MAX_GROUPS
            if not fits or experts % groups.count or size < 2 or top_k > groups.used * size:
                raise ValueError(f"route: {top_k} of {experts} experts in {groups.used} of {groups.count} groups")

    @property
    def arguments(self) -> tuple[np.int32 | np.float32, ...]:
        """The last arguments of kernels that choose experts."""
        groups = self.groups
        return (
            np.int32(self.top_k),
            np.int32(self.gating == "sigmoid"),
            np.int32(self.bias is not None),
            np.int32(self.normalise),
            np.int32(self.expert_scale is not None),
            np.float32(self.scale),
            np.int32(0 if groups is None else groups.count),
            np.int32(0 if groups is None else groups.used),
            np.int32(groups is not None and groups.score == "two best"),
        )


@dataclass(frozen=True)
class Routing:
    """The experts of each row, best score first."""

    #: int32 [n, k], without duplicates in a row
    ids: Array
    #: float32 [n, k]
    weights: Array
    #: for more than FEW_ROWS rows on a GPU
    groups: Groups | None


def route(device: Device, logits: Array, options: RoutingOptions, *, multiplies: bool = True) -> Routing:
    """Choose experts for each row of logits float32 [n, experts] (any row stride).

    `multiplies`: whether this device multiplies with the experts' weights, for which it groups many rows. Raises
    ValueError as `options.check`.
    """
    n, experts = logits.shape
    options.check(experts)
    ids, weights = device.empty((n, options.top_k), np.int32), device.empty((n, options.top_k))
    if isinstance(device, HostDevice):
        device.call_host(partial(_host_route, options), logits, ids, weights)
        return Routing(ids, weights, None)
    if n:
        args = (
            logits,
            # Without bias or scales, pointers that the kernel does not dereference.
            logits if options.bias is None else options.bias,
            logits if options.expert_scale is None else options.expert_scale,
            ids,
            weights,
            np.int32(logits.strides[0] // 4),
            np.int32(experts),
            *options.arguments,
        )
        device.launch("moe", "route", (n,), (device.lanes,), args)
    return Routing(ids, weights, group(device, ids, experts) if multiplies else None)


def group(device: Device, ids: Array, experts: int) -> Groups | None:
    """The pairs of ids int32 [n, k], each in [0, experts), by expert; None for few rows and on the host."""
    n = len(ids)
    if isinstance(device, HostDevice) or n <= FEW_ROWS:
        return None
    return group_tiles(device, ids, experts, moe_prefill.TILE_ROWS if moe_prefill.serves(device, n) else TILE_ROWS)


def group_tiles(device: Device, ids: Array, experts: int, tile_rows: int) -> Groups:
    """The pairs of ids int32 [n, k], each in [0, experts), by expert, in tiles of up to `tile_rows`, on a GPU."""
    pairs = ids.size
    # Upper bound of the tiles: each expert with pairs leaves at most one tile partly filled.
    tiles = (pairs + (tile_rows - 1) * min(experts, pairs)) // tile_rows
    groups = Groups(device.empty(pairs, np.int32), device.empty((tiles, 3), np.int32), tile_rows)
    args = (ids, groups.order, groups.tiles, np.int32(pairs), np.int32(tile_rows), np.int32(tiles))
    device.launch("moe", "group_pairs", (experts,), (_GROUP_THREADS,), args, shared=4 * experts)
    return groups


def expert_invariant_rows(device: Device) -> int:
    """As invariant_rows of luce.ops.matmul, of expert_matmul."""
    return MANY_ROWS if isinstance(device, CpuDevice) else FEW_ROWS


def expert_matmul(device: Device, x: Array, weight: Weight, experts: int, routing: Routing) -> Array:
    """Each row times the weights of its experts, transposed, plus the experts' biases (float32 [experts, rows]) if the
    weight has them: float32 [n, k, rows] with rows = weight.rows / experts.

    x float32 [n, cols] (the same for all slots) or [n, k, cols], with any row and slot strides; weight as
    upload_experts places it. The parts' results lie side by side in each slot. Sums are accumulated in float32; of more
    than FEW_ROWS rows on a GPU, x and weights are rounded to fp16 first. Raises ValueError for shapes that disagree.
    """
    ids = routing.ids
    n, k = ids.shape
    if x.shape[-1] != weight.cols:
        raise ValueError(f"expert_matmul: x has {x.shape[-1]} features, the weight {weight.cols}")
    if x.shape[:-1] not in ((n,), (n, k)):
        raise ValueError(f"expert_matmul: x is for {list(x.shape[:-1])} rows and slots, ids for {[n, k]}")
    if weight.rows % experts:
        raise ValueError(f"expert_matmul: {weight.rows} rows of weights are not of {experts} experts")
    out = device.empty((n, k, weight.rows // experts))
    if isinstance(device, HostDevice):
        device.call_host(partial(_host_product, device, weight), x, ids, out)
    elif routing.groups is not None:
        _many(device, x, weight, experts, ids, routing.groups, out)
    elif n:
        _few(device, x, weight, experts, ids, out)
    if weight.bias is not None and n:
        add_expert_bias(device, out, weight.bias, ids)
    return out


def gated_experts(
    device: Device, x: Array, gate_up: Weight, experts: int, routing: Routing, activation: Activation
) -> Array:
    """act(gate) * up of each row and slot: x float32 [n, cols], gate_up with an expert's gates before as many ups ->
    float32 [n * k, gates]."""
    groups = routing.groups
    if groups is not None and moe_prefill.serves(device, len(x)):
        gated = moe_prefill.multiply_gated(device, x, gate_up, experts, groups, activation)
        if gated is not None:
            return gated
    both = expert_matmul(device, x, gate_up, experts, routing)
    both = both.reshape(-1, both.shape[2])
    inner = both.shape[1] // 2
    return gated_activation(device, both[:, :inner], both[:, inner:], activation)


def add_expert_bias(device: Device, y: Array, bias: Array, ids: Array) -> None:
    """y[r, s] += bias[ids[r, s]] in place: y float32 [n, k, rows] contiguous, bias float32 [experts, rows]."""
    n, k, rows = y.shape
    if isinstance(device, HostDevice):
        device.call_host(_add_expert_bias, y, bias, ids)
        return
    grid = (n * k, -(-rows // _COMBINE_THREADS))
    device.launch("moe", "add_expert_bias", grid, (_COMBINE_THREADS,), (y, bias, ids, np.int32(rows)))


def combine(
    device: Device, y: Array, weights: Array, shared: Array | None = None, shared_gate: Array | None = None
) -> Array:
    """Sum over the slots, in their order, of weights[r, s] * y[r, s], plus shared[r], which is multiplied by
    sigmoid(shared_gate[r]) if there is a gate.

    y float32 [n, k, rows], or on a GPU bfloat16 (uint16) with an even number of rows; weights float32 [n, k], shared
    float32 [n, rows] contiguous, shared_gate float32 [n, 1] (any row stride) -> float32 [n, rows].
    """
    n, k, rows = y.shape
    if isinstance(device, HostDevice):
        out = device.compute(_host_combine, (n, rows), y, weights)
        if shared is not None:
            add_shared(device, out, shared, shared_gate)
        return out
    out = device.empty((n, rows))
    if n:
        # The kernel does not dereference what there is none of.
        more = weights if shared is None else shared
        gate, stride = (weights, 0) if shared_gate is None else (shared_gate, shared_gate.strides[0] // 4)
        sizes = (np.int32(k), np.int32(rows), np.int32(shared is not None), np.int32(shared_gate is not None))
        grid = (n, -(-rows // (_COMBINE_EACH * _COMBINE_THREADS)))
        args = (y, weights, more, gate, out, *sizes, np.int64(stride))
        kernel = "combine" if y.dtype == np.float32 else "combine_bf16"
        device.launch("moe", kernel, grid, (_COMBINE_THREADS,), args)
    return out


def add_shared(device: Device, out: Array, shared: Array, shared_gate: Array | None) -> None:
    """out += shared, which is multiplied by sigmoid(shared_gate) if there is a gate, in place, as in `combine`."""
    if shared_gate is None:
        add(device, out, shared)
    else:
        add_gated(device, out, shared, shared_gate)


def _few(device: Device, x: Array, weight: Weight, experts: int, ids: Array, out: Array) -> None:
    n, k = ids.shape
    x_row, x_slot = x.strides[0] // 4, x.strides[1] // 4 if x.ndim == 3 else 0
    for part in weight.parts:
        rows, first = part.rows // experts, part.first // experts
        grid, sizes, defines = _plan(n * k, k, rows, weight.cols, x_row, x_slot, out.shape[2], first, part.type)
        args = (part.data, x, ids, out, *sizes)
        device.launch("moe_matmul", "expert_vec", grid, (_WAVES * device.lanes,), args, defines=defines)


# As in matmul: a decode step launches the same few shapes repeatedly.
@lru_cache(4096)
def _plan(
    pairs: int,
    k: int,
    rows: int,
    cols: int,
    x_row: int,
    x_slot: int,
    out_stride: int,
    first: int,
    type: GGMLQuantizationType,
) -> tuple[tuple[int, int], tuple[np.int32, ...], dict[str, int | str]]:
    """Grid, scalar arguments and defines of one part's launch of expert_vec."""
    sizes = tuple(np.int32(v) for v in (k, rows, cols, x_row, x_slot, out_stride, first))
    return (-(-rows // _FEATURES), pairs), sizes, {"QTYPE": type.name}


def _many(device: Device, x: Array, weight: Weight, experts: int, ids: Array, groups: Groups, out: Array) -> None:
    share = out.shape[1] if x.ndim == 2 else 1
    prompt = moe_prefill.serves(device, len(out))
    tiled: Groups | None = None if prompt else groups
    fp16: Fp16Rows | None = None
    arranged: dict[GGMLQuantizationType, Fp16Rows] = {}
    for part in weight.parts:
        if prompt and part.type != GGMLQuantizationType.F32:
            own = arranged.get(part.type) or moe_prefill.arrange(device, x, part.type)
            arranged[part.type] = own
            moe_prefill.multiply(device, own, part, experts, groups, share, out.reshape(-1, out.shape[2]))
            continue
        tiled = tiled or group_tiles(device, ids, experts, TILE_ROWS)
        if part.type == GGMLQuantizationType.F32:
            # These weights multiply x in float32. The kernel does not dereference the scale.
            values, scale = x.reshape(-1, weight.cols), out
        else:
            fp16 = fp16 or to_fp16(device, x)
            values, scale = fp16.values, fp16.scale
        features, stride = part.rows // experts, values.strides[0] // values.itemsize
        sizes = (share, features, weight.cols, stride, out.shape[2], part.first // experts)
        device.launch(
            "moe_matmul",
            "expert_tile",
            (tiled.tiles.shape[0], -(-features // TILE_FEATURES)),
            (TILE_THREADS,),
            (part.data, values, scale, tiled.order, tiled.tiles, out, *(np.int32(size) for size in sizes)),
            defines={"QTYPE": part.type.name},
        )


def _add_expert_bias(y: Array, bias: Array, ids: Array) -> None:
    y += bias[ids]


def _host_combine(y: Array, weights: Array) -> Array:
    out = weights[:, 0, None] * y[:, 0]
    for slot in range(1, y.shape[1]):
        out += weights[:, slot, None] * y[:, slot]
    return out


def _host_route(options: RoutingOptions, logits: Array, ids: Array, weights: Array) -> None:
    if options.gating == "sigmoid":
        # exp(-x) of a very negative x is infinite and gives the right 0.
        with np.errstate(over="ignore"):
            p = 1 / (1 + np.exp(-logits))
    else:
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
    score = p if options.bias is None else p + options.bias
    if options.groups is not None:
        score = _within_groups(score, options.groups)
    # Stable, so that the lower number comes first on ties; NaN sorts last.
    ids[...] = np.argsort(-score, axis=1, kind="stable")[:, : ids.shape[1]]
    weights[...] = np.take_along_axis(p, ids, axis=1)
    if options.normalise:
        weights /= weights.sum(axis=1, keepdims=True)
    weights *= np.float32(options.scale)
    if options.expert_scale is not None:
        weights *= options.expert_scale[ids]


def _within_groups(score: Array, groups: ExpertGroups) -> Array:
    """The scores, -inf outside the best groups: float32 [n, experts]."""
    runs = score.reshape(len(score), groups.count, -1)
    best = np.sort(np.where(np.isnan(runs), -np.inf, runs), axis=2)[:, :, ::-1]
    total = best[:, :, 0] + best[:, :, 1] if groups.score == "two best" else best[:, :, 0]
    chosen = np.argsort(-total, axis=1, kind="stable")[:, : groups.used]
    result = np.full_like(runs, -np.inf)
    np.put_along_axis(result, chosen[:, :, None], np.take_along_axis(runs, chosen[:, :, None], axis=1), axis=1)
    return result.reshape(score.shape)


def _host_product(device: HostDevice, weight: Weight, x: Array, ids: Array, out: Array) -> None:
    """One product per expert over its pairs; up to FEW_ROWS pairs by one gemv each, so their bits are independent."""
    k, rows = out.shape[1:]
    results = out.reshape(-1, rows)
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    if isinstance(device, CpuDevice):
        chosen, counts = np.unique(flat, return_counts=True)
        own = x[order // k] if x.ndim == 2 else x[order // k, order % k]
        if len(own):
            experts = weight.rows // rows
            results[order] = multiply_experts(device, own, weight, experts, chosen, counts)
        return
    for pairs in np.split(order, np.flatnonzero(np.diff(flat[order])) + 1) if len(flat) else ():
        part = WeightPart(weight.matrix[flat[pairs[0]]], GGMLQuantizationType.F32, 0, rows)
        own = x[pairs // k] if x.ndim == 2 else x[pairs // k, pairs % k]
        results[pairs] = matmul(device, own, Weight(rows, weight.cols, (part,)))
