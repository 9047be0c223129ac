"""What KVFlash ranks pages by: the moments of a page's keys, and the newest queries of each sequence."""

from __future__ import annotations

import numpy as np

from luce.ops.kvtype import dequantise, kernel_type
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE, Int32, SpanArrays

#: queries of a slot that are kept, as in kernels/rank.cu: rows of a speculative span, any of which may be the newest
KEPT = 16
#: keys that lie side by side and are described together, as there
GROUP = 16
_THREADS = 256


def moments_bytes(kv_heads: int, d: int) -> int:
    """Bytes of what `page_moments` says of a page."""
    return PAGE // GROUP * kv_heads * 2 * d * 4


def page_moments(device: Device, k_pool: Array, d: int, pages: Int32) -> Array:
    """Mean and variance of each channel over each GROUP of a page's keys: int32 [n], on the host -> float32 [n,
    PAGE / GROUP, kv_heads, 2, d] on the device. `k_pool` as in luce.ops.attention."""
    kv_heads = k_pool.shape[1]
    out = device.empty((len(pages), PAGE // GROUP, kv_heads, 2, d))
    if device.host:
        for moments, page in zip(out, pages.tolist(), strict=True):
            keys = dequantise(k_pool[page * PAGE : (page + 1) * PAGE], d).reshape(-1, GROUP, kv_heads, d)
            keys.mean(axis=1, out=moments[:, :, 0])
            keys.var(axis=1, out=moments[:, :, 1])
        return out
    if len(pages):
        args = (k_pool, device.upload(pages), out, np.int32(kv_heads), np.int32(d))
        grid, defines = (len(pages), kv_heads, PAGE // GROUP), {"KTYPE": kernel_type(k_pool, d)}
        device.launch("rank", "page_moments", grid, (min(_THREADS, d // 2),), args, defines=defines)
    return out


def keep_queries(device: Device, q: Array, spans: SpanArrays, kept: Array, k_pool: Array) -> None:
    """kept[slot, place % KEPT] = q[row] of the last KEPT rows of each span; `place`: the row's number in its sequence.

    Where branches of a tree have a place in common, it is not said whose query is there afterwards.
    q float32 [n, heads, d] (any row and head strides), kept float32 [slots, KEPT, heads, d]. The pool tells which build
    of the kernels the layer uses.
    """
    _, heads, d = q.shape
    if device.host:
        for slot, start, rows, position in spans.table.tolist():
            newest = np.arange(max(0, rows - KEPT), rows)
            kept[slot, (position + newest) % KEPT] = q[start + newest]
        return
    if spans.count:
        args = (q, np.int64(q.strides[0] // 4), np.int64(q.strides[1] // 4), spans.table, kept)
        grid = (spans.count, KEPT, -(-heads * d // _THREADS))
        defines = {"KTYPE": kernel_type(k_pool, d)}
        device.launch("rank", "keep_queries", grid, (_THREADS,), (*args, np.int32(heads), np.int32(d)), defines=defines)
