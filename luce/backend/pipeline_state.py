"""`Backend.state` and `Backend.ranking` of a pipeline: they call every shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.backend.restore import load
from luce.runtime.device import Device
from luce.runtime.step import Int32
from luce.shard.saved_state import JoinedSavedState, SavedState, StatePiece
from luce.shard.shard import Shard


class PipelineState:
    """See luce.backend.backend.BackendState.

    `wait` waits until the shards' threads are idle, so that this thread may call the shards. `page_bytes`: bytes of
    host memory for a saved page of full attention, by device.
    """

    def __init__(self, shards: Sequence[Shard], wait: Callable[[], None], page_bytes: Mapping[Device, int]) -> None:
        self._shards = shards
        self._wait = wait
        self._page_bytes = page_bytes

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> JoinedSavedState:
        self._wait()
        parts = [shard.state.save(slot, pages, held=held) for shard in self._shards]
        # Saved states in this process are read while steps run; those of daemons are fetched between steps.
        return JoinedSavedState(parts, self._wait) if any(s.remote for s in self._shards) else JoinedSavedState(parts)

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0) -> None:
        assert isinstance(saved, JoinedSavedState)
        self._wait()
        shards = zip(self._shards, saved.parts, strict=True)
        waits = [shard.state.restore(slot, pages, part, first) for shard, part in shards]
        for wait in filter(None, waits):
            wait()

    def load(self, pieces: Iterable[StatePiece]) -> None:
        self._wait()
        load(self._shards, pieces)

    def staging_buffer(self, size: int) -> NDArray[np.uint8]:
        local = (shard.device for shard in self._shards if not shard.remote)
        best = min(local, key=lambda device: device.host, default=None)
        return np.empty(size, np.uint8) if best is None else best.staging_buffer(size)

    def reserve(self, pages: int) -> None:
        for device, size in self._page_bytes.items():
            device.reserve_pinned(pages * size)


class PipelineRanking:
    """See luce.backend.backend.BackendRanking. `wait` as in PipelineState."""

    def __init__(self, shards: Sequence[Shard], wait: Callable[[], None]) -> None:
        self._shards = shards
        self._wait = wait

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        self._wait()
        for shard in self._shards:
            shard.ranking.add(slot, entries, pages)

    def drop(self, slot: int) -> None:
        self._wait()
        for shard in self._shards:
            shard.ranking.drop(slot)

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        self._wait()
        layers = np.concatenate([shard.ranking.rank(slot, position, entries) for shard in self._shards])
        mean: NDArray[np.float64] = layers.mean(axis=0)
        return mean
