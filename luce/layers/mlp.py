"""Gated feed-forward: down(act(gate x) * up x)."""

from __future__ import annotations

from luce.models.spec import GatedMLP
from luce.ops.activation import gated_activation
from luce.ops.matmul import matmul
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


class GatedMLPLayer:
    """`gate_up` stacks ffn_gate and ffn_up."""

    def __init__(self, device: Device, spec: GatedMLP, *, gate_up: Weight, down: Weight) -> None:
        self._device = device
        self._activation = spec.activation
        self._gate_up = gate_up
        self._down = down

    def __call__(self, y: Array) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        gate_up = matmul(self._device, y, self._gate_up)
        half = gate_up.shape[1] // 2
        inner = gated_activation(self._device, gate_up[:, :half], gate_up[:, half:], self._activation)
        return matmul(self._device, inner, self._down)
