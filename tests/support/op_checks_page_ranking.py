"""Checks of luce.ops.page_ranking on any device, against NumPy and the gguf package's blocks."""

from __future__ import annotations

import numpy as np

from luce.ops.page_ranking import GROUP, NEWEST_QUERIES, page_moments, store_queries
from luce.runtime.device import Device
from luce.runtime.step import PAGE, SpanArrays
from tests.support.attention_inputs import loaded, spread_out, stored


def check_moments(device: Device, type: str, kv_heads: int, d: int) -> None:
    """Moments of pages in any order, some listed twice, and of no pages; some keys have a large mean."""
    rng = np.random.default_rng(d + kv_heads)
    keys = rng.standard_normal((5 * PAGE, kv_heads, d)).astype(np.float32)
    keys[:PAGE] += 30
    pool = stored(keys, type)
    pages = np.array([3, 0, 1, 3], np.int32)
    found = device.download(page_moments(device, device.upload(pool), d, pages))
    whole = loaded(pool, type).astype(np.float64).reshape(5, PAGE // GROUP, GROUP, kv_heads, d)[pages]
    np.testing.assert_allclose(found, np.stack([whole.mean(axis=2), whole.var(axis=2)], axis=3), rtol=1e-5, atol=1e-6)
    none = device.download(page_moments(device, device.upload(pool), d, pages[:0]))
    assert none.shape == (0, PAGE // GROUP, kv_heads, 2, d) and none.dtype == np.float32


def check_queries(device: Device, heads: int, d: int) -> None:
    """After spans of any length, and rows written again, the newest queries of each slot are in their places."""
    rng = np.random.default_rng(heads)
    pool = device.upload(stored(np.zeros((PAGE, 1, d), np.float32), "f16"))
    kept = device.zeros((3, NEWEST_QUERIES, heads, d))
    expected = np.zeros(kept.shape, np.float32)
    for lengths in ([(2, 0, 40), (0, 5, 1)], [(0, 6, 16), (2, 40, 3)], [(0, 8, 2), (1, 0, 17), (2, 43, 1)]):
        spans, at = [], 0
        for slot, position, rows in lengths:
            spans.append((slot, at, rows, position))
            at += rows
        q = rng.standard_normal((at, heads, d)).astype(np.float32)
        for slot, start, rows, position in spans:
            for row in range(rows):
                expected[slot, (position + row) % NEWEST_QUERIES] = q[start + row]
        table = np.array(spans, np.int32)
        row_span = np.repeat(np.arange(len(spans), dtype=np.int32), table[:, 2])
        arrays = SpanArrays(device.upload(table), device.upload(row_span), len(spans), int(table[:, 2].max()))
        (view,) = spread_out(device, q)
        store_queries(device, view, arrays, kept, pool)
        np.testing.assert_array_equal(device.download(kept), expected)
