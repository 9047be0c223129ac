"""Gated DeltaNet between its two products, row by row: causal convolution, gated delta rule, gated output norm (the
formulas of luce.ops.deltanet).

A part is a span and a value head. BLOCK rows of the span are convolved at a time. Then the transposed state is advanced
16 of its rows at a time, which stay in the first-level cache for all rows of the block. Without matrix instructions the
chunked form of long spans takes as many multiplications, so there is none here, and a prompt has the same bits however
it is cut.

S' = fade S + k u^T gives q^T S' = fade q^T S + (q^T k) u^T: both sums over a row of the transposed state are of the
state before the row of x, and it is read once for them.
"""

from __future__ import annotations

import math

import numpy as np

from luce.cpu_kernels.dimensions import DELTA_BLOCK as BLOCK
from luce.cpu_kernels.dimensions import DELTA_FACTORS as _FACTORS
from luce.cpu_kernels.dimensions import DELTA_VECTORS as _VECTORS
from luce.cpu_kernels.dimensions import LANES, MOST_DELTA_HEAD, TREE_ROWS
from luce.cpu_kernels.jit import compiled, compiled_as
from luce.cpu_kernels.jobs import run_job
from luce.cpu_kernels.memory import stack_words
from luce.cpu_kernels.vector_rows import add_products, store_rows, update_rows, zero_rows
from luce.cpu_kernels.vectors import (
    element,
    exp,
    fma,
    load_floats,
    put_float,
    read_float,
    splat_float,
    square_root,
    store,
    total,
    totals,
    word,
)

# int64 arguments. Addresses: x, the weights of the convolution float32 [taps, channels], the other weights, the states
# of luce.ops.deltanet.RecurrentState, the arrays of luce.runtime.step.SpanArrays (0: none), out. Then sizes: bytes from
# row to row of x, value heads, key heads, elements of a head, taps, most speculative rows, bits of eps as float32.
_X, _FILTERS, _DECAY, _BIAS, _NORM, _MEMORY, _PAST, _KEPT, _FADES, _SPANS, _PENDING, _BRANCHES, _OUT = range(13)
_STRIDE, _HEADS, _KEY_HEADS, _SIZE, _TAPS, _MOST, _EPS, _WORDS = range(13, 21)
# The vectors that the thread's memory has for each row of a block: q, k, v, what the row adds to the state along its
# key, and its output.
_QUERY, _KEY, _VALUE, _CHANGE, _ANSWER = range(5)
# The factors of a row of a block, in bytes: e^g, b and q^T k.
_FADE, _RATE, _OVERLAP = 0, 4, 8
# The thread's memory: a state, the vectors and factors of a block's rows, and the sums of 16 rows of the state with a
# key and with a query, lane by lane.
_OF_ROWS = 4 * MOST_DELTA_HEAD * MOST_DELTA_HEAD
_OF_FACTORS = _OF_ROWS + 4 * MOST_DELTA_HEAD * BLOCK * _VECTORS
_OF_KEY = _OF_FACTORS + BLOCK * _FACTORS
_OF_QUERY = _OF_KEY + LANES * 64
# The vectors of a speculative row: its inputs of q, k and v, its key and its change.
_KEPT_KEY, _KEPT_CHANGE, _KEPT_VECTORS = 3, 4, 5
# Numbers that `branches` has for a span: two lists, each with its length in front.
_LIST = 1 + TREE_ROWS


