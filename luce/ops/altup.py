"""Alternating updates (AltUp) of four copies of the residual stream, and gates of which only the largest values count.

The first copy is x float32 [n, hidden]; the others lie side by side in `beside` float32 [n, 3 hidden]. All arrays are
contiguous unless said otherwise.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

_THREADS = 256
# Below this mean square match_magnitude takes a vector for zero.
_LEAST = np.float32(1e-5)


def predict(device: Device, x: Array, beside: Array, router: Array, weights: Array) -> None:
    """Copy j += sum over the copies i of c[j, i] copy i, in place, with c = weights tanh(router).

    router float32 [n, 4]; weights float32 [16, 4], whose row 4 j + i gives c[j, i].
    """
    if isinstance(device, HostDevice):
        device.call_host(partial(_predict, weights), x, beside, router)
        return
    n, hidden = x.shape
    if n:
        args = (x, beside, router, weights, np.int32(hidden))
        device.launch("altup", "altup_predict", (n, -(-hidden // _THREADS)), (_THREADS,), args)


def correct(
    device: Device, x: Array, beside: Array, result: Array, router: Array, weights: Array, scale: Array
) -> Array:
    """Copy j += (1 + d[j]) (result - copy 0), in place, with d = weights tanh(router).

    result float32 [n, hidden], router float32 [n, 4], weights float32 [4, 4], scale float32 [hidden] -> the new first
    copy times `scale`, float32 [n, hidden].
    """
    if isinstance(device, HostDevice):
        return device.compute(partial(_correct, weights, scale), x.shape, x, beside, result, router)
    n, hidden = x.shape
    out = device.empty((n, hidden))
    if n:
        args = (out, x, beside, result, router, weights, scale, np.int32(hidden))
        device.launch("altup", "altup_correct", (n, -(-hidden // _THREADS)), (_THREADS,), args)
    return out


def match_magnitude(device: Device, y: Array, x: Array) -> None:
    """y[r, j] *= |x[r]| / |y[r, j]| in place, by root mean squares: y float32 [n, k, d], x float32 [n, d].

    The mean square of y[r, j] counts as 1e-5 if it is less.
    """
    if isinstance(device, HostDevice):
        device.call_host(_match_magnitude, y, x)
        return
    n, k, d = y.shape
    if n:
        device.launch("altup", "match_magnitude", (n, k), (_THREADS,), (y, x, np.int32(d), _LEAST))


def keep_largest(device: Device, x: Array, deviations: float) -> None:
    """x = max(0, x - mean - deviations std) over each row, in place: float32 [n, d] (any row stride).

    std has the divisor d.
    """
    if isinstance(device, HostDevice):
        device.call_host(partial(_keep_largest, np.float32(deviations)), x)
        return
    n, d = x.shape
    if n:
        args = (x, np.int64(x.strides[0] // 4), np.int32(d), np.float32(deviations))
        device.launch("altup", "keep_largest", (n,), (_THREADS,), args)


def _coefficients(weights: Array, router: Array) -> Array:
    # Row by row like vecdot: the bits of a row depend on no other.
    return np.vecdot(weights, np.tanh(router)[:, None])


def _predict(weights: Array, x: Array, beside: Array, router: Array) -> None:
    n, hidden = x.shape
    others = beside.reshape(n, -1, hidden)
    copies = np.concatenate((x[:, None], others), axis=1)
    streams = copies.shape[1]
    c = _coefficients(weights, router).reshape(n, streams, streams)
    for j in range(streams):
        target = x if j == 0 else others[:, j - 1]
        for i in range(streams):
            target += c[:, j, i, None] * copies[:, i]


def _correct(weights: Array, scale: Array, x: Array, beside: Array, result: Array, router: Array) -> Array:
    n, hidden = x.shape
    d, more = 1 + _coefficients(weights, router), result - x
    x += d[:, :1] * more
    others = beside.reshape(n, -1, hidden)
    others += d[:, 1:, None] * more[:, None]
    return x * scale


def _magnitude(x: Array, least: np.float32) -> Array:
    return np.sqrt(np.maximum(np.vecdot(x, x) / np.float32(x.shape[-1]), least))


def _match_magnitude(y: Array, x: Array) -> None:
    magnitude = _magnitude(y, _LEAST)[..., None]
    y *= _magnitude(x, np.float32(0))[:, None, None]
    y /= magnitude


def _keep_largest(deviations: np.float32, x: Array) -> None:
    x -= x.mean(axis=1, keepdims=True)
    x -= deviations * _magnitude(x, np.float32(0))[:, None]
    np.maximum(x, 0, out=x)
