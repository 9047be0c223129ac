"""Checks of luce.ops.tail_attention on any device, against softmax in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.ops.qkv import Rotation
from luce.ops.tail_attention import TailAttention
from luce.runtime.device import Device
from tests.support.attention_inputs import loaded, stored

F64 = NDArray[np.float64]
#: of each rotation of the tests, the part of a head that it turns, and whether its pairs are adjacent
ROTATIONS = {"none": (0.0, False), "halves": (1.0, False), "a part": (0.5, False), "adjacent": (1.0, True)}


def turned(x: F64, half: int, *, adjacent: bool, factor: float, direction: int = 1) -> F64:
    """Heads at the positions 0, 1, ...: each pair as a complex number times factor e^(i angle): [n, heads, d]."""
    angles = direction * np.arange(len(x))[:, None, None] * 10.0 ** (-np.arange(half) / 7)
    first = np.arange(half) * (2 if adjacent else 1)
    second = first + (1 if adjacent else half)
    pairs = (x[..., first] + 1j * x[..., second]) * factor * np.exp(1j * angles)
    result = x.copy()
    result[..., first], result[..., second] = pairs.real, pairs.imag
    return result


def weights(q: F64, k: F64, rows: int) -> F64:
    """The largest softmax weight of a head for the last `rows` rows: [rows, n]."""
    n, heads = len(k), q.shape[1]
    best = np.zeros((rows, n))
    for row in range(rows):
        seen = n - rows + row + 1
        for head in range(heads):
            logits = k[:seen, head * k.shape[1] // heads] @ q[row, head]
            exponentials = np.exp(logits - logits.max())
            best[row, :seen] = np.maximum(best[row, :seen], exponentials / exponentials.sum())
    return best


def check_weights(device: Device, type: str, shape: tuple[int, int, int], n: int, rows: int, rotation: str) -> None:
    """Two layers; `shape` is heads, KV heads, elements of a head. Rotated heads lose their rotation, and its factor."""
    heads, kv_heads, d = shape
    part, adjacent = ROTATIONS[rotation]
    half, factor, scale = int(part * d) // 2, 1.25, 1 / np.sqrt(d)
    rng = np.random.default_rng(n + d)
    op, expected = TailAttention(device, rows, n), np.zeros((rows, n))
    for _ in range(2):
        plain = rng.standard_normal((n, heads, d)), 3 * rng.standard_normal((n, kv_heads, d))
        q, k = (turned(x, half, adjacent=adjacent, factor=factor) if half else x for x in plain)
        # Rows of a pool behind the text hold keys of an earlier one.
        pool = stored(np.concatenate([k, np.full((5, kv_heads, d), 9.0)]).astype(np.float32), type)
        table = None
        if half:
            angles = np.arange(n)[:, None] * 10.0 ** (-np.arange(half) / 7)
            turns = factor * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
            table = Rotation(device.upload(turns.astype(np.float32)), adjacent)
        op.add(q[n - rows :].astype(np.float32), device.upload(pool), scale, table)
        keys = loaded(pool, type).astype(np.float64)[:n]
        if half:
            keys = turned(keys, half, adjacent=adjacent, factor=1 / factor, direction=-1)
        expected = np.maximum(expected, weights(plain[0][n - rows :] * scale, keys, rows))
    found = op.result()
    assert found.dtype == np.float32 and found.shape == (rows, n)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-7)
