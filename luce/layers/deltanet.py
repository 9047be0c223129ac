"""Gated DeltaNet: input projections, the gated delta rule (luce.ops.deltanet), output projection."""

from __future__ import annotations

from luce.layers.state import DeltaState
from luce.ops.deltanet import DeltaWeights, gated_delta_net
from luce.ops.matmul import matmul, sole_int8_group
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep, SpanArrays


class DeltaNetLayer:
    """The layer; `inputs` stacks attn_qkv, attn_gate, ssm_alpha and ssm_beta."""

    def __init__(
        self, device: Device, *, inputs: Weight, out: Weight, weights: DeltaWeights, state: DeltaState
    ) -> None:
        self._device = device
        self.input_weight = inputs
        self._out = out
        self._weights = weights
        self.state = state

    def __call__(self, y: Array | Quantised, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        device = self._device
        int8_group = sole_int8_group(device, y.shape[0], self._out)
        x = matmul(device, y, self.input_weight)
        return matmul(device, self._mix(x, step.spans, int8_group=int8_group), self._out)

    def accept(self, spans: SpanArrays) -> None:
        """Apply the speculative rows that spans accept; the spans have no rows of their own."""
        self._mix(self._device.empty((0, self.input_weight.rows)), spans, int8_group=0)

    def _mix(self, x: Array, spans: SpanArrays, *, int8_group: int) -> Array | Quantised:
        return gated_delta_net(self._device, x, self._weights, self.state, spans, int8_group=int8_group)
