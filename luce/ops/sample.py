"""Choosing tokens on the device."""

from __future__ import annotations

import numpy as np

from luce.runtime.device import Array, Device

# Columns that one block searches: a vocabulary of 248320 becomes 61 blocks, enough to draw on the whole memory's rate.
_PART = 4096
_THREADS = (256,)


def argmax(device: Device, logits: Array) -> Array:
    """Index of the largest logit of each row, the lowest index on ties: float32 [m, vocab] -> int32 [m].

    NaN is less than every number; a row of nothing but NaN gives 0. `logits` may have any row stride.
    """
    if device.host:
        return _host(logits)
    m, vocab = logits.shape
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


def _host(logits: Array) -> Array:
    ids = logits.argmax(axis=1).astype(np.int32)
    # NumPy's argmax is the first NaN where there is one.
    for row in np.flatnonzero(np.isnan(logits[np.arange(len(ids)), ids])):
        numbers = np.flatnonzero(~np.isnan(logits[row]))
        ids[row] = numbers[logits[row, numbers].argmax()] if len(numbers) else 0
    return ids
