"""Gated DeltaNet between its two products: causal convolution, gated delta rule, gated output norm.

Formulas: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), sections 3.1 and 3.3, with the layouts of
GGUF files: value head h reads key head h mod key_heads. Each slot holds the recurrent state of a sequence; a span at
position 0 starts from zeros and does not read its slot, so no slot has to be cleared between sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from luce.cpu_kernels.dimensions import LANES, MOST_DELTA_HEAD
from luce.ops.activation import host_sigmoid, host_softplus
from luce.ops.fp16 import Fp16Rows, Halves, empty_fp16
from luce.ops.int8_rows import Int8Sums
from luce.ops.quantise import SECTION, Quantised, as_arguments, empty_quantised
from luce.ops.scaled_products import Product
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Array, Device
from luce.runtime.step import SpanArrays

#: rows of a chunk of the chunked form
CHUNK = 64
#: Spans of up to so many rows are computed row by row, so that verifying several tokens gives the bits of single steps.
RECURRENT_ROWS = 16

# The constants of deltanet.cu, deltanet_chunk.cu and deltanet_output.cu.
_STEP_COLUMNS, _STEP_ELEMENTS = 4, 8
# Of deltanet_many.cu: states in a block's shared memory, and threads of a multiprocessor.
_MANY_STATES, _MANY_THREADS = 3, 512
# The head that blocks share in deltanet_step.cu and in delta_verify.
_SPLIT_HEAD = 128
_CONV_THREADS, _CONV_ROWS = 128, 16
# Of delta_prepare and deltanet_prepare.cu, which has several value heads at once.
_PREPARE_THREADS, _PREPARE_HEADS = 256, 4
_CHUNK_THREADS, _CHUNK_COLUMNS = 256, 32
_OUTPUT_THREADS, _OUTPUT_ROWS, _FP16_THREADS = 128, 4, 256

# The constants of deltanet_mma.cu: its threads, the state's columns that they have, chunks in shared memory, and what
# rows there are longer by. Then those of deltanet_wgmma.cu.
_MMA_THREADS, _MMA_COLUMNS, _MMA_CHUNKS, _MMA_PADDING = 128, 64, 2, 8
_GROUPED_THREADS, _GROUPED_COLUMNS, _GROUPED_CHUNKS = 160, 64, 2

# Of compiled code, for steps without such rows.
_NO_PENDING, _NO_BRANCHES = np.empty((0, 2), np.int32), np.empty((0, 2, 1), np.int32)
# Rows that the host convolves at once, so that its temporaries stay in a core's cache.
_HOST_ROWS = 32


@dataclass(frozen=True)
class DeltaWeights:
    """The weights of a layer besides its two products."""

    #: float32 [channels, K] over all q, k and v heads; tap K-1 multiplies the row itself
    conv: Array
    #: float32 [value_heads], negative: the tensor `ssm_a`
    decay: Array
    #: float32 [value_heads]
    dt_bias: Array
    #: float32 [d] of the output
    norm: Array
    eps: float
    key_heads: int

    @cached_property
    def taps(self) -> Array:
        """`conv` as the compiled code of the CPU reads it: float32 [K, channels]."""
        return np.ascontiguousarray(self.conv.T)


@dataclass(frozen=True)
class RecurrentState:
    """The recurrent states of a layer's slots, and the speculative rows that may follow them."""

    #: float32 [slots, value_heads, d_v, d_k]: the state S, transposed
    memory: Array
    #: float32 [slots, value_heads, K-1, 3, d]: the last inputs of the convolution, for the q, k and v that a value head
    #: reads
    past: Array
    #: float32 [slots, value_heads, most, 5, d]: of each speculative row its inputs, key and u
    speculative_rows: Array
    #: float32 [slots, value_heads, most]: of each speculative row e^g
    speculative_decays: Array


