"""Feed-forward parts: gated, down(act(gate x) * up x), and plain, down(gelu(up x))."""

from __future__ import annotations

from luce.models.spec import GatedMLP
from luce.ops.activation import FUSED, gated_activation, gelu
from luce.ops.altup import keep_largest
from luce.ops.fp16 import GROUP, gated_halves_to_fp16, gated_to_fp16
from luce.ops.half_products import halves, has_halves
from luce.ops.int8_rows import Int8Rows, gated_to_int8
from luce.ops.matmul import Rows, fp16_top, matmul, sole_int8_group
from luce.ops.matmul_prefill import has_int8_sums, int8_sums, multiplies_int8
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

    def __call__(self, y: Rows) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        return matmul(self._device, self.inner(y), self.down)

    @property
    def reads_products(self) -> bool:
        """Whether products with `input_weight` may be sums or halves."""
        return self._sparsity is None and self.input_weight.rows % (2 * GROUP) == 0

    def inner(self, y: Rows) -> Rows:
        """act(gate y) * up y, which `down` multiplies."""
        if self._sums_int8(y):
            assert not isinstance(y, Quantised)
            sums = int8_sums(self._device, y, self.input_weight)
            return gated_to_int8(self._device, sums, self._activation)
        top = fp16_top(self._device, y.shape[0], self.down)
        if top is not None and self.reads_products and has_halves(self._device, y, self.input_weight):
            assert not isinstance(y, Quantised | Int8Rows)
            gates = halves(self._device, y, self.input_weight)
            return gated_halves_to_fp16(self._device, gates, self._activation, top)
        gate_up = matmul(self._device, y, self.input_weight)
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        if self._sparsity is not None:
            keep_largest(self._device, gate, self._sparsity)
        group = sole_int8_group(self._device, y.shape[0], self.down)
        if group and self._activation in FUSED:
            return quantise_gated(self._device, gate, up, self._activation, group)
        if top is not None:
            return gated_to_fp16(self._device, gate, up, self._activation, top)
        return gated_activation(self._device, gate, up, self._activation)

    def _sums_int8(self, y: Rows) -> bool:
        """Whether both products are of int8 rows, and the activation reads the sums of the first."""
        rows = y.shape[0]
        return (
            has_int8_sums(self._device, rows, self.input_weight)
            and multiplies_int8(self._device, rows, self.down)
            and self.reads_products
        )


class PlainMLPLayer:
    """The layer without a gate."""

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = True

    def __init__(self, device: Device, *, up: Weight, down: Weight) -> None:
        self._device = device
        self.input_weight = up
        self._down = down

    def __call__(self, y: Rows) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        inner = matmul(self._device, y, self.input_weight)
        gelu(self._device, inner)
        return matmul(self._device, inner, self._down)