@compiled
def _entry(arguments, part, column):
    """Slot, start, rows or position of a part's span."""
    return element(arguments, _SPANS, part // word(arguments, _HEADS) * 4 + column)


@compiled
def _before(arguments, part):
    """The number of rows of the step that a span continues."""
    if word(arguments, _BRANCHES) == 0:
        return np.int64(0)
    return element(arguments, _BRANCHES, (part // word(arguments, _HEADS) * 2 + 1) * _LIST)


@compiled
def _row(arguments, part, place):
    """The row of the step at `place` among the rows that a span continues and its own."""
    before = _before(arguments, part)
    if place < before:
        return element(arguments, _BRANCHES, (part // word(arguments, _HEADS) * 2 + 1) * _LIST + 1 + place)
    return _entry(arguments, part, 1) + place - before


@compiled
def _address(arguments, part, place):
    """The address of this row of x."""
    return word(arguments, _X) + _row(arguments, part, place) * word(arguments, _STRIDE)


@compiled
def _channels(arguments):
    return (2 * word(arguments, _KEY_HEADS) + word(arguments, _HEADS)) * word(arguments, _SIZE)


@compiled
def _vector(arguments, part, kind):
    """Bytes in front of q, k or v (kind 0, 1, 2) of a part's head in a row of x."""
    key_heads, head = word(arguments, _KEY_HEADS), part % word(arguments, _HEADS)
    number = 2 * key_heads + head if kind == 2 else kind * key_heads + head % key_heads
    return number * word(arguments, _SIZE) * 4


@compiled
def _state(arguments, part):
    """The number of a part's state among those of all slots."""
    return _entry(arguments, part, 0) * word(arguments, _HEADS) + part % word(arguments, _HEADS)


@compiled
def _past(arguments, part, place):
    """The address of entry `place` of a state's past: float32 [3, d]."""
    number = _state(arguments, part) * (word(arguments, _TAPS) - 1) + place
    return word(arguments, _PAST) + number * 3 * word(arguments, _SIZE) * 4


@compiled
def _kept(arguments, part, place, vector):
    """The address of a vector of a state's speculative row `place`."""
    number = (_state(arguments, part) * word(arguments, _MOST) + place) * _KEPT_VECTORS + vector
    return word(arguments, _KEPT) + number * word(arguments, _SIZE) * 4


@compiled
def _kept_fade(arguments, part, place):
    """The address of the e^g of a state's speculative row `place`."""
    return word(arguments, _FADES) + (_state(arguments, part) * word(arguments, _MOST) + place) * 4


@compiled
def _copy(to, source, size):
    for i in range(0, size, 64):
        store(to + i, load_floats(source + i))


@compiled
def _dot(a, b, size):
    products = splat_float(0.0)
    for i in range(0, size, 64):
        products = fma(load_floats(a + i), load_floats(b + i), products)
    return total(products)


@compiled
def _scale(vector, size, factor):
    factors = splat_float(factor)
    for i in range(0, size, 64):
        store(vector + i, load_floats(vector + i) * factors)


@compiled
def _convolve(arguments, part, place, kind, to):
    """Write q, k or v of a row: silu of the convolution of the row and those in front of it."""
    taps, size, vector = word(arguments, _TAPS), word(arguments, _SIZE) * 4, _vector(arguments, part, kind)
    for i in range(0, size, 64):
        store(to + i, splat_float(0.0))
    for tap in range(taps):
        row = place - (taps - 1) + tap
        if row >= 0:
            source = _address(arguments, part, row) + vector
        elif _entry(arguments, part, 3) != 0:
            source = _past(arguments, part, row + taps - 1) + kind * size
        else:
            continue
        weights = word(arguments, _FILTERS) + tap * _channels(arguments) * 4 + vector
        for i in range(0, size, 64):
            store(to + i, fma(load_floats(source + i), load_floats(weights + i), load_floats(to + i)))
    one, zero = splat_float(1.0), splat_float(0.0)
    for i in range(0, size, 64):
        value = load_floats(to + i)
        store(to + i, value / (one + exp(zero - value)))


@compiled
def _prepare(arguments, part, place, vectors, factors):
    """Write the vectors and factors of a row."""
    heads, size = word(arguments, _HEADS), word(arguments, _SIZE) * 4
    head, step = part % heads, BLOCK * size
    for kind in range(3):
        _convolve(arguments, part, place, kind, vectors + kind * step)
    query, key, one, tiny = vectors + _QUERY * step, vectors + _KEY * step, np.float32(1.0), np.float32(1e-6)
    _scale(key, size, one / square_root(_dot(key, key, size) + tiny))
    _scale(query, size, one / square_root((_dot(query, query, size) + tiny) * np.float32(size // 4)))
    alpha = _address(arguments, part, place) + _channels(arguments) * 4 + heads * size + head * 4
    beta = np.float64(read_float(alpha + heads * 4))
    decay = np.float64(read_float(word(arguments, _DECAY) + head * 4))
    raised = np.float64(read_float(alpha)) + np.float64(read_float(word(arguments, _BIAS) + head * 4))
    softplus = math.log1p(math.exp(raised)) if raised <= 20.0 else float(raised)
    put_float(factors + _FADE, np.float32(math.exp(decay * softplus)))
    put_float(factors + _RATE, np.float32(1.0 / (1.0 + math.exp(-beta))))
    put_float(factors + _OVERLAP, _dot(query, key, size))


@compiled
def _update(state, size, fade, key, change):
    """16 rows of a state: fade * them + change key^T."""
    factor = splat_float(fade)
    for row in range(0, LANES, 8):
        for i in range(0, size, 64):
            update_rows(8, state + row * size + i, size, factor, load_floats(key + i), change + row * 4)


@compiled
def _advance(state, size, vectors, factors, value, scratch):
    """Take 16 rows of a state, from number `value` on, through a row of x: write its changes of them, and outputs."""
    step, rows = BLOCK * size, state + value * size
    query, key, own = vectors + _QUERY * step, vectors + _KEY * step, vectors + value * 4
    for row in range(0, LANES, 8):
        seen, asked = zero_rows(8), zero_rows(8)
        for i in range(0, size, 64):
            seen = add_products(seen, load_floats(key + i), rows + row * size + i, size)
            asked = add_products(asked, load_floats(query + i), rows + row * size + i, size)
        store_rows(seen, scratch + _OF_KEY + row * 64)
        store_rows(asked, scratch + _OF_QUERY + row * 64)
    fade, rate = splat_float(read_float(factors + _FADE)), splat_float(read_float(factors + _RATE))
    change = rate * (load_floats(own + _VALUE * step) - fade * totals(scratch + _OF_KEY))
    store(own + _CHANGE * step, change)
    overlap = splat_float(read_float(factors + _OVERLAP))
    store(own + _ANSWER * step, fma(overlap, change, fade * totals(scratch + _OF_QUERY)))
    _update(rows, size, read_float(factors + _FADE), key, own + _CHANGE * step)


@compiled
def _write_output(arguments, part, place, answer):
    """rms(output of the state) * norm * silu(z) of a row."""
    heads, size = word(arguments, _HEADS), word(arguments, _SIZE) * 4
    norm, gate = word(arguments, _NORM), _channels(arguments) * 4 + part % heads * size
    gate += _address(arguments, part, place)
    out = word(arguments, _OUT) + (_row(arguments, part, place) * heads + part % heads) * size
    mean = _dot(answer, answer, size) / np.float32(size // 4)
    scale = splat_float(square_root(mean + read_float(arguments + _EPS * 8)))
    one, zero = splat_float(1.0), splat_float(0.0)
    for i in range(0, size, 64):
        z = load_floats(gate + i)
        gated = load_floats(norm + i) * (z / (one + exp(zero - z)))
        store(out + i, load_floats(answer + i) / scale * gated)


@compiled
def _keep(arguments, part, place, vectors, factors):
    """Store a speculative row."""
    before, size = _before(arguments, part), word(arguments, _SIZE) * 4
    # Among the rows of the tree, whose root is the first row that a branch continues.
    number = place - before
    if before != 0:
        number = _row(arguments, part, place) - _row(arguments, part, 0)
    for kind in range(3):
        source = _address(arguments, part, place) + _vector(arguments, part, kind)
        _copy(_kept(arguments, part, number, kind), source, size)
    _copy(_kept(arguments, part, number, _KEPT_KEY), vectors + _KEY * BLOCK * size, size)
    _copy(_kept(arguments, part, number, _KEPT_CHANGE), vectors + _CHANGE * BLOCK * size, size)
    put_float(_kept_fade(arguments, part, number), read_float(factors + _FADE))


@compiled
def _leave_past(arguments, part):
    """Write the inputs of a span's last rows for the next span."""
    size, most, rows = word(arguments, _SIZE) * 4, word(arguments, _TAPS) - 1, _entry(arguments, part, 2)
    for to in range(most):
        place = to + rows
        for kind in range(3):
            at = _past(arguments, part, to) + kind * size
            if place >= most:
                _copy(at, _address(arguments, part, place - most) + _vector(arguments, part, kind), size)
            elif _entry(arguments, part, 3) != 0:
                _copy(at, _past(arguments, part, place) + kind * size, size)
            else:
                for i in range(0, size, 64):
                    store(at + i, splat_float(0.0))


@compiled
def accept(arguments, part, scratch):
    """Take memory and past of a state through the speculative rows that a span accepts. Part `part` = span * value
    heads + head."""
    span, size, most = part // word(arguments, _HEADS), word(arguments, _SIZE) * 4, word(arguments, _TAPS) - 1
    branches = word(arguments, _BRANCHES) != 0
    count = element(arguments, _BRANCHES, 2 * span * _LIST) if branches else element(arguments, _PENDING, 2 * span)
    if count == 0:
        return
    memory = word(arguments, _MEMORY) + _state(arguments, part) * size // 4 * size
    for value in range(0, size // 4, LANES):
        for number in range(count):
            row = element(arguments, _BRANCHES, 2 * span * _LIST + 1 + number) if branches else number
            key, change = _kept(arguments, part, row, _KEPT_KEY), _kept(arguments, part, row, _KEPT_CHANGE)
            fade = read_float(_kept_fade(arguments, part, row))
            _update(memory + value * size, size, fade, key, change + value * 4)
    for to in range(most):
        place = to + count - most
        source = _past(arguments, part, to + count)
        if place >= 0:
            row = element(arguments, _BRANCHES, 2 * span * _LIST + 1 + place) if branches else place
            source = _kept(arguments, part, row, 0)
        _copy(_past(arguments, part, to), source, 3 * size)


@compiled
def advance(arguments, part, scratch):
    """Compute the rows of a span for a head. Part `part` = span * value heads + head."""
    size, before = word(arguments, _SIZE) * 4, _before(arguments, part)
    rows = before + _entry(arguments, part, 2)
    speculative = False
    if word(arguments, _PENDING) != 0:
        speculative = element(arguments, _PENDING, part // word(arguments, _HEADS) * 2 + 1) != 0
    state = word(arguments, _MEMORY) + _state(arguments, part) * size // 4 * size
    if speculative:
        _copy(scratch, state, size // 4 * size)
        state = scratch
    if _entry(arguments, part, 3) == 0:
        for i in range(0, size // 4 * size, 64):
            store(state + i, splat_float(0.0))
    vectors, factors = scratch + _OF_ROWS, scratch + _OF_FACTORS
    for first in range(0, rows, BLOCK):
        some = min(BLOCK, rows - first)
        for row in range(some):
            _prepare(arguments, part, first + row, vectors + row * size, factors + row * _FACTORS)
        for value in range(0, size // 4, LANES):
            for row in range(some):
                _advance(state, size, vectors + row * size, factors + row * _FACTORS, value, scratch)
        for row in range(max(0, before - first), some):
            own = vectors + row * size
            _write_output(arguments, part, first + row, own + _ANSWER * BLOCK * size)
            if speculative:
                _keep(arguments, part, first + row, own, factors + row * _FACTORS)
    if not speculative:
        _leave_past(arguments, part)


_WEIGHTS = "float32[:, ::1], float32[::1], float32[::1], float32[::1]"
_STATES = "float32[:, :, :, ::1], float32[:, :, :, :, ::1], float32[:, :, :, :, ::1], float32[:, :, ::1]"
_ROWS = "int32[:, ::1], int32[:, ::1], int32[:, :, ::1]"


@compiled_as(
    f"void(int64, UniTuple(int64, 2), float32[:, :], {_WEIGHTS}, int64, float32, {_STATES}, {_ROWS}, float32[:, ::1])"
)
def gated_delta_net(
    slot,
    kernels,
    x,
    taps,
    decay,
    bias,
    norm,
    key_heads,
    eps,
    memory,
    past,
    rows,
    fades,
    spans,
    pending,
    branches,
    out,
):
    """`accept` if spans have pending rows, then `advance` if there are rows. `pending` and `branches` may be empty."""
    arguments = stack_words(_WORDS)
    arguments[_X], arguments[_OUT], arguments[_STRIDE] = x.ctypes.data, out.ctypes.data, x.strides[0]
    arguments[_FILTERS], arguments[_TAPS] = taps.ctypes.data, taps.shape[0]
    arguments[_DECAY], arguments[_BIAS], arguments[_NORM] = decay.ctypes.data, bias.ctypes.data, norm.ctypes.data
    arguments[_MEMORY], arguments[_PAST] = memory.ctypes.data, past.ctypes.data
    arguments[_KEPT], arguments[_FADES], arguments[_MOST] = rows.ctypes.data, fades.ctypes.data, rows.shape[2]
    arguments[_SPANS] = spans.ctypes.data
    arguments[_PENDING] = pending.ctypes.data if len(pending) > 0 else 0
    arguments[_BRANCHES] = branches.ctypes.data if len(branches) > 0 else 0
    arguments[_HEADS], arguments[_KEY_HEADS], arguments[_SIZE] = memory.shape[1], key_heads, memory.shape[2]
    put_float(arguments.ctypes.data + _EPS * 8, eps)
    parts = len(spans) * memory.shape[1]
    if len(pending) > 0:
        run_job(slot, kernels[0], arguments, parts)
    if len(x) > 0:
        run_job(slot, kernels[1], arguments, parts)
