"""Gated short convolution over inputs that are kept in pages (LFM2)."""

from __future__ import annotations

from functools import partial

import numpy as np

from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import PageView, Resident, SpanArrays

_THREADS = 256


def write_inputs(device: Device, fused: Array, pool: Array, dest: Array) -> None:
    """pool[dest[r]] = b * x of row r: fused float32 [n, 3 h] of b, c and x side by side (any row stride), pool float32
    [rows, 1, h], dest int32 [n]."""
    h = pool.shape[2]
    if isinstance(device, HostDevice):
        device.call_host(_write_inputs, fused, pool, dest)
        return
    n = len(fused)
    if n:
        args = (pool, fused, np.int64(fused.strides[0] // 4), dest, np.int32(h))
        device.launch("short_conv", "write_inputs", (n, -(-h // _THREADS)), (_THREADS,), args)


def short_conv(
    device: Device,
    fused: Array,
    taps: Array,
    pool: Array,
    spans: SpanArrays,
    view: PageView,
    positions: Array,
) -> Array:
    """c * sum over the taps of taps[:, s] * u at position p - kernel + 1 + s, from the pool: float32 [n, h].

    `fused` and `pool` as in write_inputs, which has written the step's rows; taps float32 [h, kernel]; positions int32
    [n]. u is 0 before position 0. The view has the pages of the newest `kernel` positions of each span without a gap.
    """
    n, h = len(fused), pool.shape[2]
    if isinstance(device, HostDevice):
        where = spans.table, view.table, view.first, view.count
        return device.compute(partial(_host, taps), (n, h), fused, pool, *where)
    out = device.empty((n, h))
    if n:
        pages = (spans.row_span, view.table, view.first, np.int32(view.table.shape[1]), positions)
        sizes = (np.int64(fused.strides[0] // 4), np.int32(h), np.int32(taps.shape[1]))
        args = (out, fused, taps, pool, *pages, *sizes)
        device.launch("short_conv", "short_conv", (n, -(-h // _THREADS)), (_THREADS,), args)
    return out


def _write_inputs(fused: Array, pool: Array, dest: Array) -> None:
    h = pool.shape[2]
    pool[dest, 0] = fused[:, :h] * fused[:, 2 * h :]


def _host(taps: Array, fused: Array, pool: Array, spans: Array, table: Array, first: Array, count: Array) -> Array:
    n, h = len(fused), pool.shape[2]
    out = np.zeros((n, h), np.float32)
    for (_, start, rows, position), pages, begins, used in zip(spans.tolist(), table, first, count, strict=True):
        resident = Resident.of(pages[:used], begins[:used])
        _host_span(out[start : start + rows], taps, pool[resident.rows, 0], resident.positions, position)
    out *= fused[:, h : 2 * h]
    return out


def _host_span(out: Array, taps: Array, inputs: Array, at: Array | None, position: int) -> None:
    """The sums of a span's rows from `position` on; `inputs` are those at the positions `at`, or 0, 1, 2, ..."""
    first = 0 if at is None else int(at[0])
    kernel, rows = taps.shape[1], len(out)
    for tap in range(kernel):
        behind = position - kernel + 1 + tap
        skip = min(max(0, -behind), rows)
        out[skip:] += taps[:, tap] * inputs[behind + skip - first : max(behind + rows, 0) - first]
