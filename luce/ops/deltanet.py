"""Gated DeltaNet between its two products: causal convolution, gated delta rule, gated output norm.

Formulas: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), sections 3.1 and 3.3, with the layouts of
GGUF files: value head h reads key head h mod key_heads. States live in slots; a span at position 0 starts from zeros
and does not read its slot, so a slot needs no clearing between sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from luce.ops.activation import host_sigmoid, host_softplus
from luce.ops.quantise import Quantised, as_arguments, room, space_for
from luce.runtime.device import Array, Device
from luce.runtime.step import SpanArrays

#: rows of a chunk of the chunked form
CHUNK = 64
#: Spans of up to so many rows go row by row, so that verifying several tokens gives the bits of single steps.
RECURRENT_ROWS = 16

# Sizes that the kernels have as well.
_STEP_COLUMNS, _STEP_ELEMENTS = 4, 8
_CONV_THREADS, _CONV_ROWS = 128, 16
_PREPARE_THREADS = 256
_CHUNK_THREADS, _CHUNK_COLUMNS = 256, 32
_OUTPUT_THREADS, _OUTPUT_ROWS = 128, 4

# Rows that the host convolves at once, so that its temporaries stay in a core's cache.
_HOST_ROWS = 32


@dataclass(frozen=True)
class DeltaWeights:
    """conv float32 [channels, K] over all q, k and v heads (tap K-1 meets the row itself); decay (`ssm_a`, negative)
    and dt_bias float32 [value_heads]; norm float32 [d] of the output, with its epsilon."""

    conv: Array
    decay: Array
    dt_bias: Array
    norm: Array
    eps: float
    key_heads: int


def gated_delta_net(
    device: Device,
    x: Array,
    weights: DeltaWeights,
    memory: Array,
    past: Array,
    spans: SpanArrays,
    *,
    in_bytes: bool = False,
) -> Array | Quantised:
    """What the layer does with its input projections, over each span; the slots get the states after its last row.

    x float32 [n, channels + value_heads d + 2 value_heads] (any row stride): q, k and v of all heads, the output gate
    z, alpha, beta. memory float32 [slots, value_heads, d_v, d_k], the state S transposed; past float32
    [slots, value_heads, K-1, 3, d], the last inputs of the convolution: each value head has those of the q, k and v
    that it reads. Both are updated. -> float32 [n, value_heads d]; `in_bytes` on a GPU, of n <= 16 rows, the same
    quantised.

        q, k, v <- silu(causal convolution of each channel)
        q <- q / sqrt(sum q^2 + 1e-6) / sqrt(d),  k <- k / sqrt(sum k^2 + 1e-6)
        g = decay * softplus(alpha + dt_bias),    b = sigmoid(beta)
        S <- e^g S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q
        out = o / sqrt(mean(o^2) + eps) * norm * silu(z)

    The kernels take the d and K that luce.models.spec names. A span's result depends on the span alone. Spans of more
    than RECURRENT_ROWS rows go in chunks.
    """
    if device.host:
        return _host(x, weights, memory, past, spans)
    n, heads, d = len(x), memory.shape[1], memory.shape[2]
    rows = room(device, n, heads * d, space=space_for(n)) if in_bytes else None
    out = None if in_bytes else device.empty((n, heads * d))
    if not n:
        return out
    count, longest, table = spans.count, spans.longest, spans.table
    stride, key_heads, value_heads = np.int64(x.strides[0] // 4), np.int32(weights.key_heads), np.int32(heads)
    taps, eps = np.int32(weights.conv.shape[1]), np.float32(weights.eps)
    gates = (weights.decay, weights.dt_bias)
    defines = {"HEAD": d}
    # Each form passes over the spans that are the other one's.
    if longest <= RECURRENT_ROWS or count > 1:
        steps = (x, weights.conv, *gates, weights.norm, past, memory, table, out, stride, key_heads, taps, eps)
        to = (np.int32(n), *as_arguments(rows))
        threads = d // _STEP_COLUMNS * (d // _STEP_ELEMENTS)
        kernel = "delta_step" if longest == 1 else "delta_steps"
        device.launch("deltanet", kernel, (heads, count), (threads,), (*steps, *to), defines=defines)
    if longest > RECURRENT_ROWS:
        vectors = 2 * weights.key_heads + heads
        c = device.empty((n, vectors * d))
        args = (x, weights.conv, past, table, c, stride, key_heads, value_heads, taps)
        grid = (-(-vectors // (_CONV_THREADS // device.lanes)), -(-longest // _CONV_ROWS), count)
        device.launch("deltanet_chunk", "delta_vectors", grid, (_CONV_THREADS,), args, defines=defines)

        scalars = device.empty((n, heads, 4))
        solve, mix = device.empty((n, heads, CHUNK)), device.empty((n, heads, CHUNK))
        prepare = (c, x, *gates, table, scalars, solve, mix, stride, value_heads)
        grid = (-(-longest // CHUNK), weights.key_heads, count)
        device.launch("deltanet_chunk", "delta_prepare", grid, (_PREPARE_THREADS,), prepare, defines=defines)

        chunks = (c, memory, table, scalars, solve, mix, out, key_heads)
        grid = (d // _CHUNK_COLUMNS, heads, count)
        device.launch("deltanet_chunk", "delta_chunks", grid, (_CHUNK_THREADS,), chunks, defines=defines)

        output = (out, x, weights.norm, table, stride, key_heads, value_heads, eps)
        grid = (-(-longest // _OUTPUT_ROWS), -(-heads // (_OUTPUT_THREADS // device.lanes)), count)
        device.launch("deltanet_chunk", "delta_output", grid, (_OUTPUT_THREADS,), output, defines=defines)
    return out if rows is None else rows


def _host(x: Array, weights: DeltaWeights, memory: Array, past: Array, spans: SpanArrays) -> Array:
    n, heads, d = len(x), memory.shape[1], memory.shape[2]
    key_heads, channels = weights.key_heads, len(weights.conv)
    z, alpha, beta = np.split(x[:, channels:], (heads * d, heads * (d + 1)), axis=1)
    c = np.empty((n, channels), np.float32)
    for slot, start, rows, position in spans.table.tolist():
        _convolve(x[:, :channels], weights, past[slot], start, rows, position, c)
    q, k, v = np.split(c, (key_heads * d, 2 * key_heads * d), axis=1)
    q = _unit(q.reshape(n, key_heads, d)) * np.float32(d**-0.5)
    k = _unit(k.reshape(n, key_heads, d))
    v = v.reshape(n, heads, d)
    g = weights.decay * host_softplus(alpha + weights.dt_bias)
    b = host_sigmoid(beta)
    out = np.empty((n, heads, d), np.float32)
    for slot, start, rows, position in spans.table.tolist():
        s = memory[slot].swapaxes(1, 2)
        if not position:
            s[...] = 0
        if rows <= RECURRENT_ROWS:
            own = slice(start, start + rows)
            _recurrent(q[own], k[own], v[own], g[own], b[own], s, out[own])
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


def _convolve(x: Array, weights: DeltaWeights, past: Array, start: int, rows: int, position: int, out: Array) -> None:
    """silu of the convolution of one span's rows into out; past [value_heads, K-1, 3, d] becomes that after them."""
    heads, kept, _, d = past.shape
    key_heads = weights.key_heads
    before = np.zeros((kept, x.shape[1]), np.float32)
    if position:
        parts = (past[:key_heads, :, 0], past[:key_heads, :, 1], past[:, :, 2])
        np.concatenate([part.swapaxes(0, 1).reshape(kept, -1) for part in parts], axis=1, out=before)
    for at in range(start, start + rows, _HOST_ROWS):
        own = slice(at, min(at + _HOST_ROWS, start + rows))
        window = np.concatenate((before, x[own]))
        before = window[len(window) - kept :]
        _conv_silu(window, weights.conv, out[own])
    q, k, v = (part.reshape(kept, -1, d) for part in np.split(before, (key_heads * d, 2 * key_heads * d), axis=1))
    reads = np.arange(heads) % key_heads
    for kind, vectors in enumerate((q[:, reads], k[:, reads], v)):
        past[:, :, kind] = vectors.swapaxes(0, 1)


