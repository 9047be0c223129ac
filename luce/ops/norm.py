"""Norms over the last dimension in float32: rms(x) = x / sqrt(mean(x^2) + eps), and LayerNorm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from luce.cpu_kernels.dimensions import LANES
from luce.ops.fp16 import TOP, Fp16Rows, Halves, empty_fp16
from luce.ops.int8_rows import Int8Rows, Int8Sums, empty_int8
from luce.ops.quantise import Quantised, as_arguments, empty_quantised
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

# Threads of a block that norms heads, one per wave.
_HEAD_THREADS = 128


@dataclass(frozen=True)
class Unnormed:
    """A row for products that norm it themselves: rms(x) * weight is what they multiply."""

    #: float32 [1, d]
    x: Array
    #: float32 [d]
    weight: Array
    eps: float

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, which is 1, and columns."""
        return 1, self.x.shape[1]


def rms_norm(device: Device, x: Array, weight: Array, eps: float) -> Array:
    """rms(x) * weight: x float32 [n, d], weight float32 [d] -> float32 [n, d]."""
    if isinstance(device, CpuDevice) and x.shape[1] % LANES == 0:
        return _compiled(device, x, None, weight, eps)
    if device.host:
        return _rms(x, eps) * weight
    return _norm(device, x, None, weight, eps, None)


def add_rms_norm(device: Device, x: Array, delta: Array, weight: Array, eps: float) -> Array:
    """x += delta in place (the residual stream), then rms(x) * weight; all float32 [n, d]."""
    if isinstance(device, CpuDevice) and x.shape[1] % LANES == 0:
        return _compiled(device, x, delta, weight, eps)
    if device.host:
        np.add(x, delta, out=x)
        return _rms(x, eps) * weight
    return _norm(device, x, delta, weight, eps, None)


def _compiled(device: CpuDevice, x: Array, delta: Array | None, weight: Array, eps: float) -> Array:
    out = device.empty(x.shape)
    facts = weight, out, np.float32(eps), delta is not None
    device.run(device.kernels.rms_norm, x, x if delta is None else delta, *facts)
    return out


def quantised_rms_norm(
    device: Device, x: Array, delta: Array | None, weight: Array, eps: float, group: int
) -> Quantised:
    """add_rms_norm, or rms_norm without a delta, of 0 < n <= 16 rows on a GPU: quantised, and as float32 in `x`.

    d is a multiple of 32. The quantised rows equal those of `quantise`.
    """
    n, d = x.shape
    quantised = empty_quantised(device, n, d, group)
    return replace(quantised, x=_norm(device, x, delta, weight, eps, quantised))


def rms_norm_to_fp16(
    device: Device, x: Array, delta: Array | Halves | None, weight: Array, eps: float, top: int = TOP
) -> Fp16Rows:
    """luce.ops.fp16.to_fp16 of add_rms_norm, or of rms_norm without a delta, on a GPU, n > 0: the same bits. A delta
    may be the halves of a product."""
    n, cols = x.shape
    rows = empty_fp16(device, n, cols, top)
    scales: tuple[Array | None] = (None,)
    if isinstance(delta, Halves):
        delta, scales = delta.values.view(np.float32), (delta.rows,)
    _norm_scaled(device, "rms_norm_to_fp16", x, delta, scales, weight, eps, rows.values, rows.scale, np.int32(top))
    return rows


def rms_norm_to_int8(device: Device, x: Array, delta: Array | Int8Sums | None, weight: Array, eps: float) -> Int8Rows:
    """add_rms_norm, or rms_norm without a delta, on a GPU, n > 0, d a multiple of 4, as int8 rows; a delta may be the
    sums of a product."""
    rows = empty_int8(device, *x.shape)
    scales: tuple[Array | None, Array | None] = (None, None)
    if isinstance(delta, Int8Sums):
        delta, scales = delta.values.view(np.float32), (delta.rows, delta.features)
    _norm_scaled(device, "rms_norm_to_int8", x, delta, scales, weight, eps, rows.values.view(np.uint8), rows.scale)
    return rows


