"""Attention over KV pages.

A pool is [pages * PAGE, kv_heads, n]: head_dim numbers, or the bytes of their quant blocks (luce.ops.kvtype). A span
reads the pages of its PageView in order. Key j of page i has the position first[i] + j, and a row at position p sees it
iff p - window < first[i] + j <= p. Pages are in the order of positions, so the order of the sums depends neither on the
places of the pages nor on the number of rows.

If the view has `seen`, which lists the rows of its span that each row sees, that rule holds only for keys before the
span. Row r of the span then has the position `positions[r]`, and its key is entry `span position + r` of the sequence.
Draft trees and draft blocks, whose rows see each other both ways, are such spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from luce.cpu_kernels.dimensions import LANES, MOST_GROUP, MOST_HEAD
from luce.ops import attention_mma
from luce.ops.activation import sigmoid_gate, softplus_gate
from luce.ops.attention_mma import AttentionInputs, Gate
from luce.ops.fp16 import Fp16Rows, Halves, sigmoid_gate_to_fp16, sigmoid_halves_to_fp16
from luce.ops.kvtype import dequantise, pool_type
from luce.ops.matmul import FEW_ROWS
from luce.ops.quantise import SECTION, Quantised, empty_quantised
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import PageView, Resident, SpanArrays

# Head dimensions that kernels/attention.cu is compiled for, and pages of one of its splits. Another split length
# changes the order of the sums.
_HEADS = (32, 64, 128, 256, 512, 576)
_SPLIT = 4
#: From so many blocks on, tiles alone fill a GPU, and each block takes all splits of its keys. With fewer blocks and at
#: least MIN_SPLITS splits, each split gets a block of its own, and its results pass through memory. Both ways give the
#: same bits.
ENOUGH_BLOCKS = 256
MIN_SPLITS = 3
# Of compiled code, for rows that see all rows before them.
_NO_BITS = np.empty((0, 2), np.int32)
_NO_SINKS = np.empty(0, np.float32)
#: most float32 values of splits in memory at a time: 64 MiB
BUFFER_VALUES = 1 << 24


def attention(device: Device, inputs: AttentionInputs) -> Array:
    """softmax(scale q k^T) v per head over the keys that a row sees, in float32: float32 [n, heads, d] contiguous.

    With a softcap (Gemma 2, arXiv 2408.00118, section 2) and sinks (gpt-oss) if the inputs have them.
    """
    return _attend(device, inputs)


def gated_attention(
    device: Device, inputs: AttentionInputs, gate: Gate | None, *, int8_group: int = 0, top: int | None = None
) -> Array | Quantised | Fp16Rows:
    """attention, times the gate if there is one: float32 [n, heads * d].

    For 0 < n <= 16 rows on a GPU with a nonzero `int8_group`: quantised in such groups, if one kernel can do that too.
    With `top`, for more rows on a GPU: as fp16 rows with this top, if that takes no further kernel.
    """
    n, heads, d = inputs.q.shape
    spans = inputs.spans
    short = not isinstance(device, HostDevice) and n > 0 and spans.longest <= FEW_ROWS
    if short and (tiles := attention_mma.tiles(device, inputs)):
        rows = empty_quantised(device, n, heads * d, int8_group) if int8_group and d % SECTION == 0 else None
        out = rows or device.empty((n, heads * d))
        attention_mma.launch(device, out, inputs, tiles, gate)
        return out
    if top is not None and gate is not None and gate.kind == "sigmoid" and n:
        if isinstance(gate.values, Halves):
            return sigmoid_halves_to_fp16(device, _attend(device, inputs), gate.values, top)
        return sigmoid_gate_to_fp16(device, _attend(device, inputs), gate.values, top)
    return gate_heads(device, _attend(device, inputs), gate)


def gate_heads(device: Device, mixed: Array, gate: Gate | None) -> Array:
    """The results of attention times the gate if there is one: float32 [n, heads, d] -> [n, heads * d]."""
    if gate is None:
        return mixed.reshape(len(mixed), -1)
    assert not isinstance(gate.values, Halves)
    return (sigmoid_gate if gate.kind == "sigmoid" else softplus_gate)(device, mixed, gate.values)


def _attend(device: Device, inputs: AttentionInputs) -> Array:
    out = device.empty(inputs.q.shape)
    if isinstance(device, CpuDevice) and _compiles(inputs):
        _compiled(device, out, inputs)
    elif isinstance(device, HostDevice):
        _host(device, out, inputs)
    elif tiles := attention_mma.tiles(device, inputs):
        attention_mma.launch(device, out, inputs, tiles)
    else:
        _launch(device, out, inputs)
    return out


def _launch(device: Device, out: Array, inputs: AttentionInputs) -> None:
    spans, view = inputs.spans, inputs.view
    (n, heads, d), kv_heads = inputs.q.shape, inputs.k_pool.shape[1]
    if d % 8 or d > _HEADS[-1] or heads % kv_heads:
        raise ValueError(f"attention: no kernel for {heads} heads of {d} over {kv_heads} KV heads")
    group = heads // kv_heads
    head = next(size for size in _HEADS if size >= d)
    queries = 4 if spans.longest * group <= 4 else 16
    defines = {"HEAD": head, "QUERIES": queries, "SPLIT": _SPLIT} | inputs.types
    block = ({512: 256, 576: 576}.get(head, 128),)
    # Upper bounds that hold wherever spans begin, so that the host reads no length back from the device.
    tiles = n * group // queries + spans.count
    width = view.table.shape[1]
    splits = (width + 2 * _SPLIT - 2) // _SPLIT
    seen = () if view.seen is None else (view.seen,)
    common = (*inputs.read, inputs.positions, *inputs.sizes, inputs.limit, *seen, *inputs.cap)
    if splits < MIN_SPLITS or tiles * kv_heads >= ENOUGH_BLOCKS:
        device.launch("attention", "attention", (tiles, kv_heads), block, (out, inputs.sinks, *common), defines=defines)
        return
    # The buffer bounds the splits of a launch; each fold continues the one before.
    batch = min(splits, max(1, BUFFER_VALUES // (n * heads * d)))
    values = device.empty((n, heads, batch, d))
    state = device.empty((n, heads, batch, 2))
    total = device.empty((n, heads, 2))
    for base in range(0, splits, batch):
        at = np.int32(base)
        grid = (tiles, kv_heads, batch)
        device.launch("attention", "attention_split", grid, block, (values, state, at, *common), defines=defines)
        last = np.int32(base + batch >= splits)
        args = (out, total, values, state, at, np.int32(batch), last, spans.row_span, view.first, view.count)
        sizes = (np.int32(width), np.int32(d))
        device.launch(
            "attention", "attention_fold", (n, heads), (head // 2,), (*args, *sizes, inputs.sinks), defines=defines
        )


def _compiles(inputs: AttentionInputs) -> bool:
    """Whether compiled code reads these heads."""
    (_, heads, d), kv_heads = inputs.q.shape, inputs.k_pool.shape[1]
    return bool(d % LANES == 0 and d <= MOST_HEAD and heads // kv_heads <= MOST_GROUP)


def _compiled(device: CpuDevice, out: Array, inputs: AttentionInputs) -> None:
    """By luce.cpu_kernels.attention."""
    view, spans, d = inputs.view, inputs.spans, inputs.q.shape[2]
    pools = inputs.k_pool, inputs.v_pool
    arrays = (inputs.q, *(pool.view(np.uint8) for pool in pools), out, inputs.positions, spans.row_span, spans.table)
    pages = (view.table, view.first, view.count, _NO_BITS if view.seen is None else view.seen)
    facts = inputs.window or 0, np.float32(inputs.scale), np.float32(inputs.softcap)
    sinks = _NO_SINKS if inputs.sinks is None else inputs.sinks
    types = (int(pool_type(pool, d)) for pool in pools)
    device.run(device.kernels.attention, *arrays, *pages, *facts, sinks, *types, spans.longest > FEW_ROWS)


def _host(device: HostDevice, out: Array, inputs: AttentionInputs) -> None:
    """By NumPy."""
    spans, view = inputs.spans, inputs.view
    if not isinstance(device, CpuDevice):
        _attend_spans(out, inputs, spans.table.tolist(), view.resident)
        return
    # A captured step passes these at each replay.
    arrays = [inputs.q, inputs.k_pool, inputs.v_pool, inputs.positions, spans.table, view.table, view.first, view.count]
    given = [array for array in (view.seen, inputs.sinks) if array is not None]
    bare = _Bare(inputs.scale, inputs.window, inputs.softcap, view.seen is not None, inputs.sinks is not None)
    device.call_host(partial(_attend_arrays, bare), out, *arrays, *given)


@dataclass(frozen=True)
class _Bare:
    """AttentionInputs without arrays, and which of those there are that need not be."""

    scale: float
    window: int | None
    softcap: float
    seen: bool
    sinks: bool


def _attend_arrays(
    bare: _Bare,
    out: Array,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    positions: Array,
    spans: Array,
    table: Array,
    first: Array,
    count: Array,
    *given: Array,
) -> None:
    rest = iter(given)
    seen, sinks = next(rest) if bare.seen else None, next(rest) if bare.sinks else None
    # NumPy's work reads no row_span, and no place to write to.
    none = np.empty(0, np.int32)
    view, own = PageView(table, first, count, none, seen), SpanArrays(spans, none, len(spans), 0)
    inputs = AttentionInputs(q, k_pool, v_pool, own, view, positions, bare.scale, bare.window, bare.softcap, sinks)
    _attend_spans(out, inputs, spans.tolist(), view.resident)


def _attend_spans(
    out: Array, inputs: AttentionInputs, spans: Sequence[Sequence[int]], residents: Sequence[Resident]
) -> None:
    q, k_pool, v_pool, view = inputs.q, inputs.k_pool, inputs.v_pool, inputs.view
    positions, scale, window = inputs.positions, inputs.scale, inputs.window
    (_, heads, d), kv_heads = q.shape, k_pool.shape[1]
    group = heads // kv_heads
    for (_, start, rows, position), resident in zip(spans, residents, strict=True):
        at, keys, values = resident.positions, k_pool[resident.rows], v_pool[resident.rows]
        if at is None:
            # All pages are resident: cut the keys off after the last row.
            keys, values = keys[: position + rows], values[: position + rows]
        keys, values = dequantise(keys, d), dequantise(values, d)
        if view.seen is not None:
            at = np.arange(len(keys), dtype=np.int32) if at is None else at
            for row in range(start, start + rows):
                own_keys = _sees(view.seen[row], at, position, int(positions[row]), window)
                _host_row(inputs, row, keys[own_keys], values[own_keys], out[row])
            continue
        if rows <= FEW_ROWS:
            for row in range(rows):
                end = position + row + 1
                low = 0 if window is None else max(0, end - window)
                seen = slice(*((low, end) if at is None else np.searchsorted(at, (low, end))))
                _host_row(inputs, start + row, keys[seen], values[seen], out[start + row])
            continue
        own = slice(start, start + rows)
        query = q[own].reshape(rows, kv_heads, group, d).transpose(1, 2, 0, 3).reshape(kv_heads, group * rows, d)
        query = query * np.float32(scale)
        scores = _capped(np.matmul(query, keys.transpose(1, 2, 0)), inputs.softcap)
        if at is None:
            at = np.arange(keys.shape[0], dtype=np.int32)
        here = positions[own, None]
        hidden = at > here
        if window is not None:
            hidden |= at <= here - window
        scores.reshape(kv_heads, group, rows, -1)[:, :, hidden] = -np.inf
        sinks = None if inputs.sinks is None else np.repeat(inputs.sinks.reshape(kv_heads, group), rows, axis=1)
        mixed = _weighted(scores, values, sinks)
        out[own] = mixed.reshape(kv_heads, group, rows, d).transpose(2, 0, 1, 3).reshape(rows, heads, d)


def _host_row(inputs: AttentionInputs, row: int, keys: Array, values: Array, out: Array) -> None:
    """One row alone, so that its bits do not depend on its neighbours: out [heads, d]; keys and values [n, kv_heads, d]
    are those that the row sees."""
    q = inputs.q[row]
    (heads, d), kv_heads = q.shape, keys.shape[1]
    query = (q * np.float32(inputs.scale)).reshape(kv_heads, heads // kv_heads, d)
    # OpenBLAS multiplies a tall matrix by a narrow one twice as fast as the transposed product (650 keys: 36, 73 us).
    scores = np.ascontiguousarray(np.matmul(keys.transpose(1, 0, 2), query.transpose(0, 2, 1)).transpose(0, 2, 1))
    sinks = None if inputs.sinks is None else inputs.sinks.reshape(kv_heads, heads // kv_heads)
    out[...] = _weighted(_capped(scores, inputs.softcap), values, sinks).reshape(heads, d)


def _capped(scores: Array, cap: float) -> Array:
    if cap:
        scores /= np.float32(cap)
        np.tanh(scores, out=scores)
        scores *= np.float32(cap)
    return scores


def _weighted(scores: Array, values: Array, sinks: Array | None) -> Array:
    """Values [n, kv_heads, d] weighted by the softmax of scores [kv_heads, queries, n], which it overwrites; sinks
    [kv_heads, queries] join the sums: [kv_heads, queries, d]."""
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        # A sink far above all scores makes the sum infinite and the result the right 0.
        with np.errstate(over="ignore"):
            total += np.exp(sinks[..., None] - top)
    mixed = np.matmul(scores, values.transpose(1, 0, 2))
    mixed /= total
    return mixed


def _sees(seen: Array, at: NDArray[np.int32], own: int, position: int, window: int | None) -> NDArray[np.intp]:
    """Indices of the keys that a row sees: keys at `at`, row at `position`, span at `own`; seen int32 [2], its bits."""
    bits = np.unpackbits(np.ascontiguousarray(seen).view(np.uint8), bitorder="little").astype(np.bool_)
    past = at < own if window is None else (at < own) & (at > position - window)
    place = at - own
    return np.flatnonzero(np.where(place < 0, past, (place < 64) & bits[np.clip(place, 0, 63)]))
