"""Attention of a long text of which each block of rows reads some blocks of keys: FlashPrefill (arXiv 2603.06199).

With the mean key kbar_n of each block n, and a head's queries q_r of block m, score[m, n] = sum over r of
exp(scale q_r . kbar_n). Block m reads block n <= m if n is one of the first SINK blocks, m - n < WINDOW, m is one of
the text's LAST blocks, or score[m, n] >= alpha times the largest score[m, n] of n < m. Over these keys it is ordinary
attention.

The attention kernels read the pages that a span's table lists. So a block of rows of one head is a span with the pages
that it reads, in arrays that have one head after the other: each device computes them as any attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from luce.ops.attention import attention
from luce.ops.attention_mma import AttentionInputs
from luce.ops.kvtype import dequantise
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE, PageView, SpanArrays

#: rows of a query block, and keys of a key block
BLOCK = 128
#: blocks at the text's beginning that every row reads, blocks up to a row's own, and blocks at the text's end whose
#: rows read all
SINK, WINDOW, LAST = 2, 4, 2
# As in kernels/block_sparse.cu.
_KEYS, _THREADS, _COPY_THREADS = 32, 256, 128
_PAGES = BLOCK // PAGE


@dataclass(frozen=True)
class _Heads:
    """Keys and values of a layer with one head after the other, and the mean keys of blocks."""

    #: [kv_heads * rows, 1, n]
    k: Array
    v: Array
    #: float32 [kv_heads, rows / BLOCK, d]
    means: Array


@dataclass(frozen=True)
class _Spans:
    """The query blocks of a step, of one head after the other."""

    spans: SpanArrays
    #: int32 [heads * rows]
    positions: Array


class BlockSparse:
    """The attention of a text of `length` tokens, layer by layer, in steps of whole blocks but for the last one.

    `alpha`: in (0, 1); a larger one reads fewer blocks. Layers with the same form of K and V share memory, so a layer
    reads the whole text before the next one begins. Page i of a pool holds page i of the text.
    """

    def __init__(self, device: Device, alpha: float, length: int) -> None:
        self._device = device
        self._alpha = alpha
        self._blocks = -(-length // BLOCK)
        self._heads: dict[object, _Heads] = {}

    def step(self, position: int, rows: int) -> SparseStep:
        """The attention of the rows from `position`, a multiple of BLOCK, on."""
        return SparseStep(self, position, rows)

    def attend(self, inputs: AttentionInputs, at: _Spans, position: int, rows: int) -> Array:
        """luce.ops.attention.attention of a step; inputs have neither a window nor rows that are seen by number."""
        (_, heads, d), device = inputs.q.shape, self._device
        padded = -(-rows // BLOCK) * BLOCK
        own = self._extend(inputs, position, rows)
        q = device.empty((heads * padded, 1, d)) if padded == rows else device.zeros((heads * padded, 1, d))
        _copy_heads(device, q.reshape(heads, padded, d)[:, :rows].swapaxes(0, 1), inputs.q)
        view = self._view(q.reshape(heads, padded, d), own, inputs, position // BLOCK, -(-(position + rows) // PAGE))
        # Rows behind the text's end see whatever the last page has behind it.
        mixed = attention(
            device,
            replace(inputs, q=q, k_pool=own.k, v_pool=own.v, spans=at.spans, view=view, positions=at.positions),
        )
        out = device.empty((rows, heads, d))
        _copy_heads(device, out, mixed.reshape(heads, padded, d)[:, :rows].swapaxes(0, 1))
        return out

    def _extend(self, inputs: AttentionInputs, position: int, rows: int) -> _Heads:
        """Copy the step's keys and values, and add the means of its blocks."""
        k, v, d, device = inputs.k_pool, inputs.v_pool, inputs.q.shape[2], self._device
        kv_heads, length = k.shape[1], self._blocks * BLOCK
        form = (k.shape[1:], k.dtype, v.shape[1:], v.dtype)
        if form not in self._heads:
            copies = [device.zeros((kv_heads * length, 1, pool.shape[2]), pool.dtype) for pool in (k, v)]
            self._heads[form] = _Heads(copies[0], copies[1], device.empty((kv_heads, self._blocks, d)))
        own = self._heads[form]
        for pool, copy in ((k, own.k), (v, own.v)):
            to = copy.reshape(kv_heads, length, pool.shape[2])[:, position : position + rows]
            _copy_heads(device, to.swapaxes(0, 1), pool[position : position + rows])
        # The last block may be short. Nobody needs its mean: rows before it do not see it.
        first, count = position // BLOCK, rows // BLOCK
        if device.host:
            keys = dequantise(k[position : position + count * BLOCK], d)
            own.means[:, first : first + count] = keys.reshape(count, BLOCK, kv_heads, d).mean(axis=1).swapaxes(0, 1)
        elif count:
            sizes = np.int32(first), np.int32(length), np.int32(d)
            _launch(device, "block_means", (count, kv_heads), min(_THREADS, d // 2), own.k, own.means, *sizes)
        return own

    def _view(self, q: Array, own: _Heads, inputs: AttentionInputs, first: int, pages: int) -> PageView:
        """The pages that the query blocks from block `first` on read: q float32 [heads, rows, d]; `pages` hold the text
        so far."""
        (heads, padded, d), device = q.shape, self._device
        kv_heads, blocks = own.means.shape[0], padded // BLOCK
        width, dense, group = pages, self._blocks - LAST, heads // kv_heads
        if device.host:
            kept = _kept(_scores_on_host(q, own.means, first, inputs.scale), first, dense, self._alpha)
            return _listed(kept, group, self._blocks * _PAGES, pages)
        scores = device.empty((heads, blocks, self._blocks))
        table, places = (device.empty((heads * blocks, width), np.int32) for _ in range(2))
        count = device.empty(heads * blocks, np.int32)
        if (most := min(first + blocks - 1, dense - 1)) > 0:
            sizes = (*map(np.int32, (first, self._blocks, group, d)), np.float32(inputs.scale))
            _launch(device, "block_scores", (-(-most // _KEYS), blocks, heads), _THREADS, q, own.means, scores, *sizes)
        numbers = first, self._blocks, width, group, self._blocks * _PAGES, pages, SINK, WINDOW, dense
        args = (scores, table, places, count, *map(np.int32, numbers), np.float32(self._alpha))
        _launch(device, "list_pages", (blocks, heads), device.lanes, *args)
        return PageView(table, places, count, inputs.view.dest)

    def spans(self, heads: int, position: int, rows: int) -> _Spans:
        """The spans of a step: those of a head side by side, rows behind the text's end included."""
        blocks = -(-rows // BLOCK)
        number = np.arange(heads * blocks, dtype=np.int32)
        starts, places = number * BLOCK, position + number % blocks * BLOCK
        table = np.stack([np.zeros_like(number), starts, np.full_like(number, BLOCK), places], axis=1)
        positions = (places[:, None] + np.arange(BLOCK, dtype=np.int32)).ravel()
        row_span = np.repeat(number, BLOCK)
        upload = self._device.upload
        spans = SpanArrays(upload(table), upload(row_span), len(number), BLOCK, shortest=BLOCK)
        return _Spans(spans, upload(positions))


class SparseStep:
    """The attention of one step of a text. Called with the inputs of each layer: float32 [rows, heads, d]."""

    def __init__(self, text: BlockSparse, position: int, rows: int) -> None:
        self._text = text
        self._place = position, rows
        self._spans: dict[int, _Spans] = {}

    def __call__(self, inputs: AttentionInputs) -> Array:
        heads = inputs.q.shape[1]
        if heads not in self._spans:
            self._spans[heads] = self._text.spans(heads, *self._place)
        return self._text.attend(inputs, self._spans[heads], *self._place)


def is_dense(length: int) -> bool:
    """Whether all rows of a text of `length` tokens read all blocks before them, whatever their scores are."""
    return -(-length // BLOCK) <= SINK + WINDOW + LAST


def block_sparse_bytes(length: int, rows: int, heads: int, kv_bytes: int, kv_heads: int, d: int) -> int:
    """Bytes of a BlockSparse for a text of `length` tokens in steps of `rows`, for layers of one form.

    `kv_bytes`: of the keys and values of a token.
    """
    blocks, padded = -(-length // BLOCK), -(-rows // BLOCK) * BLOCK
    lists = heads * padded // BLOCK * blocks * 4 * (1 + 2 * _PAGES)
    return blocks * (BLOCK * kv_bytes + 4 * kv_heads * d) + lists + 8 * padded * heads * d


def _launch(device: Device, kernel: str, grid: tuple[int, ...], threads: int, *args: object) -> None:
    device.launch("block_sparse", kernel, grid, (threads,), args, defines={"KTYPE": "F16"})


def _copy_heads(device: Device, to: Array, source: Array) -> None:
    """to = source, [rows, heads, n] of any row and head strides and n values side by side."""
    if device.host:
        to[...] = source
        return
    rows, heads, n = source.shape
    strides = (np.int64(stride // 2) for stride in (*to.strides[:2], *source.strides[:2]))
    words = n * source.dtype.itemsize // 2
    to_row, to_head, row, head = strides
    grid = (rows, heads, -(-words // _COPY_THREADS))
    _launch(device, "copy_heads", grid, _COPY_THREADS, to, to_row, to_head, source, row, head, np.int32(words))


def _scores_on_host(q: Array, means: Array, first: int, scale: float) -> Array:
    """log score[m, n] for query blocks from `first` on, -inf without n < m: float32 [heads, blocks, all blocks]."""
    heads, padded = q.shape[:2]
    blocks, group = padded // BLOCK, heads // means.shape[0]
    scores = np.full((heads, blocks, means.shape[1]), -np.inf, np.float32)
    for head in range(heads):
        for block in range(blocks):
            if not (end := first + block):
                continue
            logits = (q[head, block * BLOCK : (block + 1) * BLOCK] * np.float32(scale)) @ means[head // group, :end].T
            top = logits.max(axis=0)
            scores[head, block, :end] = top + np.log(np.exp(logits - top).sum(axis=0))
    return scores


def _kept(scores: Array, first: int, dense: int, alpha: float) -> Array:
    """Which blocks each query block reads: float32 -> bool [heads, blocks, all blocks]."""
    m, n = first + np.arange(scores.shape[1])[:, None], np.arange(scores.shape[2])
    top = scores.max(axis=2, keepdims=True)
    near = np.exp(scores - np.where(np.isfinite(top), top, 0)) >= alpha
    return (n <= m) & ((n < SINK) | (m - n < WINDOW) | (m >= dense) | near)


def _listed(kept: Array, group: int, apart: int, pages: int) -> PageView:
    """The pages of kept blocks; KV head g has the numbers g * apart, ..., of which `pages` hold the text so far."""
    own = np.repeat(kept, _PAGES, axis=2)[:, :, :pages]
    heads, blocks, _ = own.shape
    table, first = (np.zeros((heads * blocks, pages), np.int32) for _ in range(2))
    count = own.sum(axis=2).astype(np.int32).ravel()
    for number, (head, block) in enumerate(np.ndindex(heads, blocks)):
        listed = np.flatnonzero(own[head, block]).astype(np.int32)
        table[number, : len(listed)] = head // group * apart + listed
        first[number, : len(listed)] = listed * PAGE
    return PageView(table, first, count, np.zeros(0, np.int32))