def _norm_scaled(
    device: Device,
    kernel: str,
    x: Array,
    delta: Array | None,
    scales: tuple[Array | None, ...],
    weight: Array,
    eps: float,
    values: Array,
    scale: Array,
    *others: np.int32,
) -> None:
    (n, d), padded = x.shape, values.shape[1]
    # Without a delta, a pointer that the kernel does not dereference.
    more, stride = (x, np.int64(0)) if delta is None else (delta, np.int64(delta.strides[0] // 4))
    added = (more, stride, np.int32(delta is not None))
    sizes = (np.int32(d), np.int32(padded), np.float32(eps))
    args = (values, scale, x, np.int64(x.strides[0] // 4), *added, *scales, weight, *sizes, *others)
    device.launch("norm", kernel, (n,), (_threads(d),), args)


def _norm(
    device: Device, x: Array, delta: Array | None, weight: Array, eps: float, quantised: Quantised | None
) -> Array:
    n, d = x.shape
    out = device.empty((n, d))
    if n:
        added = () if delta is None else (delta, np.int64(delta.strides[0] // 4))
        to, *rows_and_kind = as_arguments(quantised)
        # Without quantised rows, a pointer that the kernel does not dereference.
        sizes = (np.int32(n), np.int32(d), np.float32(eps), *rows_and_kind)
        args = (out, x, np.int64(x.strides[0] // 4), *added, weight, *sizes, out if to is None else to)
        device.launch(
            "norm",
            "rms_norm" if delta is None else "add_rms_norm",
            (quantised.padded if quantised else n,),
            (_threads(d),),
            args,
        )
    return out


def layer_norm(device: Device, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """LayerNorm (Ba et al., arXiv 1607.06450): (x - mean) / sqrt(var + eps) * weight + bias, with var over n.

    x float32 [n, d] (any row stride), weight and bias (None: 0) float32 [d] -> float32 [n, d].
    """
    n, d = x.shape
    if isinstance(device, HostDevice):
        return device.compute(partial(_host_layer_norm, weight, bias, eps), (n, d), x)
    out = device.empty((n, d))
    if n:
        # Without a bias, a pointer that the kernel does not dereference.
        args = (out, x, np.int64(x.strides[0] // 4), weight, weight if bias is None else bias)
        sizes = (np.int32(bias is not None), np.int32(d), np.float32(eps))
        device.launch("norm", "layer_norm", (n,), (_threads(d),), (*args, *sizes))
    return out


def head_rms_norm(device: Device, x: Array, weight: Array, eps: float) -> None:
    """rms over each head, in place: x float32 [n, heads, d] (any row and head strides), weight float32 [d]."""
    if isinstance(device, HostDevice):
        device.call_host(partial(_host_head_norm, weight, eps), x)
        return
    n, heads, d = x.shape
    row, head = np.int64(x.strides[0] // 4), np.int64(x.strides[1] // 4)
    args = (x, row, head, np.int32(heads), weight, np.int32(d), np.float32(eps))
    device.launch("norm", "head_rms_norm", (n, -(-heads // (_HEAD_THREADS // device.lanes))), (_HEAD_THREADS,), args)


def _threads(d: int) -> int:
    # Determined by the row's length alone, as the order of its sum is: 8 elements per thread (HELD of kernels/norm.cu).
    return min(1024, -(-d // (8 * 64)) * 64)


def _host_layer_norm(weight: Array, bias: Array | None, eps: float, x: Array) -> Array:
    # Row by row like vecdot: the bits of a row depend on no other.
    centred = x - x.mean(axis=1, keepdims=True)
    y = _rms(centred, eps) * weight
    return y if bias is None else y + bias


def _host_head_norm(weight: Array, eps: float, x: Array) -> None:
    x[...] = _rms(x, eps) * weight


def _rms(x: Array, eps: float) -> Array:
    scale = np.vecdot(x, x)
    scale /= np.float32(x.shape[-1])
    scale += np.float32(eps)
    np.sqrt(scale, out=scale)
    return x / scale[..., None]
