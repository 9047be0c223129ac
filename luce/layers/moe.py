"""Mixture of experts: the chosen experts' gated MLPs, weighted, and a shared MLP in models that have one."""

from __future__ import annotations

from luce.layers.mlp import GatedMLPLayer
from luce.models.spec import MoE
from luce.ops.activation import FUSED, add, add_gated, gated_activation
from luce.ops.matmul import int8_group, matmul
from luce.ops.moe import Routing, combine, expert_matmul, route
from luce.ops.moe_int8 import expert_mlp, expert_weights
from luce.ops.quantise import Quantised, quantise
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


class MoELayer:
    """The layer; `router` is ffn_gate_inp, with the shared MLP's gate as a last row if the spec has one; `gate_up`
    stacks the experts' gates and ups."""

    def __init__(
        self,
        device: Device,
        spec: MoE,
        *,
        bias: Array | None,
        expert_scale: Array | None,
        router: Weight,
        gate_up: Weight,
        down: Weight,
        shared: GatedMLPLayer | None,
    ) -> None:
        self._device = device
        self._spec = spec
        self._bias = bias
        self._expert_scale = expert_scale
        self._router = router
        self.input_weight = gate_up
        self._down = down
        self._shared = shared
        plain = device.host or spec.activation not in FUSED
        self._int8 = None if plain else expert_weights(gate_up, down, spec.experts)
        other = None if plain or shared is None else expert_weights(shared.input_weight, shared.down, 1)
        # One launch for the experts and the shared MLP: two fewer, and no wait for their results.
        joins = self._int8 is not None and other is not None and self._int8.joins(other)
        self._joined = other if joins else None

    def __call__(self, y: Array | Quantised, routed_by: Array | None = None) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]; the router reads `routed_by`, or y if that is None."""
        device, spec, rows = self._device, self._spec, y.shape[0]
        scores = matmul(device, y if routed_by is None else routed_by, self._router)
        routing = route(
            device,
            scores[:, : spec.experts],
            top_k=spec.used,
            gating=spec.gating,
            bias=self._bias,
            normalise=spec.normalise,
            scale=spec.scale,
            expert_scale=self._expert_scale,
            groups=spec.groups,
        )
        shared_gate = scores[:, spec.experts :] if spec.shared_gate else None
        if self._int8 is not None and (group := int8_group(device, rows, self.input_weight)):
            x = y if isinstance(y, Quantised) else quantise(device, y, group)
            joined, gate = self._joined, None if self._joined is None else shared_gate
            out = expert_mlp(device, x, routing.ids, routing.weights, self._int8, spec.activation, joined, gate)
            if joined is not None:
                return out
        else:
            out = self._each(y.x if isinstance(y, Quantised) else y, routing)
        if self._shared is not None and shared_gate is not None:
            add_gated(device, out, self._shared(y), shared_gate)
        elif self._shared is not None:
            add(device, out, self._shared(y))
        return out

    def _each(self, y: Array, routing: Routing) -> Array:
        """The chosen experts' results, one operation after another."""
        device, spec, rows = self._device, self._spec, y.shape[0]
        gate_up = expert_matmul(device, y, self.input_weight, spec.experts, routing)
        gate_up = gate_up.reshape(rows * spec.used, 2 * spec.hidden)
        inner = gated_activation(device, gate_up[:, : spec.hidden], gate_up[:, spec.hidden :], spec.activation)
        outer = expert_matmul(device, inner.reshape(rows, spec.used, spec.hidden), self._down, spec.experts, routing)
        return combine(device, outer, routing.weights)
