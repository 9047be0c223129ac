"""Products of many rows, as floats or with scales that are still to be applied, for ops that read them so."""

from __future__ import annotations

from luce.ops import fp16, int8_rows
from luce.ops.fp16 import Halves
from luce.ops.int8_rows import Int8Sums
from luce.runtime.device import Array, Device

#: float32 [n, features], or numbers whose scales are still to be applied
Product = Array | Int8Sums | Halves


def to_floats(device: Device, product: Product) -> Array:
    """float32 [n, features]; of sums, in their memory."""
    if isinstance(product, Int8Sums):
        return int8_rows.to_floats(device, product)
    return fp16.to_floats(device, product) if isinstance(product, Halves) else product
