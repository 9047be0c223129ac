"""KVFlash's pager over real shards: pages are swapped in byte for byte in every type of K and V, and in
whatever order the device's streams run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.backend.kvflash_size import KVFlashRequest
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import KVFlash, Pager
from luce.kvcache.policies import AgePolicy, Scores
from luce.layers.state import KVPool
from luce.ops.kvtype import KVTypes
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE, Int32
from luce.shard.local import LocalShard
from luce.shard.local_state import LocalState
from tests.support.delayed import DelayedDevice, World
from tests.support.reference import Reference

CONTEXT, CHUNK, SLOTS = 40 * PAGE, 4 * PAGE, 2


class Random(AgePolicy):
    """New scores in each round."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def scores(self, slot: int, tokens: Int32, pages: Any) -> Scores | None:
        return self.random.normal(size=len(pages)).astype(np.float32)


class Shards:
    """A backend whose keys and values are random bytes, and what they were when they were written."""

    def __init__(self, backend: LayerSplitBackend, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.backend = backend
        assert backend.capacity.max_resident_pages is not None
        self.bound = backend.capacity.max_resident_pages
        self.pages = PageTables.over(backend, CHUNK)
        number = backend.capacity.windows.index(None)
        self.group = self.pages.groups[number]
        how = KVFlash(Random(seed), 4, 64, 1 << 40)
        pager = Pager.over(backend, self.pages, how, CHUNK)
        assert pager is not None
        self.pager = pager
        #: keys and values of full attention, of all layers that have some of their own
        self.arrays: list[NDArray[Any]] = []
        for shard in backend.shards:
            assert isinstance(shard, LocalShard)
            for index, state in shard.state.layers.items():
                if backend.spec.group_of(index) == number and backend.spec.donor(index) is None:
                    assert isinstance(state, KVPool)
                    self.arrays += state.parts.values()
        self.written: list[list[list[bytes]]] = [[] for _ in range(SLOTS)]
        assert all(self.pages.reserve(slot, CONTEXT) for slot in range(SLOTS))

    def page(self, array: NDArray[Any], page: int) -> NDArray[np.uint8]:
        """The bytes of a page, to be read and written."""
        return array[page * PAGE : (page + 1) * PAGE].view(np.uint8)

    def write(self, slot: int, count: int) -> None:
        """Some pages more of a sequence."""
        first = len(self.written[slot])
        self.pages.extend(slot, first * PAGE, count * PAGE)
        for entry in range(first, first + count):
            (page,) = self.group.entries(slot, entry, entry + 1)
            found = []
            for array in self.arrays:
                found.append(self.random.bytes(self.page(array, page).nbytes))
                self.put(self.page(array, page), found[-1])
            self.written[slot].append(found)
        self.check(slot)

    def put(self, rows: NDArray[np.uint8], data: bytes) -> None:
        """What a step writes."""
        rows[...] = np.frombuffer(data, np.uint8).reshape(rows.shape)

    def look(self, slot: int) -> None:
        """Let other pages be there."""
        length = len(self.written[slot]) * PAGE
        self.pager.rescore(slot, length, np.zeros(length + 1, np.int32))
        self.check(slot)

    def check(self, slot: int) -> None:
        """What a step reads."""
        present = self.group.resident(slot)
        assert len(present) <= self.bound
        for entry in present:
            (page,) = self.group.entries(slot, entry, entry + 1)
            for array, data in zip(self.arrays, self.written[slot][entry], strict=True):
                self.same(self.page(array, page), data)

    def same(self, rows: NDArray[np.uint8], data: bytes) -> None:
        """What a step must find."""
        assert rows.tobytes() == data

    def end(self, slot: int) -> None:
        """Of a sequence; the next one begins."""
        self.pager.release(slot)
        self.pages.release(slot)
        self.written[slot] = []
        assert self.pages.reserve(slot, CONTEXT)


MOVES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, SLOTS - 1), st.integers(1, 2)), max_size=50)


def drive(shards: Shards, moves: list[tuple[int, int, int]]) -> None:
    """Sequences grow, look again and end."""
    for slot in range(SLOTS):
        for _ in range(shards.bound // 2 + 1):
            shards.write(slot, 2)
    for kind, slot, count in moves:
        written = len(shards.written[slot])
        if kind == 5 or written + count > CONTEXT // PAGE:
            shards.end(slot)
        elif kind < 3:
            shards.write(slot, count)
        elif written:
            shards.look(slot)
    stats = shards.pager.stats()
    assert stats.lost_pages == 0 and stats.swapped_out >= 2 * SLOTS


@contextmanager
def opened(name: str, kv: KVTypes, devices: int) -> Iterator[LayerSplitBackend]:
    reference = Reference(name)
    with open_gguf(reference.path) as file:
        backend = LayerSplitBackend(
            file,
            reference.spec,
            [HostDevice(number) for number in range(devices)],
            ServingOptions(slots=SLOTS, context=CONTEXT, chunk=CHUNK, kv=kv, kvflash=KVFlashRequest(512)),
        )
        try:
            yield backend
        finally:
            backend.close()


@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32"])
@pytest.mark.parametrize("types", ["auto auto", "f16 bf16", "q8_0 q4_0", "q4_0 f16"])
def test_pages_swapped_in_equal_those_swapped_out(name: str, types: str) -> None:
    k, v = types.split()
    with opened(name, KVTypes(k, v), 2) as backend:

        @settings(max_examples=15)
        @given(moves=MOVES, seed=st.integers(0, 1 << 32))
        def traffic(moves: list[tuple[int, int, int]], seed: int) -> None:
            shards = Shards(backend, seed)
            drive(shards, moves)
            assert len(shards.arrays) == 4

        traffic()


class Queued(Shards):
    """Steps are queued on the device as copies are, and nothing is done before somebody waits or the world goes on."""

    def __init__(self, backend: LayerSplitBackend, seed: int) -> None:
        super().__init__(backend, seed)
        self.world = World(seed)
        self.device = DelayedDevice(self.world, 0)
        (shard,) = backend.shards
        assert isinstance(shard, LocalShard)
        state = shard.state
        shard.device, shard.state = self.device, LocalState(self.device, state.layers, state.mirrors, state.groups)
        self.wrong = 0

    def put(self, rows: NDArray[np.uint8], data: bytes) -> None:
        self.device.queue(lambda: super(Queued, self).put(rows, data))

    def same(self, rows: NDArray[np.uint8], data: bytes) -> None:
        def compare() -> None:
            self.wrong += rows.tobytes() != data

        self.device.queue(compare)

    def check(self, slot: int) -> None:
        super().check(slot)
        if self.random.integers(3) == 0:
            self.world.run(self.device.record())


@settings(max_examples=60)
@given(moves=MOVES, seed=st.integers(0, 1 << 32))
def test_copies_and_steps_wait_for_each_other(moves: list[tuple[int, int, int]], seed: int) -> None:
    with opened("qwen35-a-F32", KVTypes("auto", "auto"), 1) as backend:
        shards = Queued(backend, seed)
        drive(shards, moves)
        for slot in range(SLOTS):
            shards.look(slot)
        shards.world.run()
        assert not shards.wrong
