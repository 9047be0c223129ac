"""Gated DeltaNet: the causal convolution before it, and the gated delta rule, recurrent and in chunks.

Formulas: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), sections 3.1 and 3.3, with the layouts of
GGUF files: value head h reads key head h mod key_heads. States live in slots; a span at position 0 starts from zeros
and does not read its slot, so a slot needs no clearing between sequences.
"""

from __future__ import annotations

import numpy as np

from luce.ops.activation import host_softplus
from luce.runtime.device import Array, Device
from luce.runtime.step import SpanArrays

#: rows of a chunk of the chunked form
CHUNK = 64
#: Spans of up to so many rows go row by row, so that verifying several tokens gives the bits of single steps.
RECURRENT_ROWS = 16

# Sizes that kernels/deltanet.cu has as well.
_CONV_THREADS, _CONV_ROWS = 128, 16
_STEP_THREADS, _STEP_COLUMNS = 128, 32
_PREPARE_THREADS = 256
_SCALARS = 6

# Rows that the host convolves at once, so that its temporaries stay in a core's cache.
_HOST_ROWS = 32


def conv_silu(device: Device, m: Array, weight: Array, state: Array, spans: SpanArrays) -> Array:
    """silu of the depthwise causal convolution over each span; the last K-1 inputs of the span become its state.

    m float32 [n, channels] (any row stride), weight float32 [channels, K] (tap K-1 meets the row itself),
    state float32 [slots, K-1, channels], updated -> float32 [n, channels].
    """
    if device.host:
        out = device.empty(m.shape)
        for slot, start, rows, position in spans.table.tolist():
            past = state[slot] if position else np.zeros_like(state[slot])
            for at in range(start, start + rows, _HOST_ROWS):
                own = slice(at, min(at + _HOST_ROWS, start + rows))
                window = np.concatenate((past, m[own]))
                past = window[len(window) - len(past) :]
                _conv_silu(window, weight, out[own])
            state[slot] = past
        return out
    n, channels = m.shape
    out = device.empty((n, channels))
    if n:
        device.launch(
            "deltanet",
            "conv_silu",
            (-(-channels // _CONV_THREADS), -(-spans.longest // _CONV_ROWS), spans.count),
            (_CONV_THREADS,),
            (m, weight, state, spans.table, out, np.int64(m.strides[0] // 4), np.int32(channels)),
            defines={"TAPS": weight.shape[1]},
        )
    return out


def gated_delta(
    device: Device,
    c: Array,
    alpha: Array,
    beta: Array,
    decay: Array,
    dt_bias: Array,
    state: Array,
    spans: SpanArrays,
    *,
    key_heads: int,
) -> Array:
    """The gated delta rule over each span; the state after the span's last row becomes its slot's state.

    c float32 [n, (2 key_heads + value_heads) d] contiguous: q, k, v of all heads, after the convolution; alpha, beta
    float32 [n, value_heads] (any row stride), before softplus and sigmoid; decay (`ssm_a`, negative) and dt_bias
    float32 [value_heads]; state float32 [slots, value_heads, d_k, d_v], updated -> float32 [n, value_heads, d].

        q <- q / sqrt(sum q^2 + 1e-6) / sqrt(d),  k <- k / sqrt(sum k^2 + 1e-6)
        g = decay * softplus(alpha + dt_bias),    b = sigmoid(beta)
        S <- e^g S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q

    The kernels take d up to 256. A span's result depends on the span alone. Spans of more than RECURRENT_ROWS rows go
    in chunks. Largest error against float64, relative to the output's root mean square, over 1000 rows of d = 128 with
    strong, no and mixed decay: 3.3e-6 in chunks, 2.3e-6 row by row.
    """
    n, heads, d = c.shape[0], state.shape[1], state.shape[2]
    out = device.empty((n, heads, d))
    if device.host:
        q = _unit(c[:, : key_heads * d].reshape(n, key_heads, d)) * np.float32(d**-0.5)
        k = _unit(c[:, key_heads * d : 2 * key_heads * d].reshape(n, key_heads, d))
        v = c[:, 2 * key_heads * d :].reshape(n, heads, d)
        g = decay * host_softplus(alpha + dt_bias)
        b = _sigmoid(beta)
        for slot, start, rows, position in spans.table.tolist():
            s = state[slot]
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
        return out
    if not n:
        return out
    count, longest, table = spans.count, spans.longest, spans.table
    inputs = (c, alpha, beta, decay, dt_bias)
    sizes = (np.int64(alpha.strides[0] // 4), np.int64(beta.strides[0] // 4), np.int32(key_heads))
    defines = {"HEAD": d}
    # Each kernel passes over the spans that are the other form's.
    if longest <= RECURRENT_ROWS or count > 1:
        grid = (-(-d // _STEP_COLUMNS), heads, count)
        steps = (*inputs, state, table, out, *sizes)
        device.launch("deltanet", "delta_recurrent", grid, (_STEP_THREADS,), steps, defines=defines)
    if longest > RECURRENT_ROWS:
        scalars = device.empty((n, heads, _SCALARS))
        solve, mix = device.empty((n, heads, CHUNK)), device.empty((n, heads, CHUNK))
        grid = (-(-longest // CHUNK), heads, count)
        prepare = (*inputs, table, scalars, solve, mix, *sizes)
        device.launch("deltanet", "delta_prepare", grid, (_PREPARE_THREADS,), prepare, defines=defines)
        columns = 16 if d > 128 else 32
        grid = (-(-d // columns), heads, count)
        chunks = (c, state, table, scalars, solve, mix, out, np.int32(key_heads))
        device.launch("deltanet", "delta_chunks", grid, (CHUNK * columns // 16,), chunks, defines=defines)
    return out


def _conv_silu(window: Array, weight: Array, out: Array) -> None:
    taps = weight.shape[1]
    total = np.multiply(window[taps - 1 :], weight[:, taps - 1], out=out)
    product = np.empty_like(out)
    for tap in range(taps - 1):
        total += np.multiply(window[tap : tap + len(out)], weight[:, tap], out=product)
    total *= _sigmoid(total)


def _unit(x: Array) -> Array:
    return x / np.sqrt(np.einsum("nhd,nhd->nh", x, x) + np.float32(1e-6))[..., None]


def _sigmoid(x: Array) -> Array:
    # An overflow is no accident: 1 / inf is the right zero.
    with np.errstate(over="ignore"):
        y = np.exp(-x)
    y += 1
    return np.divide(1, y, out=y)


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
