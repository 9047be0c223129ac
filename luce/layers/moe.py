"""Mixture of experts: the chosen experts' gated MLPs, weighted, and a shared MLP in models that have one."""

from __future__ import annotations

from gguf import GGMLQuantizationType

from luce.layers.mlp import GatedMLPLayer
from luce.layers.routed_experts import OffloadedExperts, RoutedExperts
from luce.models.spec import MoE
from luce.ops import matmul_halves, moe_rows
from luce.ops.activation import FUSED
from luce.ops.int8_rows import Int8Rows, to_int8
from luce.ops.matmul import FEW_ROWS, MANY_ROWS, int8_group, matmul, matmul_row, sole_int8_group
from luce.ops.matmul_prefill import is_long, multiplies_int8
from luce.ops.moe import RoutingOptions, add_shared, combine, expert_invariant_rows, route
from luce.ops.moe_int8 import expert_mlp, expert_weights
from luce.ops.moe_router import RowRouter, norm_route, row_router
from luce.ops.moe_rows import expert_mlp_rows
from luce.ops.norm import Unnormed
from luce.ops.quantise import Quantised, quantise
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device

#: from so many rows on, a prompt's products with the router leave the shared MLP's gate out where a library multiplies:
#: it has tiles of features, and a 257th feature would be one tile more
GATE_APART = 1024


class MoELayer:
    """The layer; `router` is ffn_gate_inp, with the shared MLP's gate as a last row if the spec has one."""

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = False

    def __init__(
        self,
        device: Device,
        spec: MoE,
        *,
        bias: Array | None,
        expert_scale: Array | None,
        router: Weight,
        experts: RoutedExperts | OffloadedExperts,
        shared: GatedMLPLayer | None,
    ) -> None:
        self._device = device
        self._spec = spec
        self._routing = RoutingOptions(
            spec.used, spec.gating, bias, spec.normalise, spec.scale, expert_scale, spec.groups
        )
        self._router = router
        self._row_router: RowRouter | None = None
        #: for many rows, the router's rows of the experts and that of the gate
        self._apart: tuple[Weight, Weight] | None = None
        plain = router.bias is None and all(part.type == GGMLQuantizationType.F32 for part in router.parts)
        library = device.blas and not device.host and not matmul_halves.serves(device)
        if spec.shared_gate and plain and library:
            self._apart = router.cut(range(spec.experts)), router.cut(range(spec.experts, spec.experts + 1))
        self._experts = experts
        self._shared = shared
        self._int8 = self._joined = None
        #: up to how many rows the bits of a row of the experts' results do not depend on the number of rows
        self.invariant_rows = expert_invariant_rows(experts.device)
        if isinstance(experts, OffloadedExperts):
            #: the weight that decides in which form the layer gets its input
            self.input_weight = router
            return
        self.input_weight = experts.gate_up
        plain = device.host or spec.activation not in FUSED
        self._int8 = None if plain else expert_weights(experts.gate_up, experts.down, spec.experts)
        other = None if plain or shared is None else expert_weights(shared.input_weight, shared.down, 1)
        # One launch for the experts and the shared MLP: two fewer, and no wait for their results.
        joins = self._int8 is not None and other is not None and self._int8.joins(other)
        self._joined = other if joins else None
        group = int8_group(device, 1, self.input_weight)
        # norm_route writes the row in one quantised form, which the shared MLP then has to read too.
        reads = shared is None or joins or sole_int8_group(device, 1, shared.input_weight) == group
        if self._int8 is not None and reads:
            self._row_router = row_router(device, router, spec.experts)
        if self._int8 is not None and moe_rows.serves(device):
            self.invariant_rows = MANY_ROWS

    @property
    def shared_joins(self) -> bool:
        """Whether up to `invariant_rows` rows are multiplied with the shared MLP as with one more expert."""
        return self._joined is not None

    def _multiplies_few(self, rows: int) -> bool:
        """Whether so many rows are multiplied as few are, with their bits."""
        return rows <= FEW_ROWS or (self.invariant_rows == MANY_ROWS and not is_long(self._device, rows))

    def adds(self, rows: int) -> bool:
        """Whether the result of so many rows can be added to an array."""
        alone = self._shared is None or self._joined is not None
        return self._int8 is not None and alone and int8_group(self._device, rows, self.input_weight) > 0

    def norms_row(self, rows: int) -> bool:
        """Whether the layer takes so many rows as Unnormed."""
        return rows == 1 and self._row_router is not None

    def __call__(
        self, y: Array | Quantised | Unnormed, routed_by: Array | None = None, to: Array | None = None
    ) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]; the router reads `routed_by`, or y if that is None. y may
        be Unnormed where `norms_row` is true, and then the router reads it.

        With `to`, float32 [rows, hidden] contiguous, where `adds` is true: to += that, and `to`.
        """
        device, spec = self._device, self._spec
        int8 = self._int8 if self._multiplies_few(y.shape[0]) else None
        experts = self._experts
        prompt_int8 = isinstance(experts, RoutedExperts) and experts.multiplies_int8(y.shape[0])
        if isinstance(y, Unnormed):
            assert self._row_router is not None
            group = int8_group(device, 1, self.input_weight)
            y, routing, shared_gate = norm_route(device, y, self._row_router, group, self._routing)
        else:
            scores, shared_gate = self._scores(y if routed_by is None else routed_by)
            multiplies = isinstance(experts, RoutedExperts) and int8 is None and not prompt_int8
            routing = route(device, scores, self._routing, multiplies=multiplies)
        if isinstance(experts, OffloadedExperts):
            finish = experts.begin(y.x if isinstance(y, Quantised) else y, routing)
            # The device computes the shared MLP while the CPU computes the experts.
            shared = None if self._shared is None else self._shared(y)
            out = finish()
        elif int8 is not None and y.shape[0]:
            joined, gate = self._joined, None if self._joined is None else shared_gate
            chosen = routing.ids, routing.weights, int8, spec.activation, joined, gate
            if group := int8_group(device, y.shape[0], self.input_weight):
                x = y if isinstance(y, Quantised) else quantise(device, y, group)
                out = expert_mlp(device, x, *chosen, to)
            else:
                out = expert_mlp_rows(device, y.x if isinstance(y, Quantised) else y, *chosen)
            shared = None if self._shared is None or joined is not None else self._shared(y)
        else:
            rows: Array | Int8Rows = y.x if isinstance(y, Quantised) else y
            if prompt_int8:
                rows = to_int8(device, rows)
            results = experts.results(rows, routing)
            shared = None if self._shared is None else self._shared(self._shared_rows(y, rows))
            return combine(device, results, routing.weights, shared, shared_gate)
        if shared is not None:
            add_shared(device, out, shared, shared_gate)
        return out

    def _shared_rows(self, y: Array | Quantised, rows: Array | Int8Rows) -> Array | Quantised | Int8Rows:
        """What the shared MLP reads: the rows of the experts, if it multiplies int8 too."""
        assert self._shared is not None
        both = isinstance(rows, Int8Rows) and multiplies_int8(self._device, y.shape[0], self._shared.input_weight)
        return rows if both else y

    def _scores(self, x: Array | Quantised) -> tuple[Array, Array | None]:
        """Of the experts, and the shared MLP's gate."""
        if self._apart is not None and not isinstance(x, Quantised) and x.shape[0] >= GATE_APART:
            experts, gate = self._apart
            return matmul(self._device, x, experts), matmul_row(self._device, x, gate)
        scores, count = matmul(self._device, x, self._router), self._spec.experts
        return scores[:, :count], scores[:, count:] if self._spec.shared_gate else None
