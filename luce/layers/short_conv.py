"""Gated short convolution: input projection, the convolution (luce.ops.short_conv), output projection."""

from __future__ import annotations

from luce.layers.state import KVPool
from luce.ops.matmul import Rows, matmul
from luce.ops.qkv import Destination, copy_rows
from luce.ops.short_conv import short_conv, write_inputs
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


class ShortConvLayer:
    """The layer; `taps` float32 [hidden, kernel]."""

    #: whether products with `input_weight` are all that reads the layer's input
    only_multiplies = True

    def __init__(self, device: Device, *, inputs: Weight, taps: Array, out: Weight, pool: KVPool, group: int) -> None:
        self._device = device
        self.input_weight = inputs
        self._taps = taps
        self._out = out
        self.state = pool
        self._group = group

    def __call__(self, y: Rows, step: DeviceStep) -> Array:
        """y float32 [rows, hidden] -> float32 [rows, hidden]."""
        device, pool, view = self._device, self.state.k, step.views[self._group]
        fused = matmul(device, y, self.input_weight)
        write_inputs(device, fused, pool, view.dest)
        copy_rows(device, Destination(pool, None, view.dest), view.copies)
        mixed = short_conv(device, fused, self._taps, pool, step.spans, view, step.positions)
        return matmul(device, mixed, self._out)
