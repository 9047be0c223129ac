"""Feed-forward parts: gated, down(act(gate x) * up x), and plain, down(gelu(up x))."""

from __future__ import annotations

from luce.models.spec import GatedMLP
from luce.ops.activation import FUSED, gated_activation, gelu
from luce.ops.matmul import matmul, sole_int8_group
from luce.ops.quantise import Quantised, quantise_gated
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


class GatedMLPLayer:
    """The layer; `gate_up` stacks ffn_gate and ffn_up."""

    def __init__(self, device: Device, spec: GatedMLP, *, gate_up: Weight, down: Weight) -> None:
        self._device = device
        self._activation = spec.activation
        self.input_weight = gate_up
        self.down = down

    def __call__(self, y: Array | Quantised) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        gate_up = matmul(self._device, y, self.input_weight)
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        group = sole_int8_group(self._device, y.shape[0], self.down)
        if group and self._activation in FUSED:
            inner = quantise_gated(self._device, gate, up, self._activation, group)
        else:
            inner = gated_activation(self._device, gate, up, self._activation)
        return matmul(self._device, inner, self.down)


class PlainMLPLayer:
    """The layer without a gate."""

    def __init__(self, device: Device, *, up: Weight, down: Weight) -> None:
        self._device = device
        self.input_weight = up
        self._down = down

    def __call__(self, y: Array | Quantised) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        inner = matmul(self._device, y, self.input_weight)
        gelu(self._device, inner)
        return matmul(self._device, inner, self._down)
