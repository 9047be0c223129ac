"""What the CPU captures: memory of arrays, calls, host work, and what it refuses."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from luce.errors import DeviceError
from luce.ops.activation import gated_activation
from luce.ops.norm import rms_norm
from luce.runtime.cpu import CpuDevice
from luce.runtime.cpu_graph import Arena
from luce.runtime.device import Array


def address(array: Array) -> int:
    return int(array.ctypes.data)


def test_memory_is_lent_again_once_no_view_refers_to_it() -> None:
    arena = Arena()
    arena.begin()
    first = arena.empty((4, 16), np.float32)
    place, part = address(first), first[1:].reshape(3, 4, 4)[:, 1]
    del first
    gc.collect()
    second = arena.empty((4, 16), np.float32)
    assert address(second) != place, "a view of the first array is still there"
    del part
    gc.collect()
    assert address(arena.empty((4, 16), np.float32)) == place
    assert address(second) % 64 == 0


def test_the_next_graph_has_all_of_the_memory() -> None:
    arena = Arena()
    arena.begin()
    first = arena.empty(100, np.float32)
    arena.begin()
    assert address(arena.empty(100, np.float32)) == address(first)
    third = arena.empty(100, np.float32)
    # That of a graph before: its memory has been lent since.
    del first
    gc.collect()
    assert address(arena.empty(100, np.float32)) != address(third)


def test_a_borrowed_array_claims_nothing() -> None:
    arena = Arena()
    arena.begin()
    own = arena.empty((6, 5), np.int32)
    own[...] = np.arange(30).reshape(6, 5)
    borrowed = arena.borrowed(own[::2, 1:3])
    np.testing.assert_array_equal(borrowed, own[::2, 1:3])
    place = address(own)
    del own
    gc.collect()
    assert address(arena.empty((6, 5), np.int32)) == place
    outside = np.ones(3)
    assert arena.borrowed(outside) is outside and not arena.lends(outside) and arena.lends(borrowed)


def test_a_launch_reads_what_is_there_by_then() -> None:
    device = CpuDevice()
    x, weight = np.ones((2, 32), np.float32), np.arange(32, dtype=np.float32)

    def work() -> tuple[Array, ...]:
        normed = rms_norm(device, x, weight, 1e-6)
        doubled = device.compute(lambda y: 2 * y, normed.shape, normed)
        cleared = device.zeros((2, 32))
        device.copy(cleared[:1], doubled[:1])
        return gated_activation(device, doubled, normed, "silu"), cleared

    graph, (gated, cleared) = device.capture(work)
    for seed in range(3):
        x[...] = np.random.default_rng(seed).standard_normal(x.shape)
        # Whatever is there before.
        gated[...] = cleared[...] = np.nan
        graph.launch()
        expected = work()
        np.testing.assert_array_equal(gated, expected[0])
        np.testing.assert_array_equal(cleared, expected[1])


def test_what_was_fetched_stays() -> None:
    device = CpuDevice()
    source = np.zeros(3, np.float32)
    graph, (out,) = device.capture(lambda: (device.compute(np.copy, (3,), source),))
    graph.launch()
    wait, now = device.fetch(out), device.download(out)
    source[...] = 5
    graph.launch()
    assert wait().tolist() == now.tolist() == [0, 0, 0]
    assert device.download(out).tolist() == [5, 5, 5]


def test_nothing_runs_in_a_capture() -> None:
    device, counter = CpuDevice(), np.zeros(1, np.int32)

    def count(array: Array) -> None:
        array += 1

    def work() -> tuple[Array, ...]:
        device.call_host(count, counter)
        return (counter,)

    graph, _ = device.capture(work)
    assert counter == 0
    graph.launch()
    assert counter == 1


@pytest.mark.parametrize("name", ["host", "upload", "download", "write"])
def test_what_a_launch_would_not_repeat_is_refused(name: str) -> None:
    device, array = CpuDevice(), np.zeros(3, np.float32)
    works = {
        "host": lambda: device.host,
        "upload": lambda: device.upload(array),
        "download": lambda: device.download(array),
        "write": lambda: device.write(array, array),
    }

    def work() -> tuple[Array, ...]:
        works[name]()
        return ()

    with pytest.raises(DeviceError, match="is not captured"):
        device.capture(work)
    # It has ended.
    assert works[name]() is not False


def test_another_thread_works_on_during_a_capture() -> None:
    device, seen = CpuDevice(), []

    def work() -> tuple[Array, ...]:
        thread = threading.Thread(target=lambda: seen.append((device.host, device.compute(np.copy, (1,), np.ones(1)))))
        thread.start()
        thread.join()
        return ()

    device.capture(work)
    assert seen == [(True, np.ones(1))]


def test_an_array_of_another_type_fails_at_the_launch() -> None:
    device = CpuDevice()
    wrong = np.ones((2, 32), np.float64)
    graph, _ = device.capture(lambda: (rms_norm(device, wrong, np.ones(32, np.float32), 1e-6),))
    with pytest.raises(TypeError, match=r"rms_norm: argument \d+ is no array of its type: float64 \(2, 32\)"):
        graph.launch()
