"""Checks of luce.ops.block_sparse on any device, against its formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.ops.attention import attention
from luce.ops.attention_mma import AttentionInputs
from luce.ops.block_sparse import BLOCK, BlockSparse
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE, DeviceStep, PageView, Span, Step

F64 = NDArray[np.float64]
#: where a score is nearer to its limit than this share of it, fp16 may decide otherwise: such rows are not compared
MARGIN = 0.01


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of one layer, exact in fp16: [n, heads, d], [n, kv_heads, d]."""

    q: F64
    k: F64
    v: F64
    scale: float

    @classmethod
    def random(cls, n: int, shape: tuple[int, int, int], seed: int, spread: float = 1.0) -> Text:
        """Each block of keys and each of queries has a direction of its own; `spread` scales both."""
        heads, kv_heads, d = shape
        rng = np.random.default_rng(seed)
        blocks = -(-n // BLOCK)

        def rows(count: int) -> F64:
            common = np.repeat(rng.standard_normal((blocks, count, d)), BLOCK, axis=0)[:n]
            return (spread * (common + 0.3 * rng.standard_normal((n, count, d)))).astype(np.float16).astype(np.float64)

        values = rng.standard_normal((n, kv_heads, d)).astype(np.float16).astype(np.float64)
        return cls(rows(heads), rows(kv_heads), values, d**-0.5)


def blocks_read(text: Text, alpha: float) -> tuple[NDArray[np.bool_], F64]:
    """Which key blocks each query block of each head reads, bool [heads, blocks, blocks]; and how near its scores are
    to their limit, as a share of it: [heads, blocks]."""
    n, heads, _ = text.q.shape
    blocks, group = -(-n // BLOCK), heads // text.k.shape[1]
    read, nearest = np.zeros((heads, blocks, blocks), np.bool_), np.full((heads, blocks), np.inf)
    for h in range(heads):
        means = np.array([text.k[b * BLOCK : (b + 1) * BLOCK, h // group].mean(axis=0) for b in range(n // BLOCK)])
        for m in range(blocks):
            logits = text.scale * text.q[m * BLOCK : (m + 1) * BLOCK, h] @ means[:m].T
            scores = np.exp(logits - logits.max(initial=-np.inf)).sum(axis=0) if m else np.zeros(0)
            for b in range(m + 1):
                read[h, m, b] = forced(b, m, blocks)
                if not read[h, m, b]:
                    share = scores[b] / scores.max()
                    read[h, m, b] = share >= alpha
                    nearest[h, m] = min(nearest[h, m], abs(share - alpha) / alpha)
    return read, nearest


def forced(b: int, m: int, blocks: int) -> bool:
    """Whether query block m reads key block b whatever the scores are."""
    return b < 2 or m - b < 4 or m >= blocks - 2


def reference(text: Text, read: NDArray[np.bool_]) -> F64:
    """softmax over the keys of the blocks that are read, up to the row's own: float64 [n, heads, d]."""
    n, heads, _ = text.q.shape
    group, out = heads // text.k.shape[1], np.empty_like(text.q)
    places = np.arange(n)
    for h in range(heads):
        logits = text.scale * text.q[:, h] @ text.k[:, h // group].T
        seen = read[h][np.ix_(places // BLOCK, places // BLOCK)] & (places <= places[:, None])
        logits[~seen] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[:, h] = weights @ text.v[:, h // group] / weights.sum(axis=1, keepdims=True)
    return out


def computed(device: Device, text: Text, rows: int, alpha: float | None) -> NDArray[np.float32]:
    """By steps of `rows` rows. `alpha` None: by luce.ops.attention over all keys."""
    n = len(text.q)
    pages = -(-n // PAGE)

    def pool(values: F64) -> Array:
        # What rows behind the text hold has no effect.
        rows = np.full((pages * PAGE, *values.shape[1:]), 7.0)
        rows[:n] = values
        return device.upload(rows.astype(device.kv_dtype))

    k, v = pool(text.k), pool(text.v)
    sparse = None if alpha is None else BlockSparse(device, alpha, n)
    parts = []
    for begin in range(0, n, rows):
        end = min(begin + rows, n)
        entries = np.arange(-(-end // PAGE), dtype=np.int32)[None]
        place = np.arange(begin, end, dtype=np.int32)
        view = PageView(entries, entries * PAGE, np.array([entries.size], np.int32), place)
        step = Step.of_spans([Span(0, 0, end - begin, begin)], np.zeros(end - begin, np.int32), (view,))
        own = DeviceStep.upload(device, step)
        q = device.upload(text.q[begin:end].astype(np.float32))
        inputs = AttentionInputs(q, k, v, own.spans, own.views[0], own.positions, text.scale, None)
        result = attention(device, inputs) if sparse is None else sparse.step(begin, end - begin)(inputs)
        parts.append(device.download(result))
    return np.concatenate(parts)


def check(device: Device, n: int, rows: int, shape: tuple[int, int, int], alpha: float) -> None:
    """Some blocks are not read, and the result is that of the formulas."""
    text = Text.random(n, shape, seed=n, spread=1.5)
    read, nearest = blocks_read(text, alpha)
    blocks = -(-n // BLOCK)
    assert (read.sum(axis=(1, 2)) < blocks * (blocks + 1) // 2).all(), "the case leaves nothing out"
    always = sum(forced(b, m, blocks) for m in range(blocks) for b in range(m + 1))
    assert read.sum() > always * shape[0], "the case reads forced blocks alone"
    found = computed(device, text, rows, alpha)
    assert found.shape == text.q.shape and found.dtype == np.float32
    certain = np.repeat(nearest > MARGIN, BLOCK, axis=1)[:, :n].T
    assert certain.mean() > 0.7, "too few rows can be compared"
    np.testing.assert_allclose(found[certain], reference(text, read)[certain], rtol=5e-3, atol=5e-3)


def check_lists(device: Device, begin: int, heads: int, kv_heads: int) -> None:
    """list_pages of three query blocks from `begin` on, where a wave takes several turns; the last page is missing."""
    rng = np.random.default_rng(begin)
    queries, blocks, each = 3, begin + 9, BLOCK // PAGE
    columns, pages, alpha = blocks, (begin + queries) * each - 1, 0.3
    scores = rng.uniform(-3, 0, (heads, queries, columns)).astype(np.float32)
    shape = (heads * queries, pages + 1)
    table, first = (device.upload(np.full(shape, -1, np.int32)) for _ in range(2))
    count = device.empty(heads * queries, np.int32)
    dense = begin + queries - 1
    sizes = begin, columns, shape[1], heads // kv_heads, blocks * each, pages, 2, 4, dense
    args = (device.upload(scores), table, first, count, *map(np.int32, sizes), np.float32(alpha))
    device.launch("block_sparse", "list_pages", (queries, heads), (device.lanes,), args, defines={"KTYPE": "F16"})
    found = [device.download(array) for array in (table, first, count)]
    for number, (head, query) in enumerate(np.ndindex(heads, queries)):
        m, own = begin + query, scores[head, query].astype(np.float64)
        near = np.exp(own - own[:m].max()) >= alpha
        kept = [b for b in range(m + 1) if b < 2 or m - b < 4 or m >= dense or near[b]]
        listed = np.array([page for b in kept for page in range(b * each, (b + 1) * each) if page < pages])
        assert found[2][number] == len(listed)
        base = head // (heads // kv_heads) * blocks * each
        np.testing.assert_array_equal(found[0][number, : len(listed)], base + listed)
        np.testing.assert_array_equal(found[1][number, : len(listed)], listed * PAGE)
