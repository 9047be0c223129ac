"""Feed-forward parts: gated, down(act(gate x) * up x), and plain, down(gelu(up x))."""

from __future__ import annotations

from luce.models.spec import GatedMLP
from luce.ops.activation import FUSED, gated_activation, gelu
from luce.ops.altup import keep_largest
from luce.ops.fp16 import Fp16Rows, gated_to_fp16
from luce.ops.matmul import matmul, multiplies_fp16, sole_int8_group
from luce.ops.quantise import Quantised, quantise_gated
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


class GatedMLPLayer:
    """The layer; `gate_up` stacks ffn_gate and ffn_up."""

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = True

    def __init__(self, device: Device, spec: GatedMLP, *, gate_up: Weight, down: Weight) -> None:
        self._device = device
        self._activation = spec.activation
        self._sparsity = spec.sparsity
        self.input_weight = gate_up
        self.down = down

    def __call__(self, y: Array | Quantised | Fp16Rows) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        gate_up = matmul(self._device, y, self.input_weight)
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        if self._sparsity is not None:
            keep_largest(self._device, gate, self._sparsity)
        group = sole_int8_group(self._device, y.shape[0], self.down)
        if group and self._activation in FUSED:
            inner: Array | Quantised | Fp16Rows = quantise_gated(self._device, gate, up, self._activation, group)
        elif multiplies_fp16(self._device, y.shape[0], self.down):
            inner = gated_to_fp16(self._device, gate, up, self._activation)
        else:
            inner = gated_activation(self._device, gate, up, self._activation)
        return matmul(self._device, inner, self.down)


class PlainMLPLayer:
    """The layer without a gate."""

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = True

    def __init__(self, device: Device, *, up: Weight, down: Weight) -> None:
        self._device = device
        self.input_weight = up
        self._down = down

    def __call__(self, y: Array | Quantised | Fp16Rows) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        inner = matmul(self._device, y, self.input_weight)
        gelu(self._device, inner)
        return matmul(self._device, inner, self._down)
