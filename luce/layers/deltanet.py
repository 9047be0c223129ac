"""Gated DeltaNet: input projections, what luce.ops.deltanet does between, output projection."""

from __future__ import annotations

from luce.layers.state import DeltaState
from luce.ops.deltanet import DeltaWeights, gated_delta_net
from luce.ops.matmul import matmul, takes_bytes_alone
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep, SpanArrays


class DeltaNetLayer:
    """`inputs` stacks attn_qkv, attn_gate, ssm_alpha, ssm_beta; `reads` is that weight, which meets the input."""

    def __init__(
        self, device: Device, *, inputs: Weight, out: Weight, weights: DeltaWeights, state: DeltaState
    ) -> None:
        self._device = device
        self.reads = inputs
        self._out = out
        self._weights = weights
        self.state = state

    def __call__(self, y: Array | Quantised, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        device = self._device
        in_bytes = takes_bytes_alone(device, y.shape[0], self._out)
        return matmul(device, self._mix(matmul(device, y, self.reads), step.spans, in_bytes=in_bytes), self._out)

    def accept(self, spans: SpanArrays) -> None:
        """Apply the rows that spans without rows of their own accept."""
        self._mix(self._device.empty((0, self.reads.rows)), spans, in_bytes=0)

    def _mix(self, x: Array, spans: SpanArrays, *, in_bytes: int) -> Array | Quantised:
        states = self.state.memory, self.state.past, self.state.kept, self.state.fades
        return gated_delta_net(self._device, x, self._weights, *states, spans, in_bytes=in_bytes)
