"""Page tables against a model of them: no page leaks or is shared, and reservations hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from luce.kvcache.page_table import PageTables
from luce.runtime.step import PAGE
from luce.shard.sizes import pages_for

CONTEXT, CHUNK, SLOTS = 640, 96, 4


class Account(RuleBasedStateMachine):
    """Sequences grow by steps of random size; `done` and `length` are what each has and what it was promised."""

    @initialize(small=st.booleans(), window=st.sampled_from([1, 63, 64, 65, 200]))
    def start(self, small: bool, window: int) -> None:
        self.windows = (None, window)
        share = 2 if small else SLOTS
        self.totals = tuple(share * pages_for(w, CONTEXT, CHUNK) for w in self.windows)
        self.pages = PageTables(self.totals, self.windows, slots=SLOTS, context=CONTEXT, chunk=CHUNK)
        self.done: dict[int, int] = {}
        self.length: dict[int, int] = {}

    @rule(slot=st.integers(0, SLOTS - 1), length=st.integers(1, CONTEXT))
    def reserve(self, slot: int, length: int) -> None:
        if slot in self.done:
            return
        promised = [
            sum(pages_for(w, n, CHUNK) for n in [*self.length.values(), length]) <= total
            for w, total in zip(self.windows, self.totals, strict=True)
        ]
        assert self.pages.reserve(slot, length) == all(promised)
        if all(promised):
            self.done[slot], self.length[slot] = 0, length

    @rule(slot=st.integers(0, SLOTS - 1), rows=st.integers(1, CHUNK))
    def extend(self, slot: int, rows: int) -> None:
        rows = min(rows, self.length.get(slot, 0) - self.done.get(slot, 0))
        if rows <= 0:
            return
        position = self.done[slot]
        self.pages.extend(slot, position, rows)
        self.done[slot] += rows
        at = np.arange(position, position + rows, dtype=np.int32)
        slots = np.array([slot], np.int32)
        for group, window, view in zip(
            self.pages.groups, self.windows, self.pages.views(slots, np.full(rows, slot, np.int32), at), strict=True
        ):
            held = group.held(slot)
            low = 0 if window is None else max(0, position - window + 1) // PAGE
            assert view.count.tolist() == [len(held)]
            assert view.table[0, : len(held)].tolist() == held
            assert view.first[0].tolist() == [i * PAGE for i in range(low, low + len(held))]
            assert low + len(held) == -(-(position + rows) // PAGE)
            assert view.dest.tolist() == [held[p // PAGE - low] * PAGE + p % PAGE for p in at.tolist()]

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.pages.release(slot)
        self.done.pop(slot, None)
        self.length.pop(slot, None)

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "pages"):
            return
        for group, total in zip(self.pages.groups, self.totals, strict=True):
            held = [page for slot in range(SLOTS) for page in group.held(slot)]
            assert len(set(held)) == len(held)
            assert all(0 <= page < total for page in held)
            assert len(held) + group.free == total
        assert self.pages.used == sum(len(g.held(s)) for g in self.pages.groups for s in range(SLOTS))


Account.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAccount = Account.TestCase


@given(order=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=60))
def test_pages_of_a_sequence_are_consecutive_where_each_has_its_share(order: list[int]) -> None:
    pages = PageTables((SLOTS * 10,), (None,), slots=SLOTS, context=10 * PAGE, chunk=CHUNK)
    done = dict.fromkeys(range(SLOTS), 0)
    for slot in order:
        if done[slot] == 0:
            assert pages.reserve(slot, 10 * PAGE)
        elif done[slot] == 10 * PAGE:
            pages.release(slot)
            done[slot] = 0
            continue
        pages.extend(slot, done[slot], PAGE)
        done[slot] += PAGE
        held = pages.groups[0].held(slot)
        assert held == list(range(held[0], held[0] + len(held)))


@pytest.mark.parametrize("window", [1, 2, 40, 64, 65, 130])
def test_a_window_holds_what_its_oldest_row_sees_and_nothing_older(window: int) -> None:
    pages = PageTables((20,), (window,), slots=2, context=CONTEXT, chunk=CHUNK)
    assert pages.reserve(1, 400)
    for position in range(400):
        pages.extend(1, position, 1)
        seen = {p // PAGE for p in range(max(0, position - window + 1), position + 1)}
        assert pages.used == len(seen)


def test_a_pool_smaller_than_the_context_limits_a_sequence() -> None:
    assert PageTables((5, 40), (None, 64), slots=2, context=1000, chunk=64).longest == 5 * PAGE
    assert PageTables((40, 3), (None, 64), slots=2, context=1000, chunk=64).longest == 1000
    assert PageTables((40, 2), (None, 64), slots=2, context=1000, chunk=64).longest == 2 * PAGE
    assert PageTables((), (), slots=2, context=1000, chunk=64).longest == 1000


def test_a_reservation_that_fails_in_one_group_takes_nothing_of_the_others() -> None:
    pages = PageTables((20, 4), (None, 64), slots=4, context=640, chunk=64)
    assert pages.reserve(0, 640)
    assert not pages.reserve(1, 640)
    pages.release(0)
    assert pages.reserve(1, 640)


def test_a_shared_page_is_free_without_references() -> None:
    pages = PageTables((8,), (None,), slots=2, context=8 * PAGE, chunk=CHUNK)
    (group,) = pages.groups
    assert pages.reserve(0, 3 * PAGE) and pages.reserve(1, 3 * PAGE)
    pages.extend(0, 0, 2 * PAGE)
    shared = group.held(0)
    for page in shared:
        group.cache(page)
    group.resume(1, 2 * PAGE + 1, [shared[0], None])
    held = group.held(1)
    assert held[0] == shared[0] and len(set(held) | set(shared)) == 4
    pages.release(0)
    assert (pages.used, group.free, group.cached_only) == (3, 4, 1)
    assert not group.referenced(shared[1]) and group.referenced(shared[0])
    group.uncache(shared[0])
    assert group.free == 4
    pages.release(1)
    assert (pages.used, group.free, group.cached_only) == (0, 7, 1)
    group.uncache(shared[1])
    assert (group.free, group.cached_only) == (8, 0)


def test_cached_pages_are_evicted_when_reserved_ones_are_taken() -> None:
    pages = PageTables((4,), (None,), slots=1, context=4 * PAGE, chunk=CHUNK)
    (group,) = pages.groups
    asked = []

    def evict(count: int) -> None:
        asked.append(count)
        while group.free < count:
            group.uncache(cached.pop())

    group.evict = evict
    assert pages.reserve(0, 4 * PAGE)
    pages.extend(0, 0, 3 * PAGE)
    cached = group.held(0)
    for page in cached:
        group.cache(page)
    pages.release(0)
    assert pages.reserve(0, 4 * PAGE)
    pages.extend(0, 0, PAGE)
    assert asked == []
    pages.extend(0, PAGE, 2 * PAGE)
    assert asked == [2] and len(cached) == 1
    pages.clear(0)
    assert (pages.used, group.cached_only, group.free) == (0, 1, 3)
    assert not pages.reserve(0, 5 * PAGE)


@pytest.mark.parametrize("window", [1, 40, 64, 65, 130])
def test_a_resumed_window_holds_what_the_next_row_sees(window: int) -> None:
    for length in range(1, 400, 7):
        pages = PageTables((20,), (window,), slots=1, context=CONTEXT, chunk=CHUNK)
        (group,) = pages.groups
        assert pages.reserve(0, CONTEXT)
        group.resume(0, length)
        seen = {p // PAGE for p in range(max(0, length - window + 1), length + 1)}
        assert pages.used == len(seen & set(range(-(-length // PAGE))))
        pages.extend(0, length, 1)
        assert pages.used == len(seen)
