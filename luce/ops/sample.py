"""Choosing tokens on the device: masks of grammars, the best of each row, and the few best candidates, which suffice
for most samplers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import MAX_CANDIDATES, Candidates, Int32

# Columns per block: a vocabulary of 248320 becomes 61 blocks, enough for the full rate of the memory.
_PART = 4096
_THREADS = (256,)
# PART of kernels/top_k.cu.
_TOP_K_PART = 4096


def mask_logits(device: Device, logits: Array, rows: Array, masks: Array) -> None:
    """Set the logits of masked tokens to -inf, in place: float32 [m, vocab] (any row stride).

    Row rows[i] (int32 [k], distinct, each in [0, m)) gets mask i of masks, uint32 [k, words]: token t may come next if
    bit t % 32 of word t / 32 is set. Tokens behind the last word may not.
    """
    k, words = masks.shape
    vocab = logits.shape[1]
    if device.host:
        for row, mask in zip(rows.tolist(), masks, strict=True):
            logits[row, ~unpack_mask(mask, vocab)] = -np.inf
        return
    if k:
        parts = -(-vocab // _PART)
        sizes = (np.int32(vocab), np.int32(logits.strides[0] // 4), np.int32(words), np.int32(_PART))
        device.launch("mask_logits", "mask_logits", (parts, k), _THREADS, (logits, rows, masks, *sizes))


def unpack_mask(mask: NDArray[np.uint32], vocab: int) -> NDArray[np.bool_]:
    """The bits of a mask, uint32 [words], as bool [vocab]; False behind the last word."""
    allowed = np.zeros(vocab, np.bool_)
    known = min(vocab, 32 * len(mask))
    allowed[:known] = np.unpackbits(mask.view(np.uint8), count=known, bitorder="little").view(np.bool_)
    return allowed


def argmax(device: Device, logits: Array) -> Array:
    """Index of the largest logit of each row, the lowest index on ties: float32 [m, vocab] -> int32 [m].

    NaN is less than every number; a row of NaN alone gives 0. `logits` may have any row stride.
    """
    m, vocab = logits.shape
    if isinstance(device, HostDevice):
        return device.compute(_host, (m,), logits, dtype=np.int32)
    out = device.empty(m, np.int32)
    if m:
        parts = -(-vocab // _PART)
        values = device.empty((m, parts))
        indices = out if parts == 1 else device.empty((m, parts), np.int32)
        sizes = (np.int32(vocab), np.int32(logits.strides[0] // 4), np.int32(_PART))
        device.launch("sample", "argmax_parts", (parts, m), _THREADS, (logits, values, indices, *sizes))
        if parts > 1:
            device.launch("sample", "argmax_join", (m,), _THREADS, (values, indices, out, np.int32(parts)))
    return out


def top_k_keys(device: Device, logits: Array) -> Array:
    """The MAX_CANDIDATES largest logits of each row, float32 [m, vocab] (any row stride), as keys uint64 [m,
    min(MAX_CANDIDATES, vocab)].

    Ordered by the larger logit, then the lower index; NaN comes first. `unpack_candidates` reads the keys.
    """
    m, vocab = logits.shape
    count = min(MAX_CANDIDATES, vocab)
    if device.host:
        keys = np.empty((m, count), np.uint64)
        for row, out in zip(logits, keys, strict=True):
            missing = np.isnan(row)
            ids = np.lexsort((-row, ~missing))[:count] if missing.any() else largest(row, count)
            out[:] = _keys(row[ids], ids)
        return keys
    if not m:
        return device.empty((0, count), np.uint64)
    parts = -(-vocab // _TOP_K_PART)
    out = device.empty((m, parts, MAX_CANDIDATES), np.uint64)
    sizes = (np.int32(vocab), np.int32(logits.strides[0] // 4))
    device.launch("top_k", "top_k_of_logits", (parts, m), _THREADS, (logits, out, *sizes))
    while parts > 1:
        left = parts * MAX_CANDIDATES
        parts = -(-left // _TOP_K_PART)
        fewer = device.empty((m, parts, MAX_CANDIDATES), np.uint64)
        device.launch("top_k", "top_k_of_keys", (parts, m), _THREADS, (out, fewer, np.int32(left)))
        out = fewer
    return out[:, 0, :count]


def argmax_logsumexp(device: Device, logits: Array, scale: float, softcap: float) -> Array:
    """Each row's largest logit and log sum exp f(logits): float32 [m, vocab] (any row stride) -> int32 [3, m].

    The index equals that of `argmax`; the bits of logit and norm are those of float32. f(x) = scale x, and then softcap
    tanh(f / softcap) unless softcap is 0; scale > 0. GPUs sum in float32.
    """
    m, vocab = logits.shape
    if device.host:
        ids = _host(logits)
        values = logits.astype(np.float64) * scale
        values = softcap * np.tanh(values / softcap) if softcap else values
        best = values.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            norms = np.log(np.exp(values - best).sum(axis=1)) + best[:, 0]
        bits = [part.astype(np.float32).view(np.int32) for part in (logits[np.arange(m), ids], norms)]
        return np.stack([ids, *bits])
    out = device.empty((3, m), np.int32)
    if m:
        parts = -(-vocab // _PART)
        state, indices = device.empty((m, parts, 2)), device.empty((m, parts), np.int32)
        sizes = (np.int32(vocab), np.int32(logits.strides[0] // 4), np.int32(_PART))
        factors = (np.float32(scale), np.float32(softcap))
        found = (state, indices)
        device.launch(
            "argmax_logsumexp", "argmax_logsumexp_parts", (parts, m), _THREADS, (logits, *found, *sizes, *factors)
        )
        device.launch(
            "argmax_logsumexp", "argmax_logsumexp_join", (m,), _THREADS, (*found, out, np.int32(parts), *factors)
        )
    return out


def find_candidates(
    device: Device, logits: Array, count: int, scale: float, softcap: float
) -> Callable[[], tuple[Int32, Candidates | None]]:
    """Queue the search for each row's best token, and for its `count` best candidates if `count` is not 0.

    With a scale the candidates come with norms. The returned function waits for the results, which are those of
    `argmax`, `top_k_keys` and `argmax_logsumexp`; but a single candidate with its norm is the token of `argmax`, even
    where there is NaN.
    """
    keys = device.fetch(top_k_keys(device, logits)[:, :count]) if count > (1 if scale else 0) else None
    if not (count and scale):
        ids = device.fetch(argmax(device, logits))
        return lambda: (ids(), None if keys is None else unpack_candidates(keys()))
    best = device.fetch(argmax_logsumexp(device, logits, scale, softcap))

    def wait() -> tuple[Int32, Candidates]:
        ids, *bits = best()
        values, norms = (part.view(np.float32) for part in bits)
        return ids, Candidates(ids[:, None], values[:, None], norms) if keys is None else unpack_candidates(
            keys(), norms
        )

    return wait


def unpack_candidates(keys: NDArray[np.uint64], norms: NDArray[np.float32] | None = None) -> Candidates:
    """The candidates that the keys of `top_k_keys` stand for, with the rows' norms if they are known."""
    ordered = (keys >> np.uint64(32)).astype(np.uint32)
    sign = np.uint32(1 << 31)
    bits = np.where(ordered & sign, ordered ^ sign, ~ordered)
    bits[ordered == np.uint32(0xFFFFFFFF)] = np.float32(np.nan).view(np.uint32)
    ids = np.uint32(0xFFFFFFFF) - keys.astype(np.uint32)
    return Candidates(ids.astype(np.int32), bits.view(np.float32), norms)


