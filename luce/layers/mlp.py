"""Gated feed-forward: down(act(gate x) * up x)."""

from __future__ import annotations

from luce.models.spec import GatedMLP
from luce.ops.activation import gated_activation
from luce.ops.matmul import matmul, takes_bytes
from luce.ops.matmul_bytes import BYTE_TYPES, gated, takes_gates
from luce.ops.quantise import Quantised, quantise
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


class GatedMLPLayer:
    """`gate_up` stacks ffn_gate and ffn_up. `reads` is the weight that meets the input."""

    def __init__(self, device: Device, spec: GatedMLP, *, gate_up: Weight, down: Weight) -> None:
        self._device = device
        self._activation = spec.activation
        self.reads = gate_up
        self.down = down
        self._gated = takes_gates(gate_up) and all(part.type in BYTE_TYPES for part in down.parts)

    def __call__(self, y: Array | Quantised) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        if self._gated and takes_bytes(self._device, y.shape[0], self.reads):
            rows = y if isinstance(y, Quantised) else quantise(self._device, y)
            return matmul(self._device, gated(self._device, rows, self.reads, self._activation), self.down)
        gate_up = matmul(self._device, y, self.reads)
        half = gate_up.shape[1] // 2
        inner = gated_activation(self._device, gate_up[:, :half], gate_up[:, half:], self._activation)
        return matmul(self._device, inner, self.down)
