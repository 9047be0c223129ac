"""Mixture of experts: the chosen experts' gated MLPs, weighted, and a shared MLP in models that have one."""

from __future__ import annotations

from luce.layers.mlp import GatedMLPLayer
from luce.layers.routed_experts import OffloadedExperts, RoutedExperts
from luce.models.spec import MoE
from luce.ops.activation import FUSED, add, add_gated
from luce.ops.matmul import int8_group, matmul
from luce.ops.moe import route
from luce.ops.moe_int8 import expert_mlp, expert_weights
from luce.ops.quantise import Quantised, quantise
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


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
        self._bias = bias
        self._expert_scale = expert_scale
        self._router = router
        self._experts = experts
        self._shared = shared
        self._int8 = self._joined = None
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

    def __call__(self, y: Array | Quantised, routed_by: Array | None = None) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]; the router reads `routed_by`, or y if that is None."""
        device, spec = self._device, self._spec
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
            multiplies=isinstance(self._experts, RoutedExperts),
        )
        shared_gate = scores[:, spec.experts :] if spec.shared_gate else None
        if isinstance(self._experts, OffloadedExperts):
            finish = self._experts.begin(y.x if isinstance(y, Quantised) else y, routing)
            # The device computes the shared MLP while the CPU computes the experts.
            shared = None if self._shared is None else self._shared(y)
            return self._sum(finish(), shared, shared_gate)
        if self._int8 is not None and (group := int8_group(device, y.shape[0], self.input_weight)):
            x = y if isinstance(y, Quantised) else quantise(device, y, group)
            joined, gate = self._joined, None if self._joined is None else shared_gate
            out = expert_mlp(device, x, routing.ids, routing.weights, self._int8, spec.activation, joined, gate)
            if joined is not None:
                return out
        else:
            out = self._experts(y.x if isinstance(y, Quantised) else y, routing)
        return self._sum(out, None if self._shared is None else self._shared(y), shared_gate)

    def _sum(self, out: Array, shared: Array | None, shared_gate: Array | None) -> Array:
        if shared is not None and shared_gate is not None:
            add_gated(self._device, out, shared, shared_gate)
        elif shared is not None:
            add(self._device, out, shared)
        return out
