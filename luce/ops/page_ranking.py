"""The statistics by which KVFlash ranks pages: moments of each page's keys, and the newest queries of each slot."""

from __future__ import annotations

import numpy as np

from luce.ops.kvtype import dequantise, kernel_type
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE, Int32, SpanArrays

#: queries stored per slot, as in kernels/page_ranking.cu: any row of a speculative span may become the newest
NEWEST_QUERIES = 16
#: consecutive keys that share their moments, as there
GROUP = 16
_THREADS = 256


def moments_bytes(kv_heads: int, d: int) -> int:
    """Bytes of a page's moments."""
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
        device.launch("page_ranking", "page_moments", grid, (min(_THREADS, d // 2),), args, defines=defines)
    return out


def _host_queries(q: Array, table: Array, newest: Array) -> None:
    for slot, start, rows, position in table.tolist():
        last = np.arange(max(0, rows - NEWEST_QUERIES), rows)
        newest[slot, (position + last) % NEWEST_QUERIES] = q[start + last]


def store_queries(device: Device, q: Array, spans: SpanArrays, newest: Array, k_pool: Array) -> None:
    """newest[slot, place % NEWEST_QUERIES] = q[row] for the last NEWEST_QUERIES rows of each span.

    `place` is the row's number in its sequence. Where branches of a draft tree share a place, either query may be
    stored. q float32 [n, heads, d] (any row and head strides), newest float32 [slots, NEWEST_QUERIES, heads, d]. The
    type of `k_pool` selects the build of the kernels that the layer uses.
    """
    _, heads, d = q.shape
    if isinstance(device, HostDevice):
        device.call_host(_host_queries, q, spans.table, newest)
        return
    if spans.count:
        strides = np.int64(q.strides[0] // 4), np.int64(q.strides[1] // 4)
        args = (q, *strides, spans.table, newest, np.int32(heads), np.int32(d))
        grid = (spans.count, NEWEST_QUERIES, -(-heads * d // _THREADS))
        defines = {"KTYPE": kernel_type(k_pool, d)}
        device.launch("page_ranking", "store_queries", grid, (_THREADS,), args, defines=defines)
