"""Hidden states that a drafter reads (features): rounded to bfloat16 (uint16 arrays), and stored in a ring of rows."""

from __future__ import annotations

import numpy as np

from luce.ops.embedding import take_rows
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice

_THREADS = 256


def capture(device: Device, x: Array, delta: Array | None, out: Array) -> None:
    """out = x + delta, to nearest, ties to even: x, delta float32 [n, hidden] contiguous, out uint16 [n, hidden] (any
    row stride). NaN stays NaN."""
    if isinstance(device, HostDevice):
        device.call_host(_capture, out, x, *([] if delta is None else [delta]))
        return
    n, cols = x.shape
    if not n:
        return
    args = (x, *([] if delta is None else [delta]), out, np.int32(cols), np.int64(out.strides[0] // 2))
    kernel = "capture_rows" if delta is None else "capture_sums"
    device.launch("features", kernel, (n, -(-cols // _THREADS)), (_THREADS,), args)


def put_rows(device: Device, rows: Array, ring: Array, first: int, dest: Array) -> None:
    """ring[dest[r], first : first + width] = rows[r] where dest[r] >= 0: rows uint16 [n, width] and ring uint16
    [m, columns], both contiguous; width, columns and `first` even; dest int32 [n] without duplicates."""
    if device.host:
        used = dest >= 0
        ring[dest[used], first : first + rows.shape[1]] = rows[used]
        return
    n, width = rows.shape
    if n:
        grid = (n, -(-width // 2 // _THREADS))
        args = (rows.view(np.uint32), ring.view(np.uint32), dest)
        sizes = (np.int32(width // 2), np.int32(ring.shape[1] // 2), np.int32(first // 2))
        device.launch("features", "put_rows", grid, (_THREADS,), (*args, *sizes))


def take_bf16_rows(device: Device, ring: Array, rows: Array) -> Array:
    """ring[rows]: ring uint16 [m, columns] contiguous, columns even; rows int32 [n] -> uint16 [n, columns]."""
    if device.host:
        return ring[rows]
    taken = take_rows(device, ring.view(np.float32), rows)
    return taken.view(np.uint16)


def _capture(out: Array, x: Array, delta: Array | None = None) -> None:
    out[...] = bfloat16(x if delta is None else x + delta)


def bfloat16(x: Array) -> Array:
    """float32 on the host as bfloat16: uint16, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)
