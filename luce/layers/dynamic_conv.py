"""Grouped dynamic causal convolution around a part of a layer: of its input rows, and of its output rows."""

from __future__ import annotations

from luce.ops.dynamic_conv import dynamic_conv
from luce.ops.matmul import matmul
from luce.ops.quantise import Quantised
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


class DynamicConvLayer:
    """The convolution of both sides; see luce.models.spec.DynamicConv.

    base float32 [2, taps, hidden]; the rows of `projection` give the coefficients [2, taps, groups] of a row.
    """

    def __init__(self, device: Device, *, base: Array, projection: Weight) -> None:
        self._device = device
        self._base = base
        self.input_weight = projection

    def coefficients(self, y: Array | Quantised) -> Array:
        """The coefficients of both sides, from the part's input before its convolution: y float32 [rows, hidden] ->
        float32 [rows, 2, taps, groups]."""
        found = matmul(self._device, y, self.input_weight)
        taps = self._base.shape[1]
        return found.reshape(len(found), 2, taps, found.shape[1] // (2 * taps))

    def prepare(self, y: Array | Quantised, coefficients: Array, step: DeviceStep) -> Array:
        """The part's input: float32 [rows, hidden]."""
        return self._side(0, y.x if isinstance(y, Quantised) else y, coefficients, step)

    def finish(self, out: Array, coefficients: Array, step: DeviceStep) -> Array:
        """What the part adds to the stream, from its output: float32 [rows, hidden]."""
        return self._side(1, out, coefficients, step)

    def _side(self, side: int, x: Array, coefficients: Array, step: DeviceStep) -> Array:
        return dynamic_conv(self._device, x, self._base[side], coefficients[:, side], step.spans)
