"""Norms of rows: what a layer or the head multiplies is normed before, and in some models also behind."""

from __future__ import annotations

from dataclasses import dataclass

from luce.ops.activation import add
from luce.ops.fp16 import Halves
from luce.ops.int8_rows import Int8Sums
from luce.ops.matmul import Rows, fp16_top, int8_group, norms_row
from luce.ops.matmul_prefill import multiplies_int8
from luce.ops.norm import (
    Unnormed,
    add_rms_norm,
    layer_norm,
    quantised_rms_norm,
    rms_norm,
    rms_norm_to_fp16,
    rms_norm_to_int8,
)
from luce.ops.quantise import quantise
from luce.ops.scaled_products import Product, to_floats
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


@dataclass(frozen=True)
class Norm:
    """rms(x) * weight, or LayerNorm with a weight and maybe a bias: float32 [rows, hidden] -> the same."""

    weight: Array
    eps: float
    bias: Array | None = None
    #: LayerNorm
    centred: bool = False

    def __call__(self, device: Device, x: Array) -> Array:
        """The norm of x float32 [rows, hidden]."""
        if self.centred:
            return layer_norm(device, x, self.weight, self.bias, self.eps)
        return rms_norm(device, x, self.weight, self.eps)

    def of_sum(
        self,
        device: Device,
        x: Array,
        delta: Product | None,
        reader: Weight,
        *,
        alone: bool = False,
        bare: bool = False,
    ) -> Rows:
        """The norm of x + delta, which leaves the sum in x; quantised if products with `reader` read int8.

        `alone`: nothing but products with `reader` reads the norm, so that it may be fp16 or int8 alone, or Unnormed.
        `bare`: it may be Unnormed.
        """
        bare = bare or (alone and norms_row(device, x.shape[0], reader))
        if bare and not self.centred and delta is None:
            return Unnormed(x, self.weight, self.eps)
        if alone and not self.centred and multiplies_int8(device, x.shape[0], reader):
            own = to_floats(device, delta) if isinstance(delta, Halves) else delta
            return rms_norm_to_int8(device, x, own, self.weight, self.eps)
        top = fp16_top(device, x.shape[0], reader) if alone and not self.centred else None
        if top is not None:
            own = to_floats(device, delta) if isinstance(delta, Int8Sums) else delta
            return rms_norm_to_fp16(device, x, own, self.weight, self.eps, top)
        if delta is not None:
            delta = to_floats(device, delta)
        group = int8_group(device, x.shape[0], reader)
        if self.centred:
            if delta is not None:
                add(device, x, delta)
            y = self(device, x)
            return quantise(device, y, group) if group else y
        if group:
            return quantised_rms_norm(device, x, delta, self.weight, self.eps, group)
        if delta is None:
            return rms_norm(device, x, self.weight, self.eps)
        return add_rms_norm(device, x, delta, self.weight, self.eps)
