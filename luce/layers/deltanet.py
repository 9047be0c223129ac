"""Gated DeltaNet with its convolution and gated output norm."""

from __future__ import annotations

from luce.layers.state import DeltaState
from luce.models.spec import GatedDeltaNet
from luce.ops.deltanet import conv_silu, gated_delta
from luce.ops.matmul import matmul
from luce.ops.norm import gated_rms_norm
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


class DeltaNetLayer:
    """`inputs` stacks attn_qkv, attn_gate, ssm_alpha, ssm_beta."""

    def __init__(
        self,
        device: Device,
        spec: GatedDeltaNet,
        *,
        inputs: Weight,
        out: Weight,
        conv: Array,
        decay: Array,
        dt_bias: Array,
        norm: Array,
        eps: float,
        state: DeltaState,
    ) -> None:
        self._device = device
        self._spec = spec
        self._inputs = inputs
        self._out = out
        self._conv = conv
        self._decay = decay
        self._dt_bias = dt_bias
        self._norm = norm
        self._eps = eps
        self.state = state

    def __call__(self, y: Array, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        device, spec, state = self._device, self._spec, self.state
        gates = spec.channels + spec.value_heads * spec.head_dim
        fused = matmul(device, y, self._inputs)
        c = conv_silu(device, fused[:, : spec.channels], self._conv, state.conv, step.spans)
        o = gated_delta(
            device,
            c,
            fused[:, gates : gates + spec.value_heads],
            fused[:, gates + spec.value_heads :],
            self._decay,
            self._dt_bias,
            state.memory,
            step.spans,
            key_heads=spec.key_heads,
        )
        o = gated_rms_norm(device, o, fused[:, spec.channels : gates], self._norm, self._eps)
        return matmul(device, o, self._out)
