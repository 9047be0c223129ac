"""Pieces of slabs: apart while somebody has them, joined again afterwards, and no slab more than is needed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.errors import DeviceError
from luce.runtime.pinned import PinnedPool

SLAB = 1 << 16


def small_pool(pins: Pins, **ahead: int) -> PinnedPool:
    """Slabs of 64 KiB, and one made ahead, so that tests take little memory."""
    return PinnedPool(pins, SLAB, **{"least_ahead": SLAB, **ahead})


class Pins:
    """What is pinned."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.undone = 0
        self.refuses = False

    def __call__(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        if self.refuses:
            raise DeviceError("no more")
        self.sizes.append(len(memory))

        def undo() -> None:
            self.undone += 1

        return undo


def settled(pool: PinnedPool) -> None:
    """Until no slab is being made."""
    while pool.growing:
        time.sleep(0.001)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * SLAB)), max_size=40))
def test_pieces_do_not_overlap(work: list[tuple[bool, int]]) -> None:
    pool, held = small_pool(Pins()), list[tuple[int, NDArray[np.uint8]]]()
    for number, (drop, size) in enumerate(work):
        if drop and held:
            held.pop(size % len(held))
            continue
        array = pool.take(size)
        assert array.shape == (max(1, size),) and array.ctypes.data % 4096 == 0
        array[:] = number % 251
        # A view keeps the piece as well as the array does.
        held.append((number % 251, array.view(np.int8)[::2].view(np.uint8)))
        for value, other in held:
            assert (other == value).all()


def test_memory_is_used_again() -> None:
    pins = Pins()
    pool = small_pool(pins)
    for _ in range(100):
        arrays = [pool.take(SLAB // 4) for _ in range(3)]
        del arrays
        settled(pool)
    made = len(pins.sizes)
    whole = pool.take(SLAB)
    settled(pool)
    assert len(pins.sizes) <= made + 1 and len(whole) == SLAB


def test_slabs_are_made_ahead() -> None:
    pins, held = Pins(), []
    pool = small_pool(pins, least_ahead=2 * SLAB)
    for _ in range(8):
        held.append(pool.take(SLAB))
        settled(pool)
        made = len(pins.sizes)
        # The next two are there before they are asked for, more as more is in use.
        assert made >= len(held) + 2
    assert made == len(held) + len(held) // 2


def test_what_is_expected_is_made_ahead_of_it() -> None:
    pins, held = Pins(), []
    pool = small_pool(pins, most_ahead=SLAB)
    pool.reserve(5 * SLAB)
    settled(pool)
    # One more, for what nobody expects; no more are made when they are in use.
    assert len(pins.sizes) == 6
    for left in range(4, -1, -1):
        held += [pool.take(SLAB // 4) for _ in range(4)]
        pool.reserve(left * SLAB)
        settled(pool)
    assert len(pins.sizes) == 6
    # What comes back is there for what is expected next.
    held.clear()
    pool.reserve(4 * SLAB)
    assert len(pool.take(SLAB)) == SLAB
    settled(pool)
    assert len(pins.sizes) == 6
    pool.close()
    pool.reserve(9 * SLAB)
    assert not pool.growing


def test_closing_unpins_and_leaves_what_is_held_readable() -> None:
    pins = Pins()
    pool = small_pool(pins)
    array = pool.take(100)
    array[:] = 7
    settled(pool)
    pool.close()
    pool.close()
    assert pins.undone == len(pins.sizes)
    with pytest.raises(DeviceError):
        pool.take(2 * SLAB)
    del pool
    gc.collect()
    assert (array == 7).all()


def test_a_refusal_is_the_callers() -> None:
    pins = Pins()
    pins.refuses = True
    with pytest.raises(DeviceError, match="no more"):
        small_pool(pins).take(1)