def _conv_silu(window: Array, weight: Array, out: Array) -> None:
    taps = weight.shape[1]
    total = np.multiply(window[taps - 1 :], weight[:, taps - 1], out=out)
    product = np.empty_like(out)
    for tap in range(taps - 1):
        total += np.multiply(window[tap : tap + len(out)], weight[:, tap], out=product)
    total *= host_sigmoid(total)


def _unit(x: Array) -> Array:
    return x / np.sqrt(np.einsum("nhd,nhd->nh", x, x) + np.float32(1e-6))[..., None]


def _recurrent(q: Array, k: Array, v: Array, g: Array, b: Array, s: Array, out: Array) -> None:
    """All heads by rows: q, k [rows, key_heads, d]; v, out [rows, heads, d]; g, b [rows, heads]; s [heads, d, d]."""
    repeat = (s.shape[0] // q.shape[1], 1)
    for t in range(len(q)):
        key, query = np.tile(k[t], repeat), np.tile(q[t], repeat)
        s *= np.exp(g[t])[:, None, None]
        u = b[t][:, None] * (v[t] - np.matmul(key[:, None, :], s)[:, 0])
        s += key[:, :, None] * u[:, None, :]
        out[t] = np.matmul(query[:, None, :], s)[:, 0]


def _chunk(q: Array, k: Array, v: Array, g: Array, b: Array, s: Array, out: Array) -> None:
    """One head of one chunk: q, k, v, out [rows, d]; g, b [rows]; s [d, d]."""
    # In float64: after rows of strong decay the sums are in the hundreds, where float32 loses the differences between
    # later rows. Exponents are of differences only, never e^-total.
    total = np.cumsum(g, dtype=np.float64)
    between = np.tril(np.exp(np.minimum(total[:, None] - total, 0).astype(np.float32)))
    fade = np.exp(total).astype(np.float32)[:, None]
    b = b[:, None]
    a = np.tril(b * (k @ k.T) * between, -1)
    np.fill_diagonal(a, 1)
    fresh = np.linalg.solve(a, b * (v - fade * (k @ s)))
    out[...] = fade * (q @ s) + ((q @ k.T) * between) @ fresh
    left = np.exp(total[-1] - total).astype(np.float32)[:, None] * k
    s *= fade[-1]
    s += left.T @ fresh