def gated_delta_net(
    device: Device,
    x: Product,
    weights: DeltaWeights,
    state: RecurrentState,
    spans: SpanArrays,
    *,
    int8_group: int = 0,
    top: int | None = None,
) -> Array | Quantised | Fp16Rows:
    """The layer between its input and its output product, over each span: float32 [n, value_heads d].

    x float32 [n, channels + value_heads d + 2 value_heads] (any row stride): q, k and v of all heads, the output gate
    z, alpha, beta; or, with `top` and if `reads_products(spans)`, sums or halves of such rows. `state.memory` and
    `state.past` get the states after the last row of each span. With a nonzero `int8_group`, for n <= 16 rows on a GPU:
    quantised in such groups, if one kernel can do that too. With `top`, for one span of more than RECURRENT_ROWS rows
    on a GPU: as fp16 rows with this top (luce.ops.fp16).

    A speculative span of at most `most` <= RECURRENT_ROWS rows leaves memory and past unchanged; its rows go to
    `speculative_rows` and `speculative_decays`. A later span that accepts some of them first takes memory and past
    through these rows, to the same bits as a span of these rows; a span without own rows does only that. In a draft
    tree a row continues the state of its parent: each branch computes the rows above it again, from the state before
    the tree, to the same bits, so that no state per row has to be stored.

        q, k, v <- silu(causal convolution of each channel)
        q <- q / sqrt(sum q^2 + 1e-6) / sqrt(d),  k <- k / sqrt(sum k^2 + 1e-6)
        g = decay * softplus(alpha + dt_bias),    b = sigmoid(beta)
        S <- e^g S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q
        out = o / sqrt(mean(o^2) + eps) * norm * silu(z)

    The kernels support the d and K that luce.models.spec names. The result of a span depends on that span alone. Spans
    of more than RECURRENT_ROWS rows are computed in chunks, but row by row in compiled code of the CPU, which takes any
    K and every d up to MOST_DELTA_HEAD that LANES divides.
    """
    if not isinstance(x, Int8Sums | Halves):
        head = state.memory.shape[2]
        if isinstance(device, CpuDevice) and head % LANES == 0 and head <= MOST_DELTA_HEAD:
            return _compiled(device, x, weights, state, spans)
        if device.host:
            return _host(x, weights, state, spans)
    n, heads, d = x.shape[0], state.memory.shape[1], state.memory.shape[2]
    rows = empty_quantised(device, n, heads * d, int8_group) if int8_group and d % SECTION == 0 else None
    out = None if rows is not None else device.empty((n, heads * d))
    if not spans.count:
        return out
    # Each form skips the spans of the other one, except for the speculative rows that long spans accept.
    long = spans.count == 1 or spans.shortest > RECURRENT_ROWS
    if spans.longest <= RECURRENT_ROWS or not long or spans.pending is not None:
        assert not isinstance(x, Int8Sums | Halves)
        plain = spans.longest == 1 and spans.pending is None
        blocks = _resident(device, d) if plain else 0
        to = out if rows is None else rows
        # With fewer heads all blocks of delta_step run at once.
        if 0 < 2 * blocks < heads * spans.count or (plain and _split(device, d, heads * spans.count) > 1):
            _launch_single(device, x, weights, state, spans, to, blocks)
        else:
            _launch_recurrent(device, x, weights, state, spans, to)
    if spans.longest > RECURRENT_ROWS:
        halves = None if top is None or spans.count > 1 else empty_fp16(device, n, heads * d, top)
        _launch_chunks(device, x, weights, state, spans, out)
        _launch_output(device, x, weights, spans, out, halves)
        return out if halves is None else halves
    return out if rows is None else rows


