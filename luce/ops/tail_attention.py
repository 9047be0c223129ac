"""How much attention the last rows of a text give to each of its tokens: speculative prefill (arXiv 2502.02789)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.ops.kvtype import dequantise, kernel_type
from luce.ops.qkv import Rotation
from luce.runtime.device import Array, Device

#: heads whose logits are in memory at a time, for each row and key
HEADS = 16
# As in kernels/tail_attention.cu.
_KEYS, _THREADS = 16, 256


class TailAttention:
    """The largest attention weight by any head, for each of the last `rows` of `n` rows and each row up to it."""

    def __init__(self, device: Device, rows: int, n: int) -> None:
        self._device = device
        self._rows, self._n = rows, n
        # float32 [rows, n]; keys behind a row have 0.
        self._best = device.zeros((rows, n))

    def add(self, queries: NDArray[np.float32], k_pool: Array, scale: float, rotation: Rotation | None = None) -> None:
        """Take the heads of one layer into account, with attention weights softmax over j of scale q_t k_j.

        queries float32 [rows, heads, d] of the last rows, on the host; the first n rows of `k_pool` (as in
        luce.ops.attention) are the keys, [kv_heads, d] each. `rotation`, to the positions 0 .. n - 1: queries and keys
        lose it first.
        """
        scaled = queries * np.float32(scale)
        if rotation is not None:
            newest = self._device.download(rotation.table[self._n - self._rows :])
            scaled = _unrotated(scaled, newest, adjacent=rotation.adjacent)
        for first in range(0, queries.shape[1], HEADS):
            count = min(HEADS, queries.shape[1] - first)
            if self._device.host:
                self._add_on_host(scaled, k_pool, rotation, range(first, first + count))
            else:
                self._launch(scaled, k_pool, rotation, range(first, first + count))

    def result(self) -> NDArray[np.float32]:
        """The largest weights by all layers so far: float32 [rows, n]."""
        return self._device.download(self._best)

    def _add_on_host(self, scaled: NDArray[np.float32], k_pool: Array, rotation: Rotation | None, heads: range) -> None:
        n, rows = self._n, self._rows
        keys = dequantise(k_pool[:n], scaled.shape[2])
        if rotation is not None:
            keys = _unrotated(keys, rotation.table[:n], adjacent=rotation.adjacent)
        group = scaled.shape[1] // keys.shape[1]
        logits = np.empty((len(heads), rows, n), np.float32)
        for head in heads:
            np.matmul(scaled[:, head], keys[:, head // group].T, out=logits[head - heads.start])
        logits[:, np.arange(n) > np.arange(n - rows, n)[:, None]] = -np.inf
        logits -= logits.max(axis=2, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=2, keepdims=True)
        np.maximum(self._best, logits.max(axis=0), out=self._best)

    def _launch(self, scaled: NDArray[np.float32], k_pool: Array, rotation: Rotation | None, heads: range) -> None:
        device, n, rows, (_, every, d) = self._device, self._n, self._rows, scaled.shape
        kv_heads = k_pool.shape[1]
        group = every // kv_heads
        table, half, adjacent = (
            (None, 0, 0) if rotation is None else (rotation.table, rotation.table.shape[1], int(rotation.adjacent))
        )
        logits, totals = device.empty((len(heads), rows, n)), device.empty((len(heads), rows, 2))
        sizes = (rows, n, every, kv_heads, d, heads.start, len(heads), half, adjacent)
        args = (device.upload(scaled), k_pool, table, logits, *map(np.int32, sizes))
        grid = (-(-n // _KEYS), heads[-1] // group - heads.start // group + 1)
        self._run("tail_logits", k_pool, d, grid, args, shared=4 * _KEYS * (d + 1))
        lengths = np.int32(rows), np.int32(n)
        self._run("tail_totals", k_pool, d, (rows, len(heads)), (logits, totals, *lengths))
        last = logits, totals, self._best, *lengths, np.int32(len(heads))
        self._run("tail_best", k_pool, d, (-(-n // _THREADS), rows), last)

    def _run(
        self, kernel: str, k_pool: Array, d: int, grid: tuple[int, ...], args: tuple[object, ...], shared: int = 0
    ) -> None:
        defines = {"KTYPE": kernel_type(k_pool, d)}
        self._device.launch("tail_attention", kernel, grid, (_THREADS,), args, defines=defines, shared=shared)


def tail_attention_bytes(rows: int, heads: int, n: int) -> int:
    """Bytes of the weights of `rows` rows and n keys, and of their logits by at most HEADS of `heads` heads."""
    return 4 * rows * n * (1 + min(HEADS, heads))


def _unrotated(x: NDArray[np.float32], table: NDArray[np.float32], *, adjacent: bool) -> NDArray[np.float32]:
    """Heads before their rotary embedding: float32 [n, heads, d], table float32 [n, half, 2] as in Rotation."""
    half = table.shape[1]
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if adjacent else (slice(half), slice(half, 2 * half))
    result = x.copy()
    # cos and sin have a common factor with YaRN.
    length = cos * cos + sin * sin
    a, b = x[..., first], x[..., second]
    result[..., first] = (a * cos + b * sin) / length
    result[..., second] = (b * cos - a * sin) / length
    return result
