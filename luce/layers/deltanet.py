"""Gated DeltaNet: input projections, what luce.ops.deltanet does between, output projection."""

from __future__ import annotations

from luce.layers.state import DeltaState
from luce.ops.deltanet import DeltaWeights, gated_delta_net
from luce.ops.matmul import matmul, takes_bytes_alone
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


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
        device, state = self._device, self.state
        x = matmul(device, y, self.reads)
        in_bytes = takes_bytes_alone(device, y.shape[0], self._out)
        o = gated_delta_net(device, x, self._weights, state.memory, state.past, step.spans, in_bytes=in_bytes)
        return matmul(device, o, self._out)
