"""Attention of rows over KV pages: softmax(scale q k^T) v per head, with a cap of the scores and sinks if there are.

Pages of other types than float32 become floats first, once for all rows of a part.

A part is some rows and one KV head. Each row goes through its pages in order, 64 keys at a time: their scores, the
largest so far, and the sums rescaled to it. Keys that the row does not see add exact zeros. A run of pages is summed by
itself, and then added to those before it. So a row's bits depend on its pages alone, not on the rows or threads beside
it. The rows of a part that have the same pages go through them together, so that a page is read from memory once for
all of them; of few rows, each run is a part.
"""

from __future__ import annotations

import numpy as np

from luce.cpu_kernels.dimensions import LANES, MOST_GROUP, MOST_HEAD, PAGE
from luce.cpu_kernels.jit import compiled, compiled_as, inlined
from luce.cpu_kernels.jobs import run_job
from luce.cpu_kernels.kv_page import F32, page_floats
from luce.cpu_kernels.memory import allocate, release, stack_words
from luce.cpu_kernels.vector_rows import add_products, load_rows, store_rows, zero_rows
from luce.cpu_kernels.vectors import (
    element,
    exp,
    first_lane,
    fma,
    load_floats,
    prefetch,
    put_float,
    read_float,
    read_int,
    splat_float,
    store,
    total,
    totals,
    word,
)

# int64 arguments: addresses of q, keys, values, out, positions, the rows' spans, spans, page table, first positions,
# counts, seen rows (0: none), sinks (0: none); strides of q's rows and heads; heads, KV heads, elements of a head,
# width of the table, window (0: none), bits of the scale and of the cap (0: none) as float32, rows, rows of a part; of
# keys and of values the type and the bytes of a head in the pool; runs of each row, and the addresses of the states and
# sums of each row's KV heads' runs' heads
_Q, _KEYS, _VALUES, _OUT, _POSITIONS, _ROW_SPAN, _SPANS, _TABLE, _FIRST, _COUNT, _SEEN, _SINKS = range(12)
_ROW_STRIDE, _HEAD_STRIDE, _HEADS, _KV_HEADS, _SIZE, _WIDTH, _WINDOW, _SCALE, _CAP, _ROWS, _PART = range(12, 23)
_KEY_TYPE, _KEY_BYTES, _VALUE_TYPE, _VALUE_BYTES, _RUNS, _RUN_STATES, _RUN_SUMS, _WORDS = range(23, 31)
# The thread's memory: a page's scores of a head, its products of 16 keys lane by lane, then for each row of a part and
# each head of the group the largest score, the sum of the weights, and the sums of the values, and the same of a run; a
# page's keys and values of other types than float32.
_OF_PRODUCTS = 4 * PAGE
_OF_STATES = _OF_PRODUCTS + 64 * LANES
_OF_SUMS = _OF_STATES + 8 * MOST_GROUP
_OF_RUN_STATES = _OF_SUMS + 4 * MOST_HEAD * MOST_GROUP
_OF_RUN_SUMS = _OF_RUN_STATES + 8 * MOST_GROUP
_OF_KEYS = _OF_RUN_SUMS + 4 * MOST_HEAD * MOST_GROUP
_OF_VALUES = _OF_KEYS + 4 * MOST_HEAD * PAGE
#: bytes of memory that a thread needs
SCRATCH = _OF_VALUES + 4 * MOST_HEAD * PAGE
#: most rows of a part, of spans with many
_MOST_ROWS = 8
# Positions of a run of pages, and the most rows and KV heads whose runs are parts.
_RUN, _FEW = 16 * PAGE, 64
_NEVER = np.float32(-3e38)


