"""Attention of single rows over KV pages of float32: softmax(scale q k^T) v per head.

A part is one row and one KV head. It goes through the row's pages in order, 64 keys at a time: their scores, the
largest so far, and the sums rescaled to it. Keys that the row does not see add exact zeros. So a row's bits depend on
its pages alone, not on the rows or threads beside it.
"""

from __future__ import annotations

import numpy as np

from luce.cpu_kernels.dimensions import MOST_GROUP, MOST_HEAD, PAGE
from luce.cpu_kernels.jit import compiled, compiled_as
from luce.cpu_kernels.thread_pool import run_job
from luce.cpu_kernels.vectors import (
    exp,
    first_lane,
    fma,
    load_floats,
    put_float,
    read_float,
    read_int,
    splat_float,
    store,
    total,
    word,
)

#: bytes of memory that a thread needs: scores of a page, and for each head of a group the sums
SCRATCH = 4 * PAGE + MOST_GROUP * (4 * MOST_HEAD + 8)
# int64 arguments: addresses of q, keys, values, out, positions, the rows' spans, spans, page table, first positions,
# counts, seen rows (0: none); strides of q's rows and heads; heads, KV heads, elements of a head, width of the table,
# window (0: none), bits of the scale as float32
_WORDS = 19
_NEVER = np.float32(-3e38)


@compiled
def _sees(key, position, window, seen, own, row):
    """Whether a row at `position` sees the key at position `key`; the row's span begins at `own`."""
    if seen != 0 and key >= own:
        place = key - own
        return place < 64 and (read_int(seen + row * 8 + place // 32 * 4) >> (place % 32)) & 1 != 0
    return key <= position and (window == 0 or key > position - window)


@compiled
def _put_scores(query, scale, keys, row_bytes, d, scores, first, position, window, seen, own, row):
    """The scores of a page's keys, _NEVER for those that the row does not see. Returns the largest."""
    most = _NEVER
    for key in range(PAGE):
        score = _NEVER
        if _sees(first + key, position, window, seen, own, row):
            dot = splat_float(0.0)
            for i in range(0, d * 4, 64):
                dot = fma(load_floats(query + i) * scale, load_floats(keys + key * row_bytes + i), dot)
            score = total(dot)
            most = max(most, score)
        put_float(scores + key * 4, score)
    return most


@compiled
def _add_page(values, row_bytes, d, scores, largest, before, state, sums):
    """Add a page's values by their scores to the sums of a head, which are relative to `before`, the largest score so
    far; afterwards they are relative to `largest`."""
    weight, shift = splat_float(0.0), splat_float(largest)
    for i in range(0, PAGE * 4, 64):
        # e^-3e38 is 0.
        shares = exp(load_floats(scores + i) - shift)
        store(scores + i, shares)
        weight = weight + shares
    shrink = exp(splat_float(before) - shift)
    put_float(state, largest)
    put_float(state + 4, read_float(state + 4) * first_lane(shrink) + total(weight))
    for i in range(0, d * 4, 64):
        mixed = load_floats(sums + i) * shrink
        for key in range(PAGE):
            share = read_float(scores + key * 4)
            if share != np.float32(0.0):
                mixed = fma(splat_float(share), load_floats(values + key * row_bytes + i), mixed)
        store(sums + i, mixed)


@compiled
def attend(arguments, part, scratch):
    """Part `part` = row * KV heads + KV head."""
    heads, kv_heads, d = word(arguments, 13), word(arguments, 14), word(arguments, 15)
    width, window, seen = word(arguments, 16), word(arguments, 17), word(arguments, 10)
    scale = splat_float(read_float(arguments + 18 * 8))
    row, kv_head, group = part // kv_heads, part % kv_heads, heads // kv_heads
    position = np.int64(read_int(word(arguments, 4) + row * 4))
    span = np.int64(read_int(word(arguments, 5) + row * 4))
    own = np.int64(read_int(word(arguments, 6) + span * 16 + 12))
    count = np.int64(read_int(word(arguments, 9) + span * 4))
    pages, firsts = word(arguments, 7) + span * width * 4, word(arguments, 8) + span * width * 4
    row_bytes = kv_heads * d * 4
    keys, values = word(arguments, 1) + kv_head * d * 4, word(arguments, 2) + kv_head * d * 4
    queries, head_bytes = word(arguments, 0) + row * word(arguments, 11), word(arguments, 12)
    queries += kv_head * group * head_bytes
    out = word(arguments, 3) + (row * heads + kv_head * group) * d * 4
    scores, states, sums = scratch, scratch + 4 * PAGE, scratch + 4 * PAGE + MOST_GROUP * 8
    for head in range(group):
        put_float(states + head * 8, _NEVER)
        put_float(states + head * 8 + 4, np.float32(0.0))
        for i in range(0, d * 4, 64):
            store(sums + head * d * 4 + i, splat_float(0.0))
    for page in range(count):
        first = np.int64(read_int(firsts + page * 4))
        # A row sees no key behind its own position, but for those of its span that `seen` names.
        behind = first > position and (seen == 0 or first > own + 63)
        before_window = window != 0 and first + PAGE <= min(position - window + 1, own)
        if behind or before_window:
            continue
        at = np.int64(read_int(pages + page * 4)) * PAGE * row_bytes
        for head in range(group):
            query, state = queries + head * head_bytes, states + head * 8
            most = _put_scores(query, scale, keys + at, row_bytes, d, scores, first, position, window, seen, own, row)
            if most != _NEVER:
                before = read_float(state)
                _add_page(values + at, row_bytes, d, scores, max(most, before), before, state, sums + head * d * 4)
    for head in range(group):
        whole = splat_float(read_float(states + head * 8 + 4))
        for i in range(0, d * 4, 64):
            store(out + head * d * 4 + i, load_floats(sums + head * d * 4 + i) / whole)


_ARRAYS = "float32[:, :, :], float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int32[::1], int32[::1]"
_PAGES = "int32[:, ::1], int32[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1]"


@compiled_as(f"void(int64, UniTuple(int64, 1), {_ARRAYS}, {_PAGES}, int64, float32)")
def attention(
    slot, kernels, q, keys, values, out, positions, row_span, spans, table, first, count, seen, window, scale
):
    """`attend` for all rows and KV heads. `seen` may be empty; `window` 0: none."""
    arguments = np.empty(_WORDS, np.int64)
    arguments[0], arguments[1], arguments[2] = q.ctypes.data, keys.ctypes.data, values.ctypes.data
    arguments[3], arguments[4], arguments[5] = out.ctypes.data, positions.ctypes.data, row_span.ctypes.data
    arguments[6], arguments[7], arguments[8] = spans.ctypes.data, table.ctypes.data, first.ctypes.data
    arguments[9], arguments[10] = count.ctypes.data, seen.ctypes.data if len(seen) > 0 else 0
    arguments[11], arguments[12], arguments[13], arguments[15] = q.strides[0], q.strides[1], q.shape[1], q.shape[2]
    arguments[14], arguments[16], arguments[17] = keys.shape[1], table.shape[1], window
    put_float(arguments.ctypes.data + 18 * 8, scale)
    run_job(slot, kernels[0], arguments.ctypes.data, len(q) * keys.shape[1])
