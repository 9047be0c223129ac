"""Host memory for pages that leave the devices is there before a request needs it: pinning takes milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import luce
from luce import assembly
from luce.kvcache import memory_tier
from luce.runtime.host import HostDevice
from luce.runtime.pinned import PinnedPool
from luce.shard import local_state
from tests.support.daemons import within
from tests.support.generate import ask
from tests.support.reference import Reference

SLAB = 1 << 19
TOKENS = 2000


class Pinning(HostDevice):
    """Its host memory is pinned in slabs: `waited` bytes of them while a request was under way."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.waited = 0
        #: slabs that nobody waits for are made between requests only
        self.idle = threading.Event()
        self.idle.set()
        self.pool = PinnedPool(self._pin, SLAB, least_ahead=4 * SLAB, most_ahead=0)

    def _pin(self, slab: NDArray[np.uint8]) -> Callable[[], None]:
        if threading.current_thread().name == "luce-pin":
            assert self.idle.wait(60)
        elif not self.idle.is_set():
            self.waited += len(slab)
        return lambda: None

    def pinned(self, size: int) -> NDArray[np.uint8]:
        return self.pool.take(size)

    def reserve_pinned(self, size: int) -> None:
        self.pool.reserve(size)


@pytest.mark.parametrize(("parallel", "ram"), [(1, 64), (3, 64), (3, 16)])
def test_no_request_waits_for_host_memory(parallel: int, ram: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # As with a large model: many slabs a prompt, several pieces a slab. Four are ahead beside what is expected.
    monkeypatch.setattr(memory_tier, "BATCH", 8)
    monkeypatch.setattr(local_state, "BUFFER_BYTES", SLAB // 4)
    monkeypatch.setattr(memory_tier, "PREPARED_BYTES", 0)
    devices = [Pinning(0), Pinning(1)]
    monkeypatch.setattr(assembly, "open_placement", lambda config, *connects: devices)
    reference = Reference("qwen3-a-F32")
    drawn = np.random.default_rng(0).integers(0, reference.spec.vocab, (parallel + 1, TOKENS))
    options = {"max_ctx": 2048, "parallel": parallel, "cache_ram": ram, "kv_cache_dir": "off"}
    with luce.load(reference.path, target_devices="cpu:0,cpu:1", **options) as model:
        cache = model.engine.cache
        assert cache is not None
        tier = cache.memory

        def known(prompt: list[int]) -> int:
            assert within(60, lambda: not any(device.pool.growing for device in devices))
            for device in devices:
                device.idle.clear()
            cached = ask(model, prompt, 2)[1]
            for device in devices:
                device.idle.set()
            return cached

        assert [known(prompt.tolist()) for prompt in drawn] == [0] * len(drawn)
        before = tier.bytes
        # Each pushes pages of others to the host, and comes from there.
        assert [known(prompt.tolist()) for prompt in drawn] == [TOKENS] * len(drawn)
        moved = (tier.bytes - before) // tier.page_bytes
        assert moved >= TOKENS // 64
        assert [device.waited for device in devices] == [0, 0]