@compiled
def _sees(arguments, row, key):
    """Whether a row sees the key at position `key`."""
    own = element(arguments, _SPANS, element(arguments, _ROW_SPAN, row) * 4 + 3)
    if word(arguments, _SEEN) != 0 and key >= own:
        place = key - own
        return place < 64 and (element(arguments, _SEEN, row * 2 + place // 32) >> (place % 32)) & 1 != 0
    position, window = element(arguments, _POSITIONS, row), word(arguments, _WINDOW)
    return key <= position and (window == 0 or key > position - window)


@compiled
def _share(arguments, row, first):
    """Which keys of the page from position `first` on a row sees: 0 none, 1 some, 2 all."""
    own = element(arguments, _SPANS, element(arguments, _ROW_SPAN, row) * 4 + 3)
    position, window = element(arguments, _POSITIONS, row), word(arguments, _WINDOW)
    seen = word(arguments, _SEEN) != 0
    # A row sees no key behind its own position, but for those of its span that `seen` names.
    behind = first > position and (not seen or first > own + 63)
    before_window = window != 0 and first + PAGE <= min(position - window + 1, own)
    if behind or before_window:
        return 0
    last = first + PAGE - 1
    whole = last <= position and (window == 0 or first > position - window) and (not seen or last < own)
    return 2 if whole else 1


@inlined
def _capped(scores, cap):
    """cap tanh(scores / cap): tanh y = 1 - 2 / (e^2y + 1)."""
    one, two, most = splat_float(1.0), splat_float(2.0), splat_float(cap)
    return most * (one - two / (exp(two * scores / most) + one))


@compiled
def _put_scores(arguments, row, query, keys, row_bytes, ahead, head, group, first, scratch):
    """Write the scores of a page's keys, _NEVER for those that the row does not see. Returns the largest. `ahead`: the
    address of the next page's keys (0: none), of which each head of the group prefetches a share: all of them at once
    would hold up the products."""
    size, cap = word(arguments, _SIZE) * 4, read_float(arguments + _CAP * 8)
    scale, products = splat_float(read_float(arguments + _SCALE * 8)), scratch + _OF_PRODUCTS
    for key in range(0, PAGE, LANES):
        for half in range(0, LANES, 8):
            sums, at = zero_rows(8), keys + (key + half) * row_bytes
            for i in range(0, size, 64):
                sums = add_products(sums, load_floats(query + i) * scale, at + i, row_bytes)
            store_rows(sums, products + half * 64)
            if ahead != 0:
                for own in range(key + half + (head - key - half) % group, key + half + 8, group):
                    for i in range(0, size, 64):
                        prefetch(ahead + own * row_bytes + i)
        scores = totals(products)
        if cap != np.float32(0.0):
            scores = _capped(scores, cap)
        store(scratch + key * 4, scores)
    whole, most = _share(arguments, row, first) == 2, _NEVER
    for key in range(PAGE):
        if whole or _sees(arguments, row, first + key):
            most = max(most, read_float(scratch + key * 4))
        else:
            put_float(scratch + key * 4, _NEVER)
    return most


@compiled
def _add_page(arguments, values, row_bytes, ahead, head, group, largest, before, state, sums, scores):
    """Add a page's values by their scores to the sums of a head, which are relative to `before`, the largest score so
    far; afterwards they are relative to `largest`. `ahead`: as in _put_scores, of values."""
    size = word(arguments, _SIZE) * 4
    weight, shift = splat_float(0.0), splat_float(largest)
    for i in range(0, PAGE * 4, 64):
        # e^-3e38 is 0.
        shares = exp(load_floats(scores + i) - shift)
        store(scores + i, shares)
        weight = weight + shares
    shrink = exp(splat_float(before) - shift)
    put_float(state, largest)
    put_float(state + 4, read_float(state + 4) * first_lane(shrink) + total(weight))
    for i in range(0, size, 64):
        store(sums + i, load_floats(sums + i) * shrink)
    wide = size // 256 * 256
    for i in range(0, wide, 256):
        mixed = load_rows(4, sums + i)
        for key in range(PAGE):
            share = read_float(scores + key * 4)
            if ahead != 0 and key % group == head:
                for own in range(ahead + key * row_bytes + i, ahead + key * row_bytes + i + 256, 64):
                    prefetch(own)
            if share != np.float32(0.0):
                mixed = add_products(mixed, splat_float(share), values + key * row_bytes + i, 64)
        store_rows(mixed, sums + i)
    for i in range(wide, size, 64):
        rest = load_floats(sums + i)
        for key in range(PAGE):
            share = read_float(scores + key * 4)
            if share != np.float32(0.0):
                rest = fma(splat_float(share), load_floats(values + key * row_bytes + i), rest)
        store(sums + i, rest)


@compiled
def _row_bytes(arguments, kind):
    """Bytes between the rows of a page that attention reads; `kind`: the word of their type."""
    if word(arguments, kind) != F32:
        return word(arguments, _SIZE) * 4
    return word(arguments, _KV_HEADS) * word(arguments, _SIZE) * 4


@compiled
def _page(arguments, pool, kind, place, to):
    """The address of a page's first row in float32: in the pool, or `to`, where it is written; `place`: the head's in
    the pool; `pool` and `kind`: the words of the pool and its type."""
    own = word(arguments, kind + 1)
    rows = word(arguments, pool) + place * own
    if word(arguments, kind) == F32:
        return rows
    page_floats(word(arguments, kind), rows, word(arguments, _KV_HEADS) * own, word(arguments, _SIZE) * 4, to)
    return to


@compiled
def _ahead(arguments, pool, kind, place):
    """The address of the next page's first row in float32, whose prefetch is the heads' work. 0 for other types, whose
    page is prefetched here. `place`: the head's in the pool, -1 without a next page. The CPU's own prefetching loses
    rows that lie apart."""
    if place < 0:
        return 0
    size = word(arguments, kind + 1)
    rows, stride = word(arguments, pool) + place * size, word(arguments, _KV_HEADS) * size
    if word(arguments, kind) == F32:
        return rows
    for row in range(PAGE):
        for i in range(0, size, 64):
            prefetch(rows + row * stride + i)
    return 0


@compiled
def _clear(states, sums, count, size):
    """Write the states and sums of `count` heads that have seen no key."""
    for number in range(count):
        put_float(states + number * 8, _NEVER)
        put_float(states + number * 8 + 4, np.float32(0.0))
        for i in range(0, size, 64):
            store(sums + number * size + i, splat_float(0.0))


@compiled
def _fold(state, sums, later, later_sums, size):
    """Add the state and the sums of a later run of pages to a head's."""
    before, own = read_float(state), read_float(later)
    if own == _NEVER:
        return
    top = max(before, own)
    # A cleared state counts e^-3e38 = 0, and the only run e^0 = 1: its bits stay.
    shrink, share = exp(splat_float(before) - splat_float(top)), exp(splat_float(own) - splat_float(top))
    put_float(state, top)
    weight = read_float(state + 4) * first_lane(shrink) + read_float(later + 4) * first_lane(share)
    put_float(state + 4, weight)
    for i in range(0, size, 64):
        store(sums + i, fma(load_floats(later_sums + i), share, load_floats(sums + i) * shrink))


@compiled
def _run_end(arguments, span, page):
    """The first page of a span behind the run that has `page`."""
    first = word(arguments, _FIRST) + span * word(arguments, _WIDTH) * 4
    run, end = read_int(first + page * 4) // _RUN, page + 1
    while end < element(arguments, _COUNT, span) and read_int(first + end * 4) // _RUN == run:
        end += 1
    return end


@compiled
def _attend_run(arguments, begin, end, kv_head, pages, states, sums, scratch):
    """Let rows [begin, end) of one span attend to the pages [pages[0], pages[1]) by the heads of a KV head, and write
    their states and sums."""
    size, group = word(arguments, _SIZE) * 4, word(arguments, _HEADS) // word(arguments, _KV_HEADS)
    span, width = element(arguments, _ROW_SPAN, begin), word(arguments, _WIDTH)
    key_bytes, value_bytes = _row_bytes(arguments, _KEY_TYPE), _row_bytes(arguments, _VALUE_TYPE)
    for page in range(pages[0], pages[1]):
        first = element(arguments, _FIRST, span * width + page)
        place = element(arguments, _TABLE, span * width + page) * PAGE * word(arguments, _KV_HEADS) + kv_head
        keys = values = next_keys = next_values = 0
        for row in range(begin, end):
            if _share(arguments, row, first) == 0:
                continue
            if keys == 0:
                keys = _page(arguments, _KEYS, _KEY_TYPE, place, scratch + _OF_KEYS)
                values = _page(arguments, _VALUES, _VALUE_TYPE, place, scratch + _OF_VALUES)
                following = -1
                if page + 1 < element(arguments, _COUNT, span):
                    following = element(arguments, _TABLE, span * width + page + 1)
                    following = following * PAGE * word(arguments, _KV_HEADS) + kv_head
                next_keys = _ahead(arguments, _KEYS, _KEY_TYPE, following)
                next_values = _ahead(arguments, _VALUES, _VALUE_TYPE, following)
            queries = word(arguments, _Q) + row * word(arguments, _ROW_STRIDE)
            for head in range(group):
                query = queries + (kv_head * group + head) * word(arguments, _HEAD_STRIDE)
                number = (row - begin) * group + head
                most = _put_scores(arguments, row, query, keys, key_bytes, next_keys, head, group, first, scratch)
                if most != _NEVER:
                    state, before = states + number * 8, read_float(states + number * 8)
                    top, to = max(most, before), sums + number * size
                    _add_page(arguments, values, value_bytes, next_values, head, group, top, before, state, to, scratch)
            next_keys = next_values = 0


@compiled
def _put_result(arguments, row, head, state, sums):
    """Write a head's result from its sums."""
    size, whole = word(arguments, _SIZE) * 4, splat_float(read_float(state + 4))
    if word(arguments, _SINKS) != 0:
        # A sink far above all scores makes the sum infinite, and the result the right 0.
        sink = read_float(word(arguments, _SINKS) + head * 4)
        whole = whole + exp(splat_float(sink) - splat_float(read_float(state)))
    out = word(arguments, _OUT) + (row * word(arguments, _HEADS) + head) * size
    for i in range(0, size, 64):
        store(out + i, load_floats(sums + i) / whole)


@compiled
def _attend_span(arguments, begin, end, kv_head, scratch):
    """Rows [begin, end), which are of one span, and a KV head."""
    size, group = word(arguments, _SIZE) * 4, word(arguments, _HEADS) // word(arguments, _KV_HEADS)
    states, sums, heads = scratch + _OF_STATES, scratch + _OF_SUMS, (end - begin) * group
    run_states, run_sums = scratch + _OF_RUN_STATES, scratch + _OF_RUN_SUMS
    _clear(states, sums, heads, size)
    span, page = element(arguments, _ROW_SPAN, begin), 0
    while page < element(arguments, _COUNT, span):
        stop = _run_end(arguments, span, page)
        _clear(run_states, run_sums, heads, size)
        _attend_run(arguments, begin, end, kv_head, (page, stop), run_states, run_sums, scratch)
        for number in range(heads):
            own = sums + number * size
            _fold(states + number * 8, own, run_states + number * 8, run_sums + number * size, size)
        page = stop
    for row in range(begin, end):
        for head in range(group):
            number = (row - begin) * group + head
            _put_result(arguments, row, kv_head * group + head, states + number * 8, sums + number * size)


@compiled
def attend(arguments, part, scratch):
    """Part `part` = block of rows * KV heads + KV head."""
    kv_heads, most = word(arguments, _KV_HEADS), word(arguments, _PART)
    row = part // kv_heads * most
    stop = min(row + most, word(arguments, _ROWS))
    while row < stop:
        end = row + 1
        while end < stop and element(arguments, _ROW_SPAN, end) == element(arguments, _ROW_SPAN, row):
            end += 1
        _attend_span(arguments, row, end, part % kv_heads, scratch)
        row = end


@compiled
def attend_run(arguments, part, scratch):
    """Part `part` = (row * KV heads + KV head) * runs + run: the states and sums of a row's run."""
    kv_heads, runs = word(arguments, _KV_HEADS), word(arguments, _RUNS)
    row, kv_head = part // runs // kv_heads, part // runs % kv_heads
    size, group = word(arguments, _SIZE) * 4, word(arguments, _HEADS) // kv_heads
    states = word(arguments, _RUN_STATES) + part * group * 8
    sums = word(arguments, _RUN_SUMS) + part * group * size
    _clear(states, sums, group, size)
    span, page = element(arguments, _ROW_SPAN, row), 0
    for _ in range(part % runs):
        if page < element(arguments, _COUNT, span):
            page = _run_end(arguments, span, page)
    if page < element(arguments, _COUNT, span):
        stop = _run_end(arguments, span, page)
        _attend_run(arguments, row, row + 1, kv_head, (page, stop), states, sums, scratch)


@compiled
def fold_runs(arguments, part, scratch):
    """Part `part` = row * KV heads + KV head: its runs, in their order, to the results."""
    kv_heads, runs = word(arguments, _KV_HEADS), word(arguments, _RUNS)
    size, group = word(arguments, _SIZE) * 4, word(arguments, _HEADS) // kv_heads
    states, sums = scratch + _OF_STATES, scratch + _OF_SUMS
    _clear(states, sums, group, size)
    for run in range(part * runs, (part + 1) * runs):
        for head in range(group):
            number = run * group + head
            later, later_sums = word(arguments, _RUN_STATES) + number * 8, word(arguments, _RUN_SUMS) + number * size
            _fold(states + head * 8, sums + head * size, later, later_sums, size)
    for head in range(group):
        own = part % kv_heads * group + head
        _put_result(arguments, part // kv_heads, own, states + head * 8, sums + head * size)


@compiled
def _most_runs(arguments, spans):
    """Of the spans."""
    most = 1
    for span in range(spans):
        runs, page = 0, 0
        while page < element(arguments, _COUNT, span):
            page, runs = _run_end(arguments, span, page), runs + 1
        most = max(most, runs)
    return most


_ARRAYS = "float32[:, :, :], uint8[:, :, ::1], uint8[:, :, ::1], float32[:, :, ::1], int32[::1], int32[::1]"
_PAGES = "int32[:, ::1], int32[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1]"


_FACTS = "int64, float32, float32, float32[::1], int64, int64, boolean"


@compiled_as(f"void(int64, UniTuple(int64, 3), {_ARRAYS}, {_PAGES}, {_FACTS})")
def attention(
    slot,
    kernels,
    q,
    keys,
    values,
    out,
    positions,
    row_span,
    spans,
    table,
    first,
    count,
    seen,
    window,
    scale,
    cap,
    sinks,
    key_type,
    value_type,
    many,
):
    """`attend` for all rows and KV heads. Pools are bytes, of the types in kv_page. `seen` and `sinks` may
    be empty; `window` and `cap` 0: none; `many`: a span has many rows."""
    n, heads, d = q.shape
    kv_heads = keys.shape[1]
    part = max(1, min(_MOST_ROWS, MOST_GROUP // (heads // kv_heads))) if many else 1
    arguments = stack_words(_WORDS)
    arguments[_Q], arguments[_ROW_STRIDE], arguments[_HEAD_STRIDE] = q.ctypes.data, q.strides[0], q.strides[1]
    arguments[_KEYS], arguments[_VALUES], arguments[_OUT] = keys.ctypes.data, values.ctypes.data, out.ctypes.data
    arguments[_KEY_TYPE], arguments[_KEY_BYTES] = key_type, keys.shape[2]
    arguments[_VALUE_TYPE], arguments[_VALUE_BYTES] = value_type, values.shape[2]
    arguments[_POSITIONS], arguments[_ROW_SPAN] = positions.ctypes.data, row_span.ctypes.data
    arguments[_SPANS], arguments[_TABLE], arguments[_FIRST] = spans.ctypes.data, table.ctypes.data, first.ctypes.data
    arguments[_COUNT], arguments[_SEEN] = count.ctypes.data, seen.ctypes.data if len(seen) > 0 else 0
    arguments[_SINKS] = sinks.ctypes.data if len(sinks) > 0 else 0
    arguments[_HEADS], arguments[_KV_HEADS], arguments[_SIZE] = heads, kv_heads, d
    arguments[_WIDTH], arguments[_WINDOW] = table.shape[1], window
    arguments[_ROWS], arguments[_PART] = n, part
    put_float(arguments.ctypes.data + _SCALE * 8, scale)
    put_float(arguments.ctypes.data + _CAP * 8, cap)
    runs = 1 if many or n * kv_heads > _FEW else _most_runs(arguments.ctypes.data, len(count))
    if runs == 1:
        run_job(slot, kernels[0], arguments, (n + part - 1) // part * kv_heads)
        return
    # A row alone has no more parts than KV heads; its runs are parts as well.
    memory = allocate((n * heads * runs * (d + 2) * 4 + 64,))
    arguments[_RUNS], arguments[_RUN_SUMS] = runs, (memory + 63) // 64 * 64
    arguments[_RUN_STATES] = arguments[_RUN_SUMS] + n * heads * runs * d * 4
    run_job(slot, kernels[1], arguments, n * kv_heads * runs)
    run_job(slot, kernels[2], arguments, n * kv_heads)
    release((memory,))
