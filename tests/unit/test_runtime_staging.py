"""Background copies without a GPU: a made-up runtime whose device memory is host memory."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from luce.runtime.staging import Stager


class Runtime:
    """As much of cupy.cuda as a Stager uses. Copies happen when someone waits for them, as late as a device may."""

    memcpyHostToDevice = 1

    def __init__(self) -> None:
        self.ptr = 7
        self.threads: set[str] = set()
        self.pending: list[tuple[int, int, int]] = []
        self.lock = threading.Lock()
        self.fails = False
        self.cuda = SimpleNamespace(runtime=self, alloc_pinned_memory=self.alloc, Event=self.event)

    def setDevice(self, index: int) -> None:
        assert index == 3
        self.threads.add(threading.current_thread().name)

    def alloc(self, size: int) -> Any:
        memory = (ctypes.c_uint8 * size)()
        memory.ptr = ctypes.addressof(memory)
        return memory

    def event(self, *, disable_timing: bool) -> Any:
        return SimpleNamespace(synchronize=self.synchronize, record=lambda stream: None)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        if self.fails:
            raise RuntimeError("the bus is gone")
        with self.lock:
            self.pending.append((target, source, size))

    def synchronize(self) -> None:
        with self.lock:
            for target, source, size in self.pending:
                ctypes.memmove(target, source, size)
            self.pending.clear()


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.mark.parametrize("count", [1, 1000, 54321])
def test_values_arrive(runtime: Runtime, count: int) -> None:
    sources = [np.random.default_rng(seed).integers(0, 2**16, (count, 3), np.uint16) for seed in range(3)]
    targets = [np.zeros_like(source) for source in sources]
    found = sys.getswitchinterval()
    stager = Stager(runtime, 3, runtime, chunk=1000)
    assert sys.getswitchinterval() < found
    for source, target in zip(sources, targets, strict=True):
        stager.copy(target.ctypes.data, source)
    stager.finish()
    assert sys.getswitchinterval() == found
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(source, target)
    assert not runtime.pending
    assert all(name.startswith("luce-load") for name in runtime.threads) and 0 < len(runtime.threads) <= 12
    assert not any(thread.name.startswith("luce-load") for thread in threading.enumerate())


def test_what_a_copy_raises(runtime: Runtime) -> None:
    runtime.fails = True
    found = sys.getswitchinterval()
    stager = Stager(runtime, 3, runtime, chunk=1000)
    stager.copy(0, np.zeros(5000, np.uint8))
    with pytest.raises(RuntimeError, match="the bus is gone"):
        stager.finish()
    assert sys.getswitchinterval() == found
    assert not any(thread.name.startswith("luce-load") for thread in threading.enumerate())
