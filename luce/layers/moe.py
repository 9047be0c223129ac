"""Mixture of experts: the chosen experts' gated MLPs, weighted, and a shared one beside them where there is one."""

from __future__ import annotations

from luce.layers.mlp import GatedMLPLayer
from luce.models.spec import MoE
from luce.ops.activation import add, add_gated, gated_activation
from luce.ops.matmul import matmul
from luce.ops.moe import combine, expert_matmul, route
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


class MoELayer:
    """`router` is ffn_gate_inp, with the shared expert's gate as a further row if the spec says so; `gate_up` stacks
    the experts' gates and ups."""

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
        self._gate_up = gate_up
        self._down = down
        self._shared = shared

    def __call__(self, y: Array, routed_by: Array | None = None) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]; the router reads `routed_by` where it is given."""
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
        )
        gate_up = expert_matmul(device, y, self._gate_up, spec.experts, routing)
        gate_up = gate_up.reshape(rows * spec.used, 2 * spec.hidden)
        inner = gated_activation(device, gate_up[:, : spec.hidden], gate_up[:, spec.hidden :], spec.activation)
        outer = expert_matmul(device, inner.reshape(rows, spec.used, spec.hidden), self._down, spec.experts, routing)
        out = combine(device, outer, routing.weights)
        if self._shared is not None and spec.shared_gate:
            add_gated(device, out, self._shared(y), scores[:, spec.experts :])
        elif self._shared is not None:
            add(device, out, self._shared(y))
        return out
