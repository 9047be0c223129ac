"""Experts for few quantised rows: one kernel for gates, ups and activation, another for downs and the weighted sum.

Between the two, quantise.cu quantises the inner rows, as a block of the first has few of the columns of a scale. Of a
single row each block of the second does so: that takes less time than a launch, but of 16 rows it would be half as many
instructions as the products.

As in matmul_int8.py, each pair of a row and a slot is computed by itself: the bits of a row do not depend on other
rows. An expert that all rows share can join as one more slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from luce.ops.matmul_int8 import INT8_TYPES, MOST_SHARED, Shape, block_shape, group_for, most_chains
from luce.ops.quantise import BLOCK, SECTION, Quantised, quantise, section_bytes
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Array, Device

if TYPE_CHECKING:
    from luce.models.spec import Activation

# The constants of kernels/moe_int8.cu.
_TILE = 16
_GATED_FEATURES, _GATED_STAGES = 8, 3
_BITS = 1
_DOWN_THREADS = 640
_BESIDE = 4 * (_TILE + 2)
# Tiles of gates and ups whose units, two for each chain, had to fit a block's shared memory when this decided on the
# chains: another number would change the bits of Q8_0.
_CHAIN_TILES = 4
# Slots that a block computes at once for the downs of several rows: more would wait for each other (H200, 16 rows,
# Q4_K: 35.4 us, and 62.7 with all nine). For a single row a block computes all slots (5.3 us, and 6.8 with three).
_DOWN_SLOTS = 3


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of `experts` gated MLPs, as the kernels read them."""

    experts: int
    #: `inner` rows for each expert, `expert_rows` apart
    gates: Array
    #: likewise
    ups: Array
    expert_rows: int
    inner: int
    #: of gates and ups
    type: GGMLQuantizationType
    cols: int
    #: [experts * rows, inner]
    downs: WeightPart

    def joins(self, other: ExpertWeights) -> bool:
        """Whether the other's matrices are of the same shapes and types, and one kernel can serve both."""
        mine = (self.inner, self.type, self.cols, self.downs.type, self.downs.rows // self.experts)
        return mine == (other.inner, other.type, other.cols, other.downs.type, other.downs.rows // other.experts)


def expert_weights(gate_up: Weight, down: Weight, experts: int) -> ExpertWeights | None:
    """The weights that upload_experts (for one expert: upload_weight) placed, as the kernels read them.

    None if the kernels cannot: a type that is not in INT8_TYPES, gates and ups of different types, partial blocks,
    biases.
    """
    if gate_up.bias is not None or down.bias is not None:
        return None
    types = {part.type for part in gate_up.parts}
    inner = gate_up.rows // experts // 2
    whole = inner % BLOCK == 0 and gate_up.rows % (2 * experts) == 0
    if len(types) != 1 or not types <= INT8_TYPES or not whole or len(down.parts) != 1:
        return None
    if down.parts[0].type not in INT8_TYPES:
        return None
    (type,) = types
    first = gate_up.parts[0].data
    if len(gate_up.parts) == 1:
        return ExpertWeights(experts, first, first[inner:], 2 * inner, inner, type, gate_up.cols, down.parts[0])
    second = gate_up.parts[1].data
    return ExpertWeights(experts, first, second, inner, inner, type, gate_up.cols, down.parts[0])


def expert_mlp(
    device: Device,
    x: Quantised,
    ids: Array,
    weights: Array,
    chosen: ExpertWeights,
    activation: Activation,
    shared: ExpertWeights | None,
    shared_gate: Array | None,
    to: Array | None = None,
) -> Array:
    """Sum over the slots s of weights[r, s] * mlp(ids[r, s])(x[r]), plus mlp(shared)(x[r]), which is multiplied by
    sigmoid(shared_gate[r]) if there is a gate: float32 [n, rows].

    x of n <= 16 rows in the group of the gates' type; ids int32 [n, k]; weights float32 [n, k]; `shared`, if any, joins
    the chosen experts; shared_gate float32 [n, 1] (any row stride). Sums of a row run over the slots in order, the
    shared expert last. With `to`, float32 [n, rows] contiguous: to += that, rounded once more, and `to`.
    """
    n, k = ids.shape
    values = _gated(device, x, ids, chosen, activation, shared)
    slots, down, rows = len(values) // n, chosen.downs, chosen.downs.rows // chosen.experts
    group = group_for(down.type)
    shape, at_once, kept = _down_shape(down.type, chosen.inner, slots, n == 1, device.lanes, device.shared_limit)
    # The kernel dereferences one of the two.
    inner = values if kept else quantise(device, values, group, padded=len(values)).data
    out = device.empty((n, rows)) if to is None else to
    gate, stride = (weights, 0) if shared_gate is None else (shared_gate, shared_gate.strides[0] // 4)
    sizes = (
        chosen.experts,
        k,
        slots,
        at_once,
        rows,
        chosen.inner,
        shared_gate is not None,
        stride,
        shape.shared,
        kept > 0,
        to is not None,
    )
    other = down if shared is None else shared.downs  # without one, the kernel does not dereference it, nor `gate`
    device.launch(
        "moe_int8",
        "expert_down_int8",
        (-(-rows // _TILE), n),
        (shape.threads,),
        (down.data, other.data, ids, weights, gate, inner, values, out, *_int32(sizes)),
        defines={"QTYPE": down.type.name, **shape.defines},
        shared=shape.shared + kept + _BESIDE * slots,
    )
    return out


def _gated(
    device: Device,
    x: Quantised,
    ids: Array,
    chosen: ExpertWeights,
    activation: Activation,
    shared: ExpertWeights | None,
) -> Array:
    """A row of `inner` columns for each row and slot: float32 [n * slots, inner]."""
    n, k = ids.shape
    slots = k if shared is None else k + 1
    shape = _gated_shape(chosen.type, chosen.cols, device.lanes)
    out = device.empty((n * slots, chosen.inner))
    other = chosen if shared is None else shared  # without one, the kernel does not dereference these
    sizes = (
        x.padded,
        chosen.experts,
        chosen.expert_rows,
        k,
        chosen.inner,
        chosen.cols,
        activation == "gelu",
    )
    device.launch(
        "moe_int8",
        "expert_gated_int8",
        (chosen.inner // _GATED_FEATURES, slots, n),
        (shape.threads,),
        (
            *(chosen.gates, chosen.ups, other.gates, other.ups, ids),
            *(x.data, out, *_int32(sizes)),
        ),
        defines={"QTYPE": chosen.type.name, **shape.defines},
        shared=shape.shared,
    )
    return out


def gated_bits(type: GGMLQuantizationType, cols: int) -> int:
    """log2 of the chains of gates and ups of a type with so many columns."""
    return most_chains(type, cols, _CHAIN_TILES, _BITS)


def down_bits(type: GGMLQuantizationType, cols: int) -> int:
    """log2 of the chains of downs."""
    return most_chains(type, cols, 1, _BITS)


@lru_cache(256)
def _gated_shape(type: GGMLQuantizationType, cols: int, lanes: int) -> Shape:
    return block_shape(type, cols, 1, 2 * _GATED_FEATURES, gated_bits(type, cols), lanes, _GATED_STAGES)


@lru_cache(256)
def _down_shape(
    type: GGMLQuantizationType, cols: int, slots: int, single: bool, lanes: int, limit: int
) -> tuple[Shape, int, int]:
    """The thread block of expert_down_int8, how many slots it computes at once, and the bytes of inner rows that it
    quantises itself: those of a `single` row, if `limit` bytes of shared memory hold all its slots, else 0. Type and
    columns give the chains."""
    bits = down_bits(type, cols)
    at_once = slots if single else min(_DOWN_SLOTS, slots)
    shape = block_shape(type, cols, 1, _TILE * at_once, bits, lanes)
    kept = slots * -(-cols // SECTION) * section_bytes(1, group_for(type))
    if single and shape.threads <= _DOWN_THREADS and shape.shared + kept + _BESIDE * slots <= limit:
        return shape, slots, kept
    while shape.threads > _DOWN_THREADS or shape.shared + _BESIDE * slots > MOST_SHARED:
        at_once -= 1
        shape = block_shape(type, cols, 1, _TILE * at_once, bits, lanes)
    return shape, at_once, 0


def _int32(sizes: Sequence[int]) -> tuple[np.int32, ...]:
    return tuple(np.int32(size) for size in sizes)
