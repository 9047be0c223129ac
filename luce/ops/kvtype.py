"""Types of K and V in the page pools: 16-bit floats, or GGUF quant blocks of 32 values along a head.

A pool is [rows, kv_heads, n]. f32 and f16 pools have these dtypes, bf16 has uint16, all with n = head_dim; q8_0 and
q4_0 have uint8 with a head's quant blocks side by side, n = head_dim / 32 times 34 or 18. So dtype and shape determine
the type.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from luce.errors import UsageError
from luce.gguf.quants import block_size
from luce.gguf.quants import dequantize as decode
from luce.runtime.device import Array, Device

_T = GGMLQuantizationType
_BLOCKS = {"q8_0": _T.Q8_0, "q4_0": _T.Q4_0}
_NUMBERS = {"f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}


@dataclass(frozen=True)
class KVTypes:
    """The types of K and V: auto (the device's default: f16 on GPUs, f32 on the host), f16, bf16, q8_0 or q4_0."""

    k: str = "auto"
    v: str = "auto"

    def layout(self, device: Device, head_dim: int) -> tuple[tuple[np.dtype[np.generic], int], ...]:
        """(dtype, n) of K's and of V's pool. Raises UsageError if the head size is no multiple of 32."""
        return tuple(_layout(device, head_dim, type, part) for type, part in ((self.k, "k"), (self.v, "v")))


#: the device's default types
AUTO = KVTypes()


def _layout(device: Device, head_dim: int, type: str, part: str) -> tuple[np.dtype[np.generic], int]:
    if type not in _BLOCKS:
        return _NUMBERS.get(type, device.kv_dtype), head_dim
    values, size = block_size(_BLOCKS[type])
    if head_dim % values:
        raise UsageError(
            f"--cache-type-{part} {type}: the model's heads have {head_dim} values, not a multiple of {values}",
            param=f"cache_type_{part}",
        )
    return np.dtype(np.uint8), head_dim // values * size


def pool_type(pool: Array, head_dim: int) -> GGMLQuantizationType:
    """The type of a pool, or of some of its rows, for heads of `head_dim` values."""
    if pool.dtype == np.float32:
        return _T.F32
    if pool.dtype == np.float16:
        return _T.F16
    if pool.dtype == np.uint16:
        return _T.BF16
    values, size = block_size(_T.Q8_0)
    return _T.Q8_0 if pool.shape[-1] * values == head_dim * size else _T.Q4_0


def kernel_type(pool: Array, head_dim: int) -> str:
    """The pool's type by its name in kernels/kv.h. Raises ValueError for float32, which only the host has."""
    type = pool_type(pool, head_dim)
    if type == _T.F32:
        raise ValueError("no kernel for pools of float32")
    return str(type.name)


def quantise(rows: Array, pool: Array) -> Array:
    """Rows float32 [n, kv_heads, head_dim] in the type of a pool on the host: [n, kv_heads, pool's n]."""
    if pool.dtype.kind == "f":
        return rows
    # The reciprocal of a tiny scale overflows; the values are zeros all the same.
    with np.errstate(over="ignore", invalid="ignore"):
        stored = gguf.quants.quantize(np.ascontiguousarray(rows), pool_type(pool, rows.shape[-1]))
    return stored.view(pool.dtype)


def dequantise(rows: Array, head_dim: int) -> NDArray[np.float32]:
    """Rows [n, kv_heads, pool's n] of a pool on the host as float32 [n, kv_heads, head_dim]."""
    if rows.dtype.kind == "f":
        floats: NDArray[np.float32] = rows.astype(np.float32, copy=False)
        return floats
    count, kv_heads, _ = rows.shape
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(count * kv_heads, -1)
    return decode(raw, pool_type(rows, head_dim)).reshape(count, kv_heads, head_dim)
