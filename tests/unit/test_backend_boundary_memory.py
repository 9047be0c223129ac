"""What the plan says of the ways between shards is what they take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import DTypeLike

from luce.backend.boundary_memory import BoundaryMemory, boundary_memory
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.microbatch import max_microbatch_rows
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.transfer import Link
from luce.shard.sizes import activation_bytes
from tests.support.daemons import devices, remote
from tests.support.reference import Reference

REFERENCE = Reference("gemma4-e-F32")
LAYERS = (range(2), range(2, 5), range(5, len(REFERENCE.spec.layers)))
ROWS = 100


class Counting(HostDevice):
    """Counts what a link takes of it: `own` memory and `pinned` memory of the host. `near` reaches its like."""

    def __init__(self, *, host: bool, near: bool = False) -> None:
        super().__init__(0)
        self.host = host
        self.near = near
        self.own = self.taken = 0

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        made = super().zeros(shape, dtype)
        self.own += made.nbytes
        return made

    def pinned(self, size: int) -> Array:
        self.taken += size
        return super().pinned(size)

    def reaches(self, other: Device) -> bool:
        return self.near


@pytest.mark.parametrize("hosts", list(itertools.product((False, True), repeat=3)), ids=str)
def test_ways_in_one_process(hosts: tuple[bool, ...]) -> None:
    placed = [Counting(host=host) for host in hosts]
    first, *planned = boundary_memory(REFERENCE.spec, placed, LAYERS, ROWS)
    assert first == BoundaryMemory(0, 0)
    for before, after, layers, way in zip(placed, placed[1:], LAYERS[1:], planned, strict=False):
        for device in placed:
            device.own = device.taken = 0
        Link(
            before, after, ROWS * activation_bytes(REFERENCE.spec, layers.start) // 4, peer=False, watch=lambda *_: None
        )
        pinned = before.taken + after.taken
        assert (way.device, way.host) == ((pinned, 0) if after.host else (after.own, pinned))
        assert way.device > 0


def test_what_devices_reach_needs_no_host_memory() -> None:
    placed = [Counting(host=False, near=True) for _ in range(3)]
    way = boundary_memory(REFERENCE.spec, placed, LAYERS, ROWS)[1]
    size = ROWS * activation_bytes(REFERENCE.spec, LAYERS[1].start) // 4
    Link(placed[0], placed[1], size, peer=True, watch=lambda *_: None)
    assert placed[1].own == way.device and placed[0].taken + placed[1].taken == 0 < way.host


@pytest.mark.parametrize("names", ["cpu:0,cpu:1,cpu:2", "isolated"])
def test_ways_to_daemons(names: str) -> None:
    isolated = names == "isolated"
    with devices("cpu:0,cpu:1,cpu:2", isolate_shards=isolated) as opened, open_gguf(REFERENCE.path) as file:
        backend = LayerSplitBackend(file, REFERENCE.spec, opened, ServingOptions(context=128, microbatch=64))
        try:
            planned = boundary_memory(
                REFERENCE.spec, opened, [part.layers for part in backend.devices], max_microbatch_rows(64)
            )
            arena = remote(opened, 1).arena
            assert arena is not None and planned[0] == BoundaryMemory(0, 0) and planned[1].host == len(arena.memory)
            other = remote(opened, 2).arena
            assert other is not None and planned[2].host == (len(other.memory) if isolated else 0)
            assert other is arena or isolated
        finally:
            backend.close()