def _keys(values: NDArray[np.float32], ids: NDArray[np.intp]) -> NDArray[np.uint64]:
    bits = (values + np.float32(0)).view(np.uint32)
    ordered = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))
    ordered[np.isnan(values)] = 0xFFFFFFFF
    return ordered.astype(np.uint64) << np.uint64(32) | (np.uint64(0xFFFFFFFF) - ids.astype(np.uint64))


def largest(values: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Indices of the k largest of float32 [n], 0 < k <= n, largest first, the lower index first among equals.

    Entries fall into classes by index modulo `width`. The k-th largest of the classes' maxima is at most the k-th
    largest value, so all k lie in the classes whose maximum reaches it (and in the rest after the last full round).
    With sqrt(n / k) entries per class, both the classes and the entries of the second pass are few: 40 of 248320 take
    0.1 ms, np.argpartition takes 5.7 ms.
    """
    n = len(values)
    rounds = max(1, math.isqrt(n // k))
    width = n // rounds
    table = values[: rounds * width].reshape(rounds, width)
    maxima = table.max(axis=0)
    floor = np.partition(maxima, width - k)[width - k]
    found = np.flatnonzero(maxima >= floor)
    row, column = np.nonzero(table[:, found] >= floor)
    rest = np.flatnonzero(values[rounds * width :] >= floor) + rounds * width
    chosen = np.concatenate([row * width + found[column], rest])
    order = np.argsort(-values[chosen], kind="stable")[:k]
    return chosen[order]


def _host(logits: Array) -> Array:
    ids = logits.argmax(axis=1).astype(np.int32)
    # NumPy's argmax is the first NaN where there is one.
    for row in np.flatnonzero(np.isnan(logits[np.arange(len(ids)), ids])):
        numbers = np.flatnonzero(~np.isnan(logits[row]))
        ids[row] = numbers[logits[row, numbers].argmax()] if len(numbers) else 0
    return ids
