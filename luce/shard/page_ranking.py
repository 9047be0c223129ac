"""Estimates how much a query attends to each page of a long sequence, from statistics of its keys on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.layers.attention import AttentionLayer
from luce.layers.latent_attention import LatentAttentionLayer
from luce.models.spec import Attention, ModelSpec
from luce.ops.page_ranking import NEWEST_QUERIES, moments_bytes, page_moments
from luce.runtime.device import Device
from luce.runtime.step import Int32

#: most pending copies to the host; `add` waits for the oldest one beyond that
_MAX_PENDING = 4


class PageStatistics:
    """The pages of one sequence that have statistics, and for each layer their moments.

    Moments are float32 [pages, groups, kv_heads, 2, d]. Memory grows by doubling; a layer's memory is allocated with
    its first moments.
    """

    def __init__(self, layers: int) -> None:
        self.known = np.zeros(0, np.bool_)
        self.moments: list[NDArray[np.float32] | None] = [None] * layers

    def mark(self, entries: Int32) -> None:
        """Count these pages as known. The copies of their moments may be pending."""
        end = int(entries.max(initial=-1)) + 1
        if end > len(self.known):
            self.known = np.concatenate([self.known, np.zeros(max(end - len(self.known), len(self.known)), np.bool_)])
        self.known[entries] = True

    def put(self, layer: int, entries: Int32, rows: NDArray[np.float32]) -> None:
        """Store the moments of marked entries."""
        memory = self.moments[layer]
        if memory is None or len(memory) < len(self.known):
            larger = np.empty((len(self.known), *rows.shape[1:]), np.float32)
            if memory is not None:
                larger[: len(memory)] = memory
            self.moments[layer] = memory = larger
        memory[entries] = rows

    def take(self, layer: int, entries: Int32) -> NDArray[np.float32]:
        """The moments of these entries."""
        memory = self.moments[layer]
        assert memory is not None
        # The common case, a request for all entries, needs no copy.
        return memory[: len(entries)] if len(entries) == entries[-1] + 1 else memory[entries]


class PageRanker:
    """See luce.shard.shard.ShardRanking. `layers`: those that store their newest queries, in their order."""

    def __init__(self, device: Device, layers: Sequence[AttentionLayer | LatentAttentionLayer]) -> None:
        self._device = device
        self._layers = list(layers)
        #: by slot
        self.statistics: dict[int, PageStatistics] = {}
        #: moments of each layer whose copies to the host are queued
        self._pending: deque[tuple[PageStatistics, Int32, list[Callable[[], NDArray[np.float32]]]]] = deque()

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Queue the work. Steps that write to the pages later run after it."""
        statistics = self.statistics.setdefault(slot, PageStatistics(len(self._layers)))
        places, numbers = np.array(entries, np.int32), np.array(pages, np.int32)
        found = [page_moments(self._device, each.state.k, each.head_dim, numbers) for each in self._layers]
        statistics.mark(places)
        self._pending.append((statistics, places, [self._device.fetch(moments) for moments in found]))
        self._receive(_MAX_PENDING)

    def drop(self, slot: int) -> None:
        """Pending copies of the slot's statistics are discarded. Idempotent."""
        self.statistics.pop(slot, None)

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        """Raises BackendError if a page has no statistics."""
        result = np.zeros((len(self._layers), len(entries)))
        if not result.size:
            return result
        statistics = self.statistics.get(slot)
        if statistics is None or int(entries[-1]) >= len(statistics.known) or not statistics.known[entries].all():
            raise BackendError(f"slot {slot}: some of these pages have no statistics")
        self._receive(0)
        for number, layer in enumerate(self._layers):
            assert layer.queries is not None
            query = self._device.download(layer.queries[slot, position % NEWEST_QUERIES])
            result[number] = attention_estimate(query, statistics.take(number, entries), layer.scale)
        return result

    def _receive(self, pending: int) -> None:
        """Store queued moments, oldest first, until at most `pending` copies are queued."""
        while len(self._pending) > pending:
            statistics, entries, found = self._pending.popleft()
            for layer, rows in enumerate(found):
                statistics.put(layer, entries, rows())

    def close(self) -> None:
        """Release the statistics. Idempotent."""
        self._layers.clear()
        self.statistics.clear()
        self._pending.clear()


def ranking_bytes(spec: ModelSpec) -> int:
    """Bytes of host memory for the statistics of a page, in all shards of a model."""
    mixers = [layer.mixer for number, layer in enumerate(spec.layers) if spec.owns_full_pages(number)]
    return sum(moments_bytes(m.kv_heads, m.head_dim) for m in mixers if isinstance(m, Attention))


def attention_estimate(query: NDArray[np.float32], moments: NDArray[np.float32], scale: float) -> NDArray[np.float64]:
    """The largest share of attention that a head gives to each page, estimated.

    float32 [heads, d] and moments float32 [n, groups, kv_heads, 2, d] -> float64 [n]. For keys with mean m and
    variances v, the mean of exp(q k) is about exp(q m + q^2 v / 2), which is exact for normally distributed keys.
    """
    heads, d = query.shape
    n, groups, kv_heads, _, _ = moments.shape
    scaled = query * np.float32(scale)
    factors = np.concatenate([scaled, 0.5 * scaled * scaled], axis=1)
    columns = factors.reshape(kv_heads, heads // kv_heads, 2 * d).transpose(0, 2, 1)
    rows = moments.reshape(n * groups, kv_heads, 2 * d).transpose(1, 0, 2)
    shares = np.matmul(rows, columns).astype(np.float64)
    shares -= shares.max(axis=1, keepdims=True)
    np.exp(shares, out=shares)
    pages = shares.reshape(kv_heads, n, groups, -1).sum(axis=2)
    pages /= pages.sum(axis=1, keepdims=True)
    largest: NDArray[np.float64] = pages.max(axis=(0, 2))
    return largest