def _launch_recurrent(
    device: Device,
    x: Array,
    weights: DeltaWeights,
    state: RecurrentState,
    spans: SpanArrays,
    out: Array | Quantised | None,
) -> None:
    """The spans of up to RECURRENT_ROWS rows, and all rows that spans accept."""
    rows = out if isinstance(out, Quantised) else None
    heads, d = state.memory.shape[1], state.memory.shape[2]
    taps, most = np.int32(weights.conv.shape[1]), np.int32(state.speculative_rows.shape[2])
    table, pending = spans.table, spans.pending
    # Without pending rows, a pointer that the kernel does not dereference.
    accepting = table if pending is None else pending
    states = (state.past, state.memory, state.speculative_rows, state.speculative_decays, table, accepting)
    steps = (x, weights.conv, weights.decay, weights.dt_bias, weights.norm, *states)
    sizes = (np.int64(x.strides[0] // 4), np.int32(weights.key_heads), taps, most, np.float32(weights.eps))
    to = (None if rows is not None else out, *sizes, np.int32(len(x)), *as_arguments(rows))
    grid, block, defines = (heads, spans.count), (_step_threads(d),), {"HEAD": d}
    if spans.branches is not None:
        # All spans of a slot begin with its state, so rows are accepted before any span begins.
        for kernel in ("delta_accept", "delta_branches"):
            device.launch("deltanet", kernel, grid, block, (*steps, spans.branches, *to), defines=defines)
    else:
        kernel = "delta_verify" if pending is not None else "delta_step" if spans.longest == 1 else "delta_steps"
        if pending is not None and (split := _split(device, d, heads * spans.count)) > 1:
            grid, defines = (split * heads, spans.count), {"HEAD": d, "SPLIT": split}
        device.launch("deltanet", kernel, grid, block, (*steps, *to), defines=defines)


def _step_threads(d: int) -> int:
    """Threads of a block of deltanet_rows.h."""
    return d // _STEP_COLUMNS * (d // _STEP_ELEMENTS)


def _resident(device: Device, d: int) -> int:
    """The blocks of delta_many that run at once; 0 if the device cannot run it."""
    blocks = _MANY_THREADS // _step_threads(d)
    served = "WGMMA" in device.products and blocks * 4 * _MANY_STATES * d * d <= device.shared_limit
    return blocks * device.multiprocessors if served else 0


def _launch_single(
    device: Device,
    x: Array,
    weights: DeltaWeights,
    state: RecurrentState,
    spans: SpanArrays,
    out: Array | Quantised | None,
    blocks: int,
) -> None:
    """Spans of one row each: few by clusters, many by so many blocks that stay."""
    rows = out if isinstance(out, Quantised) else None
    heads, d = state.memory.shape[1], state.memory.shape[2]
    own = (weights.conv, weights.decay, weights.dt_bias, weights.norm, state.past, state.memory, spans.table)
    inputs = (x, *own, None if rows is not None else out, np.int64(x.strides[0] // 4))
    counts = np.int32(weights.key_heads), np.int32(heads), np.int32(weights.conv.shape[1])
    sizes = (*counts, np.float32(weights.eps), np.int32(len(x)), *as_arguments(rows))
    threads, defines = _step_threads(d), {"HEAD": d}
    if (split := _split(device, d, heads * spans.count)) > 1:
        # Two more waves, for what a row has one of.
        grid, block, defines = (split * heads, spans.count), (threads + 2 * device.lanes,), {"HEAD": d, "SPLIT": split}
        device.launch("deltanet_step", "delta_step", grid, block, (*inputs, *sizes), defines=defines)
        return
    args, shared = (*inputs, np.int32(spans.count), *sizes), 4 * _MANY_STATES * d * d
    device.launch("deltanet_many", "delta_many", (blocks,), (threads,), args, defines=defines, shared=shared)


def _split(device: Device, d: int, heads: int) -> int:
    """The blocks that share a head (SPLIT of deltanet_rows.h), where those of so many heads run at once; else 1."""
    clusters = "WGMMA" in device.products and d == _SPLIT_HEAD
    return next((split for split in (4, 2) if clusters and split * heads <= device.multiprocessors), 1)


def _launch_chunks(
    device: Device, x: Product, weights: DeltaWeights, state: RecurrentState, spans: SpanArrays, out: Array
) -> None:
    """The spans of more than RECURRENT_ROWS rows, CHUNK rows at a time; before the norm and the gate."""
    (n, *_), heads, d = x.shape, state.memory.shape[1], state.memory.shape[2]
    count, chunks, table = spans.count, -(-spans.longest // CHUNK), spans.table
    *inputs, stride = _inputs_and_stride(x)
    key_heads, value_heads = np.int32(weights.key_heads), np.int32(heads)
    defines = {"HEAD": d}
    vectors = 2 * weights.key_heads + heads
    matrices = 8 * CHUNK * d, 8 * CHUNK * CHUNK + 16 * CHUNK  # bytes, of a key head and of a value head
    shared = _GROUPED_CHUNKS * (sum(matrices) + 4 * CHUNK * _GROUPED_COLUMNS) + 16
    grouped = "WGMMA" in device.products and shared <= device.shared_limit
    c: tuple[Array | None, Array | None, Array | None]
    if grouped:
        # A span's chunks have images of their own (Images in kernels/deltanet_halves.h).
        images = n // CHUNK + count
        keys = device.empty((images, weights.key_heads, matrices[0] // 2), np.uint16)
        squares = device.empty((images, heads, matrices[1] // 2), np.uint16)
        c = None, keys, device.empty((images, heads, CHUNK * d))
    else:
        c = device.empty((n, vectors * d)), None, None
    taps = np.int32(weights.conv.shape[1])
    args = (*inputs, weights.conv, state.past, table, *c, stride, key_heads, value_heads, taps)
    grid = (-(-vectors // (_CONV_THREADS // device.lanes)), chunks * (CHUNK // _CONV_ROWS), count)
    device.launch("deltanet_chunk", "delta_vectors", grid, (_CONV_THREADS,), args, defines=defines)

    rates = (*inputs, weights.decay, weights.dt_bias, table)
    if grouped:
        prepare = (*rates, keys, squares, stride, key_heads, value_heads)
        groups = -(-(heads // weights.key_heads) // _PREPARE_HEADS)
        grid, block = (chunks, weights.key_heads * groups, count), (_PREPARE_THREADS,)
        own = max(matrices[0], 4 * _PREPARE_HEADS * CHUNK * (CHUNK + 4)) + 4 * _PREPARE_HEADS * (4 * CHUNK + 96) + 16
        device.launch("deltanet_prepare", "delta_prepare_wgmma", grid, block, prepare, defines=defines, shared=own)
        recurrence = (state.memory, table, keys, squares, c[2], out, key_heads)
        grid, block = (d // _GROUPED_COLUMNS, heads, count), (_GROUPED_THREADS,)
        device.launch("deltanet_wgmma", "delta_chunks_wgmma", grid, block, recurrence, defines=defines, shared=shared)
        return
    scalars, solve, mix = (device.empty((n, heads, size)) for size in (4, CHUNK, CHUNK))
    grid, block = (chunks, weights.key_heads, count), (_PREPARE_THREADS,)
    args = (c[0], *rates, scalars, solve, mix, stride, value_heads)
    device.launch("deltanet_chunk", "delta_prepare", grid, block, args, defines=defines)

    args = (c[0], state.memory, table, scalars, solve, mix, out, key_heads)
    shared = _MMA_CHUNKS * 4 * CHUNK * (2 * (d + _MMA_PADDING) + 2 * (CHUNK + _MMA_PADDING) + 4)
    if "BF16" in device.products and shared <= device.shared_limit:
        grid, block = (d // _MMA_COLUMNS, heads, count), (_MMA_THREADS,)
        device.launch("deltanet_mma", "delta_chunks_mma", grid, block, args, defines=defines, shared=shared)
        return
    grid = (d // _CHUNK_COLUMNS, heads, count)
    device.launch("deltanet_chunk", "delta_chunks", grid, (_CHUNK_THREADS,), args, defines=defines)


def _launch_output(
    device: Device,
    x: Product,
    weights: DeltaWeights,
    spans: SpanArrays,
    out: Array,
    halves: Fp16Rows | None,
) -> None:
    """The norm and the gate of the long spans' rows of `out`, in place, or of one span to `halves`."""
    (n, width), d = out.shape, len(weights.norm)
    *inputs, stride = _inputs_and_stride(x)
    sizes = (stride, np.int32(weights.key_heads), np.int32(width // d), np.float32(weights.eps))
    if halves is not None:
        to = (halves.values, halves.scale, np.int32(halves.values.shape[1]))
        rows_args = (out, *inputs, weights.norm, *to, *sizes, np.int32(halves.top))
        device.launch("deltanet_output", "delta_output_fp16", (n,), (_FP16_THREADS,), rows_args, defines={"HEAD": d})
        return
    assert not isinstance(x, Int8Sums | Halves)
    grid = (-(-spans.longest // _OUTPUT_ROWS), -(-(width // d) // (_OUTPUT_THREADS // device.lanes)), spans.count)
    args = (out, x, weights.norm, spans.table, *sizes)
    device.launch("deltanet_output", "delta_output", grid, (_OUTPUT_THREADS,), args, defines={"HEAD": d})


def reads_products(spans: SpanArrays) -> bool:
    """Whether `gated_delta_net` on a GPU, with a `top`, reads x as sums or halves: of one long span alone."""
    return spans.count == 1 and spans.longest > RECURRENT_ROWS and spans.pending is None


def _inputs_and_stride(x: Product) -> tuple[Array, Array | None, Array | None, np.int64]:
    """x as the kernels of chunks have it (kernels/products.h)."""
    if isinstance(x, Int8Sums):
        return x.values.view(np.float32), x.rows, x.features, np.int64(x.values.strides[0] // 4)
    if isinstance(x, Halves):
        return x.values.view(np.float32), x.rows, None, np.int64(x.values.strides[0] // 2)
    return x, None, None, np.int64(x.strides[0] // 4)


def _compiled(device: CpuDevice, x: Array, weights: DeltaWeights, state: RecurrentState, spans: SpanArrays) -> Array:
    """By luce.cpu_kernels.deltanet."""
    out = device.empty((len(x), state.memory.shape[1] * state.memory.shape[2]))
    own = (weights.taps, weights.decay, weights.dt_bias, weights.norm, weights.key_heads, np.float32(weights.eps))
    states = (state.memory, state.past, state.speculative_rows, state.speculative_decays)
    pending = _NO_PENDING if spans.pending is None else spans.pending
    branches = _NO_BRANCHES if spans.branches is None else spans.branches
    device.run(device.kernels.gated_delta_net, x, *own, *states, spans.table, pending, branches, out)
    return out


def _host(x: Array, weights: DeltaWeights, state: RecurrentState, spans: SpanArrays) -> Array:
    memory, past = state.memory, state.past
    drafted, decays = state.speculative_rows, state.speculative_decays
    n, heads, d = len(x), memory.shape[1], memory.shape[2]
    key_heads, channels, before = weights.key_heads, len(weights.conv), weights.conv.shape[1] - 1
    z, alpha, beta = np.split(x[:, channels:], (heads * d, heads * (d + 1)), axis=1)
    table = spans.table.tolist()
    pending = [(0, 0)] * len(table) if spans.pending is None else spans.pending.tolist()
    paths = [(list(range(accepted)), list[int]()) for accepted, _ in pending]
    if spans.branches is not None:
        paths = [(own[0, 1 : 1 + own[0, 0]].tolist(), own[1, 1 : 1 + own[1, 0]].tolist()) for own in spans.branches]
    for (slot, *_), (path, _) in zip(table, paths, strict=True):
        if path:
            rows, s = drafted[slot][:, path], memory[slot].swapaxes(1, 2)
            past[slot] = np.concatenate((past[slot], rows[:, :, :3]), axis=1)[:, len(path) :]
            for row, at in enumerate(path):
                s *= decays[slot, :, at, None, None]
                s += rows[:, row, 3, :, None] * rows[:, row, 4, None, :]
    c = np.empty((n, channels), np.float32)
    g = weights.decay * host_softplus(alpha + weights.dt_bias)
    b = host_sigmoid(beta)
    for (slot, start, rows, position), (_, speculative), (_, behind) in zip(table, pending, paths, strict=True):
        own = slice(start, start + rows)
        inputs = _inputs(past[slot], key_heads) if position else np.zeros((before, channels), np.float32)
        inputs = np.concatenate((inputs, x[behind, :channels]))[len(behind) :]
        after = _convolve(x[own, :channels], weights, inputs, c[own])
        if speculative:
            own_rows = _in_tree(start, rows, behind)
            drafted[slot, :, own_rows, :3] = _of_heads(x[own, :channels], key_heads, heads)
        else:
            past[slot] = _of_heads(after, key_heads, heads)
    q, k, v = _vectors(c, key_heads, d)
    out = np.zeros((n, heads, d), np.float32)  # also of rows that no span has
    for (slot, start, rows, position), (_, speculative), (_, behind) in zip(table, pending, paths, strict=True):
        own_memory = memory[slot].copy() if speculative else memory[slot]
        s = own_memory.swapaxes(1, 2)
        if not position:
            s[...] = 0
        own = slice(start, start + rows)
        if rows <= RECURRENT_ROWS:
            if behind:
                parents = q[behind], k[behind], v[behind], g[behind], b[behind]
                _recurrent(*parents, s, np.empty_like(v[behind]), None)
            store = None
            if speculative:
                own_rows = _in_tree(start, rows, behind)
                store = drafted[slot, :, own_rows], decays[slot, :, own_rows]
            _recurrent(q[own], k[own], v[own], g[own], b[own], s, out[own], store)
            continue
        for at in range(start, start + rows, CHUNK):
            own = slice(at, min(at + CHUNK, start + rows))
            for h in range(heads):
                key = h % key_heads
                _chunk(q[own, key], k[own, key], v[own, h], g[own, h], b[own, h], s[h], out[own, h])
    mean = np.einsum("nhd,nhd->nh", out, out) / np.float32(d)
    out *= (1 / np.sqrt(mean + np.float32(weights.eps)))[..., None] * weights.norm
    out = out.reshape(n, heads * d)
    out *= z * host_sigmoid(z)
    return out


def _in_tree(start: int, rows: int, behind: Sequence[int]) -> slice:
    """The places of a speculative span's rows among the speculative rows of its slot."""
    first = start - behind[0] if behind else 0
    return slice(first, first + rows)


def _inputs(past: Array, key_heads: int) -> Array:
    """Inputs of all channels [rows, channels] from those of the heads [value_heads, rows, 3, d]."""
    rows = past.shape[1]
    parts = (past[:key_heads, :, 0], past[:key_heads, :, 1], past[:, :, 2])
    return np.concatenate([part.swapaxes(0, 1).reshape(rows, -1) for part in parts], axis=1)


def _of_heads(inputs: Array, key_heads: int, heads: int) -> Array:
    """The reverse of _inputs."""
    d = inputs.shape[1] // (2 * key_heads + heads)
    q, k, v = (
        part.reshape(len(inputs), part.shape[1] // d, d)
        for part in np.split(inputs, (key_heads * d, 2 * key_heads * d), axis=1)
    )
    reads = np.arange(heads) % key_heads
    return np.stack([vectors.swapaxes(0, 1) for vectors in (q[:, reads], k[:, reads], v)], axis=2)


def _vectors(c: Array, key_heads: int, d: int) -> tuple[Array, Array, Array]:
    """Unit queries, scaled, and unit keys [rows, key_heads, d], values [rows, value_heads, d]."""
    parts = np.split(c, (key_heads * d, 2 * key_heads * d), axis=1)
    q, k, v = (part.reshape(len(c), part.shape[1] // d, d) for part in parts)
    return _unit(q) * np.float32(d**-0.5), _unit(k), v


def _convolve(x: Array, weights: DeltaWeights, before: Array, out: Array) -> Array:
    """out = silu of the convolution of rows x after the K-1 rows `before`; returns the last K-1 of all these rows."""
    count = len(before)
    for at in range(0, len(x), _HOST_ROWS):
        own = slice(at, min(at + _HOST_ROWS, len(x)))
        window = np.concatenate((before, x[own]))
        before = window[len(window) - count :]
        _conv_silu(window, weights.conv, out[own])
    return before


def _conv_silu(window: Array, weight: Array, out: Array) -> None:
    taps = weight.shape[1]
    total = np.multiply(window[taps - 1 :], weight[:, taps - 1], out=out)
    product = np.empty_like(out)
    for tap in range(taps - 1):
        total += np.multiply(window[tap : tap + len(out)], weight[:, tap], out=product)
    total *= host_sigmoid(total)


def _unit(x: Array) -> Array:
    return x / np.sqrt(np.einsum("nhd,nhd->nh", x, x) + np.float32(1e-6))[..., None]


def _recurrent(
    q: Array, k: Array, v: Array, g: Array, b: Array, s: Array, out: Array, store: tuple[Array, Array] | None
) -> None:
    """All heads by rows: q, k [rows, key_heads, d]; v, out [rows, heads, d]; g, b [rows, heads]; s [heads, d, d].

    `store`: the slot's speculative rows and decays, for these rows.
    """
    repeat = (s.shape[0] // q.shape[1], 1)
    for t in range(len(q)):
        key, query = np.tile(k[t], repeat), np.tile(q[t], repeat)
        fade = np.exp(g[t])
        s *= fade[:, None, None]
        u = b[t][:, None] * (v[t] - np.matmul(key[:, None, :], s)[:, 0])
        s += key[:, :, None] * u[:, None, :]
        out[t] = np.matmul(query[:, None, :], s)[:, 0]
        if store is not None:
            store[0][:, t, 3], store[0][:, t, 4], store[1][:, t] = key, u, fade


def _chunk(q: Array, k: Array, v: Array, g: Array, b: Array, s: Array, out: Array) -> None:
    """One head of one chunk: q, k, v, out [rows, d]; g, b [rows]; s [d, d]."""
    # In float64: after rows of strong decay the sums reach hundreds, where float32 loses the differences between
    # later rows. exp sees differences only, never -total.
    total = np.cumsum(g, dtype=np.float64)
    between = np.tril(np.exp(np.minimum(total[:, None] - total, 0).astype(np.float32)))
    fade = np.exp(total).astype(np.float32)[:, None]
    b = b[:, None]
    a = np.tril(b * (k @ k.T) * between, -1)
    np.fill_diagonal(a, 1)
    fresh = np.linalg.solve(a, b * (v - fade * (k @ s)))
    out[...] = fade * (q @ s) + ((q @ k.T) * between) @ fresh
    fading = np.exp(total[-1] - total).astype(np.float32)[:, None] * k
    s *= fade[-1]
    s += fading.T @ fresh
