"""KVFlash's pager over a pool that is an array: pages that were swapped out and in, against what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.backend.kvflash_size import SINK
from luce.errors import BackendError, LuceError
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import QUESTION_ROWS, KVFlash, Pager
from luce.kvcache.policies import AgePolicy, Scores
from luce.runtime.host import HostEvent
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import HostSavedState

CONTEXT = 64 * PAGE
TAIL = 2


class Pool:
    """A backend, and its state, with one group of full attention, whose keys are an array."""

    capacity = SimpleNamespace(page_bytes=PAGE * np.dtype(np.int64).itemsize)

    @property
    def state(self) -> Pool:
        return self

    def __init__(self, pages: int) -> None:
        self.k = np.full((pages * PAGE, 1), -1, np.int64)
        #: pages that a copy takes before it fails, None for all
        self.good: int | None = None

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> HostSavedState:
        assert slot is None
        if self.good is not None:
            self.good -= len(pages[0])
            if self.good < 0:
                raise BackendError("no copy today")
        rows = np.concatenate([self.k[page * PAGE : (page + 1) * PAGE] for page in pages[0]])
        return HostSavedState({"blk.0.k": rows}, HostEvent(), frozenset({"blk.0.k"}))

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], saved: HostSavedState, first: int = 0) -> None:
        rows = cast(NDArray[np.int64], saved.tensors["blk.0.k"])[first * PAGE :]
        for index, page in enumerate(pages[0]):
            self.k[page * PAGE : (page + 1) * PAGE] = rows[index * PAGE : (index + 1) * PAGE]


class GivenScores:
    """A policy with given scores, which sees the pages that are swapped out."""

    name = "given"

    def __init__(self, *, needs_pages: bool = False) -> None:
        self.needs_pages, self.needs_row, self.nbytes = needs_pages, False, 0
        self.next: Scores | None = None
        self.pages: Sequence[int] = ()
        self.error: LuceError | None = None
        self.left: dict[int, set[int]] = {}
        self.look: Callable[[int, int, int], None] = lambda slot, entry, page: None

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        self.pages = pages
        if self.error is not None:
            raise self.error
        return self.next

    def before_swap_out(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        self.left.setdefault(slot, set()).update(entries)
        for entry, page in zip(entries, pages, strict=True):
            self.look(slot, entry, page)

    def forget(self, slot: int) -> None:
        self.left.pop(slot, None)

    def close(self) -> None:
        pass


class Bench:
    """Sequences whose row at a position holds a number that tells which it is."""

    def __init__(
        self,
        bound: int,
        *,
        slots: int = 2,
        policy: Any = None,
        budget: int = 1 << 40,
        tau: int = 64,
        chunk: int = 4 * PAGE,
    ) -> None:
        self.pool = Pool(slots * bound)
        self.pages = PageTables([slots * bound], [None], slots=slots, context=CONTEXT, chunk=PAGE, max_resident=bound)
        self.group = self.pages.groups[0]
        self.policy = policy or AgePolicy()
        if isinstance(policy, GivenScores):
            policy.look = self.look
        how = KVFlash(self.policy, TAIL, tau, budget)
        pager = Pager.over(cast(Backend, self.pool), self.pages, how, chunk)
        assert pager is not None
        self.pager = pager
        self.length = [0] * slots
        for slot in range(slots):
            assert self.pages.reserve(slot, CONTEXT)

    def look(self, slot: int, entry: int, page: int) -> None:
        there = self.pool.k[page * PAGE : (page + 1) * PAGE, 0]
        assert (there == slot * CONTEXT + entry * PAGE + np.arange(PAGE)).all()

    def tokens(self, slot: int) -> Int32:
        return np.zeros(self.length[slot], np.int32)

    def rescore(self, slot: int) -> None:
        self.pager.rescore(slot, self.length[slot], self.tokens(slot))
        self.check(slot)

    def write(self, slot: int, rows: int) -> None:
        position = self.length[slot]
        self.pages.extend(slot, position, rows)
        positions = np.arange(position, position + rows, dtype=np.int32)
        slots = np.array([slot], np.int32)
        view = self.group.view(slots, np.repeat(slots, rows), positions)
        self.pool.k[view.dest, 0] = slot * CONTEXT + positions
        self.length[slot] += rows
        self.check(slot)

    def read(self, slot: int, prompt: int) -> None:
        """A prompt of `prompt` positions, segment by segment."""
        self.pager.begin_prompt(slot, np.zeros(prompt, np.int32), self.length[slot])
        while (left := prompt - self.length[slot]) > 0:
            segment = self.pager.segment
            self.write(slot, min(left, segment - self.length[slot] % segment))

    def check(self, slot: int) -> None:
        """What a row at the end sees: pages in order of position, each with its own rows, the protected ones there."""
        length = self.length[slot]
        slots = np.array([slot], np.int32)
        view = self.group.view(slots, slots, np.array([length - 1], np.int32))
        count = int(view.count[0])
        assert count <= (self.group.max_resident or 0)
        first = view.first[0, :count]
        assert (np.diff(first) > 0).all()
        for page, begin in zip(view.table[0, :count].tolist(), first.tolist(), strict=True):
            rows = min(PAGE, length - begin)
            there = self.pool.k[page * PAGE : page * PAGE + rows, 0]
            assert (there == slot * CONTEXT + begin + np.arange(rows)).all()
        seen = set((first // PAGE).tolist())
        whole = length // PAGE
        protected = set(range(min(SINK, whole))) | set(range(max(0, whole - TAIL), -(-length // PAGE)))
        assert protected <= seen


@settings(max_examples=120)
@given(
    bound=st.integers(SINK + TAIL + 2, 12),
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 500)), max_size=60),
    seed=st.integers(0, 1000),
)
def test_random_traffic(bound: int, moves: list[tuple[int, int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    policy = GivenScores()
    bench = Bench(bound, policy=policy)
    for kind, slot, size in moves:
        length = bench.length[slot]
        if kind == 0:
            prompt = min(CONTEXT, length + size)
            if prompt > bench.pager.max_positions:
                bench.read(slot, prompt)
        elif kind == 1:
            for _ in range(min(size, CONTEXT - length) // 16):
                bench.write(slot, 1 + min(15, bench.pager.max_draft_rows(slot, bench.length[slot]) or 0))
        elif length:
            policy.next = random.normal(size=CONTEXT // PAGE).astype(np.float32) if size % 5 else None
            bench.rescore(slot)
    stats = bench.pager.stats()
    assert stats.lost_pages == 0
    assert stats.copied_pages <= stats.swapped_out + 2 * bound
    assert stats.resident_pages == sum(len(bench.group.held(slot)) for slot in range(2)) <= 2 * bound
    for slot in range(2):
        bench.pager.release(slot)
        bench.pages.release(slot)
    assert bench.pager.stats().host_bytes == 0
    assert bench.group.free == bench.group.total


def test_a_pool_as_large_as_the_text_holds_all_of_it() -> None:
    bench = Bench(8)
    assert bench.pager.residency(0, 0) is None
    bench.write(0, 100)
    bench.write(0, 8 * PAGE - 100)
    assert bench.group.resident(0) == list(range(8))
    assert bench.pager.stats().swapped_out == 0


def test_by_age_the_oldest_pages_are_swapped_out_but_not_the_first() -> None:
    bench = Bench(6)
    for _ in range(9):
        bench.write(0, PAGE)
    assert bench.group.resident(0) == [0, 4, 5, 6, 7, 8]
    assert bench.pager.stats().swapped_out == 3


def test_scores_decide_which_pages_are_swapped() -> None:
    policy = GivenScores()
    bench = Bench(7, policy=policy)
    for _ in range(10):
        bench.write(0, PAGE)
    assert bench.group.resident(0) == [0, 4, 5, 6, 7, 8, 9]
    policy.next = np.array([0, 9, 1, 8, 2, 3, 4, 5, 6, 7], np.float32)
    bench.rescore(0)
    # 0 and the tail, and the four with the highest scores.
    assert bench.group.resident(0) == [0, 1, 3, 6, 7, 8, 9]
    assert [page >= 0 for page in policy.pages] == [i in (0, 4, 5, 6, 7, 8, 9) for i in range(10)]
    stats = bench.pager.stats()
    assert (stats.resident_hits, stats.swapped_in) == (2, 2), "of 1, 3, 6 and 7 the last two were there"
    bench.write(0, PAGE)
    assert bench.group.resident(0) == [0, 1, 3, 7, 8, 9, 10]
    bench.write(0, PAGE)
    assert bench.group.resident(0) == [0, 1, 3, 8, 9, 10, 11], "the lowest score leaves; newer pages have none yet"


def test_of_equal_scores_resident_and_newer_pages_win() -> None:
    policy = GivenScores()
    bench = Bench(7, policy=policy)
    for _ in range(10):
        bench.write(0, PAGE)
    policy.next = np.zeros(10, np.float32)
    bench.rescore(0)
    assert bench.group.resident(0) == [0, 4, 5, 6, 7, 8, 9] and bench.pager.stats().swapped_in == 0
    policy.next = np.array([0, 1, 1, 1, 0, 5, 0, 5, 0, 0], np.float32)
    bench.rescore(0)
    assert bench.group.resident(0) == [0, 2, 3, 5, 7, 8, 9]


def test_a_page_is_copied_once() -> None:
    policy = GivenScores()
    bench = Bench(6, policy=policy)
    for _ in range(10):
        bench.write(0, PAGE)
    copies = bench.pager.stats().copied_pages
    for up in (1.0, -1.0, 1.0):
        policy.next = up * np.arange(10, dtype=np.float32)
        bench.rescore(0)
    stats = bench.pager.stats()
    assert stats.swapped_in > 0 and stats.swapped_out > copies
    assert stats.copied_pages <= 8, "eight pages could ever leave"


def test_host_memory_has_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    policy = GivenScores()
    page = 8 * PAGE
    bench = Bench(6, policy=policy, budget=3 * page)
    for _ in range(12):
        bench.write(0, PAGE)
    stats = bench.pager.stats()
    assert stats.host_bytes <= 3 * page
    assert stats.lost_pages == 12 - 6 - 3
    assert len(caplog.records) == 1 and "--kvflash-host-mb" in caplog.text
    policy.next = -np.arange(12, dtype=np.float32)
    bench.rescore(0)


@pytest.mark.parametrize("nbytes", [0, 1, 8 * PAGE, 10 * 8 * PAGE, 1 << 40])
def test_the_memory_of_the_policy_counts(nbytes: int) -> None:
    """Copies go until both fit, or until there are none."""
    page, policy = 8 * PAGE, GivenScores()
    bench = Bench(6, policy=policy, budget=10 * page)
    for _ in range(14):
        bench.write(0, PAGE)
    assert bench.pager.stats().host_bytes <= 10 * page and bench.pager.stats().lost_pages == 0
    policy.next, policy.nbytes = np.arange(14, dtype=np.float32), nbytes
    bench.rescore(0)
    fitting = max(0, 10 * page - nbytes) // page
    stats = bench.pager.stats()
    assert stats.host_bytes == nbytes + page * min(fitting, 9)
    assert stats.lost_pages == max(0, 8 - fitting)
    assert bench.pager.complete(0) == (not stats.lost_pages)
    bench.write(0, PAGE)
    bench.check(0)


@pytest.mark.parametrize("length, since, due", [(64, 0, True), (63, 0, False), (4500, 4400, True), (4500, 4401, False)])
def test_scores_grow_old_slowly_in_long_texts(length: int, since: int, due: bool) -> None:
    bench = Bench(8)
    bench.pager.rescore(0, since, np.zeros(since, np.int32))
    assert bench.pager.rescore_due(0, length) is due


def test_a_sequence_that_fits_is_never_scored() -> None:
    assert not Bench(8).pager.rescore_due(0, 1 << 20)


def test_draft_rows_end_with_a_page_and_before_scoring() -> None:
    bench = Bench(8, tau=40)
    assert bench.pager.max_draft_rows(0, 100) is None
    bench.write(0, 7 * PAGE + 10)
    assert bench.pager.max_draft_rows(0, 7 * PAGE + 10) == PAGE - 11, "the next page would be the ninth"
    assert bench.pager.max_draft_rows(0, 8 * PAGE) == 0, "pages are scored behind the first row of the ninth page"
    bench.write(0, PAGE)
    bench.rescore(0)
    assert bench.pager.max_draft_rows(0, 8 * PAGE + 10) == 39
    assert bench.pager.max_draft_rows(0, 8 * PAGE + 45) == 4
    assert bench.pager.max_draft_rows(0, 8 * PAGE + 63) == 0


def test_the_pages_of_a_segment_do_not_depend_on_its_steps() -> None:
    seen = []
    for pieces in ([128], [1, 127], [64, 64], [100, 20, 8]):
        bench = Bench(10)
        bench.pager.begin_prompt(0, np.zeros(30 * PAGE, np.int32), 0)
        assert bench.pager.segment == 3 * PAGE
        for _ in range(4):
            bench.write(0, 3 * PAGE)
        bench.write(0, PAGE)
        for rows in pieces:
            bench.write(0, rows)
            seen.append([entry for entry in bench.group.resident(0) if entry < 12])
    assert seen == [seen[0]] * len(seen)


def test_pages_are_scored_before_the_question_is_read() -> None:
    bench = Bench(8)
    bench.pager.begin_prompt(0, np.zeros(20 * PAGE, np.int32), 0)
    assert not bench.pager.rescore_due(0, 10 * PAGE)
    assert bench.pager.rescore_due(0, 20 * PAGE - QUESTION_ROWS)
    bench.pager.rescore(0, 20 * PAGE - QUESTION_ROWS, np.zeros(20 * PAGE, np.int32))
    assert not bench.pager.rescore_due(0, 20 * PAGE - QUESTION_ROWS)


def test_scores_of_a_prompt_decide_which_pages_stay_while_it_is_read() -> None:
    policy = GivenScores()
    policy.next = np.where(np.arange(40) % 10 == 3, 1.0, 0.0).astype(np.float32)
    bench = Bench(10, policy=policy)
    bench.read(0, 40 * PAGE)
    assert {3, 13, 23, 33} <= set(bench.group.resident(0))
    assert bench.pager.stats().swapped_in == 0


def test_a_policy_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    policy = GivenScores()
    bench = Bench(6, policy=policy)
    bench.read(0, 12 * PAGE)
    before = bench.group.resident(0)
    policy.error = BackendError("too small")
    for _ in range(2):
        bench.rescore(0)
    assert bench.group.resident(0) == before
    assert [record.getMessage() for record in caplog.records] == [
        "--kvflash-policy given: pages could not be scored: too small"
    ]


def test_a_copy_that_fails_swaps_nothing_out() -> None:
    bench = Bench(6)
    bench.write(0, 6 * PAGE)
    bench.pool.good = 0
    with pytest.raises(BackendError, match="no copy today"):
        bench.write(0, 1)
    bench.check(0)
    bench.pool.good = None
    bench.write(0, 1)
    bench.pager.release(0)
    bench.pages.release(0)
    assert bench.group.free == bench.group.total


@pytest.mark.parametrize("needs_pages", [False, True])
@pytest.mark.parametrize("extra", [0, 30])
def test_a_sequence_goes_on_in_another_slot(needs_pages: bool, extra: int) -> None:
    policy = GivenScores(needs_pages=needs_pages)
    policy.next = np.random.default_rng(5).normal(size=64).astype(np.float32)
    bench = Bench(9, policy=policy)
    bench.read(0, 20 * PAGE + extra)
    bench.rescore(0)
    length, there = bench.length[0], bench.group.resident(0)
    residency = bench.pager.residency(0, length)
    assert residency is not None
    swapped_out = list(bench.pager.swapped_out(length, residency))
    assert sorted({*swapped_out, *there}) == list(range(-(-length // PAGE))) and not {*swapped_out} & {*there}
    data = {entry: bench.pager.host_page(0, entry) for entry in swapped_out}
    # The other slot's pages get what its rows would hold, as if it had been copied there.
    bench.group.resume(1, length, (), swapped_out)
    for entry, page in zip(there, bench.group.held(1), strict=True):
        bench.pool.k[page * PAGE : (page + 1) * PAGE, 0] = CONTEXT + entry * PAGE + np.arange(PAGE)
    for saved in {page[0] for page in data.values() if page is not None}:
        cast(HostSavedState, saved).tensors["blk.0.k"][...] += CONTEXT  # type: ignore[operator]
    bench.length[1] = length
    bench.pager.resume(1, {entry: found for entry, found in data.items() if found is not None}, residency)
    bench.check(1)
    assert bench.group.resident(1) == there
    assert policy.left.get(1, set()) >= (set(swapped_out) if needs_pages else set())
    assert bench.pager.residency(1, length) == residency
    bench.rescore(1)
    bench.write(1, 100 if extra else 1)


@pytest.mark.parametrize("budget", [1 << 40, 3 * 8 * PAGE])
def test_a_page_that_two_sequences_share_is_copied_once(budget: int) -> None:
    policy = GivenScores()
    bench = Bench(8, policy=policy, budget=budget)
    bench.write(0, 8 * PAGE)
    bench.group.resume(1, 8 * PAGE, bench.group.held(0))
    assert bench.group.free == bench.group.total - 8
    bench.length[1] = 8 * PAGE
    bench.look = lambda slot, entry, page: None  # type: ignore[method-assign]
    policy.look = bench.look

    def sees(slot: int) -> None:
        """Shared pages have what the first sequence wrote."""
        for entry in bench.group.resident(slot):
            (page,) = bench.group.entries(slot, entry, entry + 1)
            begin = entry * PAGE + (0 if entry < 8 else slot * CONTEXT)
            assert (bench.pool.k[page * PAGE : (page + 1) * PAGE, 0] == begin + np.arange(PAGE)).all()

    bench.check = sees  # type: ignore[method-assign]
    policy.next = np.zeros(64, np.float32)
    for slot in (0, 1):
        bench.pager.rescore(slot, 8 * PAGE, bench.tokens(slot))
    for _ in range(3):
        for slot in (0, 1):
            bench.write(slot, PAGE)
    stats = bench.pager.stats()
    assert stats.swapped_out == 6 and stats.host_bytes <= budget
    if budget > 1 << 20:
        # Three of the pages that both had, and one of them ahead; then the pages are each one's own.
        assert (stats.copied_pages, stats.host_pages, stats.host_bytes) == (4, 8, 4 * 8 * PAGE)
        policy.next = -np.arange(64, dtype=np.float32)
        for slot in (1, 0):
            bench.rescore(slot)
            assert 1 in bench.group.resident(slot)
        # Of 6, 7 and 8, which both let go, only 8 is not the same page.
        assert bench.pager.stats().copied_pages == 4 + 2 + 2
    for slot in (0, 1):
        bench.pager.release(slot)
        bench.pages.release(slot)
        assert bench.group.free == (bench.group.total if slot else bench.group.total - len(bench.group.held(1)))
    assert bench.pager.stats().host_bytes == 0


def test_without_a_residency_the_newest_pages_are_resident() -> None:
    bench = Bench(9)
    assert list(bench.pager.swapped_out(9 * PAGE, None)) == []
    assert list(bench.pager.swapped_out(20 * PAGE, None)) == list(range(1, 13))
    assert list(bench.pager.swapped_out(20 * PAGE + 1, None)) == list(range(1, 14))
