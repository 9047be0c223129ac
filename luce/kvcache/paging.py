"""Which pages of a long sequence are on the devices: KVFlash.

A sequence holds `bound` pages of full attention at most (luce.kvcache.page_table). Those that leave are copied to the
host as they are, once, as nobody writes to a page that is full, and come back to whatever page is free. The first page,
the last ones and those that a step writes always stay; of the others those with the highest scores. Every so many
tokens the scores are found anew, and what has become important takes the place of what is not any longer.

What a row sees does not depend on the rows that are computed with it: the pages that a block of the prompt needs leave
before its first row, and rows of a proposal neither begin a page nor pass the length at which scores are found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.backend.kvflash_size import SINK
from luce.errors import LuceError
from luce.kvcache.page_table import PageTable
from luce.kvcache.prefix_tree import Residency, Segment
from luce.runtime.step import PAGE, Int32

_log = logging.getLogger(__name__)

# A long history is scored more seldom: KVFlash spends about the same share of the time on it at any length.
_HISTORY = 45
#: The last rows of a prompt that does not fit. They are read by themselves, after the pages have been scored once more:
#: what is asked decides what they see.
QUESTION = 1
# Pages in one copy between host and devices: bounds what lies twice in host memory meanwhile.
_BATCH = 16

#: one score a page, the higher the more important; -inf for pages of which nothing is known
Scores = NDArray[np.float32]


class Policy(Protocol):
    """Says which pages matter. On the engine's thread between two steps, so it may call the backend."""

    @property
    def name(self) -> str:
        """The policy in force, for people."""

    @property
    def reads(self) -> bool:
        """Whether it has to see the pages of a sequence, and knows nothing of those it has not seen."""

    @property
    def asks(self) -> bool:
        """Whether the newest row of a sequence says what matters, so that one has to have run."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it keeps of the pages of sequences. Any thread may ask."""

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        """Of the first pages of the sequence in a slot, whose tokens so far are given: at least of those in `pages`.

        `pages`: of all that are full, where each is on the devices, -1 if it is not. Before a prompt is read there may
        be none, and all of the prompt may be scored. None if age is all that counts. Raises LuceError: the scores stay
        as they are.
        """

    def leave(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Full pages of a sequence are about to leave the devices, where they still are. Raises LuceError."""

    def forget(self, slot: int) -> None:
        """The sequence in a slot has ended. Idempotent."""

    def close(self) -> None:
        """Idempotent."""


class Age:
    """The pages that came or came back last stay."""

    name = "lru"
    reads = asks = False
    nbytes = 0

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        return None

    def leave(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class PagingStats:
    """Numbers at one moment, with counters since the start. Pages have PAGE tokens."""

    #: the policy in force
    policy: str
    #: resident pages that one sequence may have
    max_resident_pages: int
    #: tokens between two rounds of scoring a sequence's pages
    tau: int
    #: pages of sequences that lie on the devices
    resident_pages: int = 0
    #: pages of running sequences that lie in host memory
    host_pages: int = 0
    #: host memory of these pages and of the policy's own data, and its limit
    host_bytes: int = 0
    host_budget: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    #: pages copied to host memory: each page once at most, however often it is swapped out
    copied_pages: int = 0
    #: bytes copied in both directions
    moved_bytes: int = 0
    #: pages given up because host memory was full
    lost_pages: int = 0
    #: rounds of scoring
    rescores: int = 0
    #: pages that a round of scoring asked for and that were resident already
    resident_hits: int = 0
    #: time of the engine's thread for the policy and for swapping pages
    rescore_seconds: float = 0.0


@dataclass(frozen=True)
class KVFlash:
    """How a Pager is to work: its policy, which it closes; tail, tau and budget as there."""

    policy: Policy
    tail: int
    tau: int
    budget: int


@dataclass
class _Stay:
    """What is known of the pages of a sequence that does not fit.

    host     pages that are in host memory: where
    used     when each page came, if not in the order of positions
    scores   the newest, None while there are none; scored: of how many positions
    prompt   positions of the prompt; begun: of these, the ones that were there before it was read
    copying  of `host`, what may still be on the way there
    lost     whether pages are gone for good
    """

    host: dict[int, tuple[Segment, int]] = field(default_factory=dict)
    copying: set[Segment] = field(default_factory=set)
    used: dict[int, int] = field(default_factory=dict)
    scores: Scores | None = None
    scored: int = 0
    prompt: int = 0
    begun: int = 0
    lost: bool = False


class Pager:
    """Moves pages of a bounded group. Everything but `stats` runs on the engine's thread, which may call the backend.

    tail: pages before the one that is written that stay. budget: bytes of host memory. tau: tokens between two looks
    at the scores. chunk: prompt rows in a step. Raises what the backend raises: the sequence is lost then.
    """

    def __init__(
        self,
        backend: Backend,
        pool: PageTable,
        group: int,
        *,
        tail: int,
        policy: Policy,
        tau: int,
        budget: int,
        chunk: int,
    ) -> None:
        assert pool.bound is not None
        self._backend = backend
        self._pool = pool
        self._group = group
        self._bound = pool.bound
        self._tail = tail
        self._policy = policy
        self._tau = tau
        self._budget = budget
        #: rows of a block of a prompt that does not fit: half of what is beside the sink and the tail is left to pages
        #: that matter
        self.block = max(1, min((self._bound - SINK - tail) // 2, chunk // PAGE)) * PAGE
        self._clock = 0
        self._stays: dict[int, _Stay] = {}
        #: pieces of host memory, with the pages in use of each
        self._segments: dict[Segment, int] = {}
        self._bytes = self._page_bytes = 0
        self._outs = self._copies = self._ins = self._lost = self._rescored = self._hits = 0
        self._seconds = 0.0
        self._troubled = False
        pool.relieve = self.relieve

    @classmethod
    def over(cls, backend: Backend, pools: Sequence[PageTable], how: KVFlash, chunk: int) -> Pager | None:
        """The pager of the bounded group, if there is one."""
        for group, pool in enumerate(pools):
            if pool.bound is not None:
                return cls(
                    backend,
                    pool,
                    group,
                    tail=how.tail,
                    policy=how.policy,
                    tau=how.tau,
                    budget=how.budget,
                    chunk=chunk,
                )
        return None

    @property
    def size(self) -> int:
        """Positions of a sequence that are on the devices at most."""
        return self._bound * PAGE

    def begin(self, slot: int, prompt: Int32, done: int) -> None:
        """The prompt in a slot, of which `done` positions are in the cache, is about to be read, and does not fit."""
        stay = self._stay(slot)
        stay.prompt, stay.begun = len(prompt), done
        self.rescore(slot, done, prompt)

    def relieve(self, slot: int, position: int, rows: int) -> None:
        """Let as many pages leave as rows [position, position + rows), or the block that they are of, need."""
        high = self._pool.high(slot)
        end = -(-(position + rows) // PAGE)
        if end <= high:
            return
        stay = self._stays.get(slot)
        if stay is not None and position < stay.prompt:
            block = position // self.block + 1
            end = max(end, min(-(-stay.prompt // PAGE), block * self.block // PAGE))
        present = self._pool.present(slot)
        over = len(present) + end - high - self._bound
        if over <= 0:
            return
        stay = self._stay(slot)
        movable = [entry for entry in present if SINK <= entry < position // PAGE - self._tail]
        assert len(movable) >= over, "steps are no longer than a block"
        movable.sort(key=lambda entry: (self._score(stay, entry), stay.used.get(entry, 0), entry))
        self._out(slot, stay, sorted(movable[:over]))
        # Those that are likely to leave next are copied while the step runs, so that they can go at once.
        if self._host_bytes + over * self._page_bytes <= self._budget:
            self._copy(slot, stay, sorted(movable[over : 2 * over]), held=True)

    def interval(self, length: int) -> int:
        """Positions between two looks at the scores of a sequence that has so many."""
        return max(self._tau, length // _HISTORY)

    def ahead(self, slot: int, length: int) -> int | None:
        """Most rows that may be verified behind the one at `length`, None if there is no limit."""
        page = PAGE - 1 - length % PAGE
        stay = self._stays.get(slot)
        if stay is None:
            entry = length // PAGE
            if entry + 1 < self._bound:
                return None
            # The first row of the first page that does not fit is alone: pages are scored behind it.
            return page if entry < self._bound else 0
        return max(0, min(page, stay.scored + self.interval(length) - length - 1))

    def due(self, slot: int, length: int) -> bool:
        """Whether a sequence of `length` positions ought to be scored again."""
        stay = self._stays.get(slot)
        if stay is None:
            return False
        if length < stay.prompt:
            return length == stay.prompt - QUESTION and length != stay.scored
        return length >= stay.scored + self.interval(length)

    def rescore(self, slot: int, length: int, tokens: Int32) -> None:
        """Score a sequence of `length` positions, and let the pages be there that matter most."""
        started = time.monotonic()
        try:
            self._rescore(slot, length, tokens)
        finally:
            self._seconds += time.monotonic() - started

    def data(self, slot: int, entry: int) -> tuple[Segment, int] | None:
        """The contents of a page, if they are in host memory."""
        stay = self._stays.get(slot)
        return None if stay is None else stay.host.get(entry)

    def whole(self, slot: int) -> bool:
        """Whether no page of a sequence is lost."""
        stay = self._stays.get(slot)
        return stay is None or not stay.lost

    def snapshot(self, slot: int, length: int) -> Residency | None:
        """What `resume` needs to go on at `length` positions; None if all pages are there."""
        stay = self._stays.get(slot)
        if stay is None:
            return None
        present = frozenset(e for e in self._pool.present(slot) if e * PAGE < length)
        return Residency(present, dict(stay.used), stay.scores, stay.scored)

    def absent(self, length: int, residency: Residency | None) -> range | list[int]:
        """The pages of a sequence of `length` positions that are not to be on the devices when it is resumed."""
        whole, end = length // PAGE, -(-length // PAGE)
        if residency is not None:
            return [entry for entry in range(whole) if entry not in residency.present]
        return range(SINK, max(SINK, end - (self._bound - SINK - 1))) if end > self._bound else range(0)

    def resume(self, slot: int, data: dict[int, tuple[Segment, int]], residency: Residency | None) -> None:
        """A slot holds a sequence whose other pages are in host memory."""
        if not data and residency is None:
            return
        self.release(slot)
        stay = self._stay(slot)
        if residency is not None:
            stay.used, stay.scores, stay.scored = dict(residency.used), residency.scores, residency.scored
            self._clock = max([self._clock, *stay.used.values()])
        for entry, (segment, at) in data.items():
            self._remember(stay, entry, segment, at)
        if self._policy.reads:
            for batch in _batches(list(data)):
                self._show(slot, stay, batch)
        self._fit()

    def release(self, slot: int) -> None:
        """The sequence in a slot has ended."""
        stay = self._stays.pop(slot, None)
        if stay is not None:
            for entry in list(stay.host):
                self._drop(stay, entry)
        self._policy.forget(slot)

    def close(self) -> None:
        """Idempotent."""
        self._policy.close()

    def stats(self) -> PagingStats:
        """Numbers for people. Any thread may ask."""
        return PagingStats(
            policy=self._policy.name,
            max_resident_pages=self._bound,
            tau=self._tau,
            resident_pages=self._pool.total - self._pool.free - self._pool.spare,
            host_pages=sum(len(stay.host) for stay in tuple(self._stays.values())),
            host_bytes=self._host_bytes,
            host_budget=self._budget,
            swapped_out=self._outs,
            swapped_in=self._ins,
            copied_pages=self._copies,
            moved_bytes=(self._copies + self._ins) * self._page_bytes,
            lost_pages=self._lost,
            rescores=self._rescored,
            resident_hits=self._hits,
            rescore_seconds=self._seconds,
        )

    def _rescore(self, slot: int, length: int, tokens: Int32) -> None:
        stay = self._stay(slot)
        stay.scored = length
        if self._policy.asks and length <= stay.begun:
            # No row of it ran here yet.
            return
        whole = length // PAGE
        try:
            scores = self._policy.scores(slot, tokens, self._pool.entries(slot, 0, whole))
        except LuceError as error:
            if not self._troubled:
                _log.warning("--kvflash-policy %s: pages could not be scored: %s", self._policy.name, error)
            self._troubled = True
            return
        if scores is None:
            return
        self._fit()
        self._troubled = False
        stay.scores = scores
        self._rescored += 1
        here = set(self._pool.present(slot))
        fixed = {e for e in range(-(-length // PAGE)) if e < SINK or e >= whole - self._tail}
        # What comes back is in host memory already, and leaves without a copy when the next page is begun.
        room = max(0, self._bound - len(fixed))
        choice = [e for e in range(SINK, whole - self._tail) if e in here or (e in stay.host and scores[e] > -np.inf)]
        choice.sort(key=lambda entry: (-self._score(stay, entry), entry not in here, -entry))
        best = set(choice[:room])
        self._hits += len(best & here)
        self._out(slot, stay, sorted(e for e in here - fixed - best if e < whole))
        self._in(slot, stay, sorted((fixed | best) - here))

    @property
    def _host_bytes(self) -> int:
        """Of copies, and of what the policy keeps."""
        return self._bytes + self._policy.nbytes

    def _stay(self, slot: int) -> _Stay:
        return self._stays.setdefault(slot, _Stay())

    @staticmethod
    def _score(stay: _Stay, entry: int) -> float:
        """Pages that are newer than the scores stay until there are new ones, as newer ones mostly matter more."""
        if stay.scores is None:
            return 0.0
        return float(stay.scores[entry]) if entry < len(stay.scores) else np.inf

    def _out(self, slot: int, stay: _Stay, entries: Sequence[int]) -> None:
        if not entries:
            return
        pages = self._pool.entries(slot, 0, entries[-1] + 1)
        self._policy.leave(slot, entries, [pages[entry] for entry in entries])
        for segment in {stay.host[entry][0] for entry in entries if entry in stay.host} & stay.copying:
            segment.kept.wait()
            stay.copying.remove(segment)
        self._copy(slot, stay, entries)
        self._outs += len(entries)
        self._pool.leave(slot, entries)
        self._fit()

    def _copy(self, slot: int, stay: _Stay, entries: Sequence[int], *, held: bool = False) -> None:
        """Let the contents of pages be in host memory too; if they are `held`, in a while."""
        for batch in _batches([entry for entry in entries if entry not in stay.host]):
            pages = [self._pool.entries(slot, entry, entry + 1)[0] for entry in batch]
            segment = Segment(self._backend.state.save(None, self._only(pages), held=held), len(batch))
            self._copies += len(batch)
            for index, (entry, page) in enumerate(zip(batch, pages, strict=True)):
                for each in (stay, *self._sharing(slot, entry, page)):
                    self._remember(each, entry, segment, index)
                    if held:
                        each.copying.add(segment)

    def _sharing(self, slot: int, entry: int, page: int) -> Iterator[_Stay]:
        """The others that hold a page as the same entry, and know no copy of it."""
        for other, stay in self._stays.items():
            theirs = self._pool.entries(other, entry, entry + 1) if entry < self._pool.high(other) else []
            if other != slot and theirs == [page] and entry not in stay.host:
                yield stay

    def _in(self, slot: int, stay: _Stay, entries: Sequence[int]) -> None:
        if not entries:
            return
        self._ins += len(entries)
        self._clock += 1
        pages = dict(zip(entries, self._pool.enter(slot, entries), strict=True))
        for segment, at, batch in _runs(stay, entries):
            self._backend.state.restore(None, self._only([pages[entry] for entry in batch]), segment.kept, at)
        for entry in entries:
            stay.used[entry] = self._clock

    def _show(self, slot: int, stay: _Stay, entries: Sequence[int]) -> None:
        """Let the policy see pages that are in host memory only."""
        used, present = dict(stay.used), self._pool.present(slot)
        guest = present[SINK : SINK + 1] if len(present) == self._bound else []
        self._out(slot, stay, guest)
        room = self._bound - len(present) + len(guest)
        for begin in range(0, len(entries), room):
            some = entries[begin : begin + room]
            self._in(slot, stay, some)
            self._out(slot, stay, some)
        self._in(slot, stay, guest)
        stay.used = used

    def _remember(self, stay: _Stay, entry: int, segment: Segment, at: int) -> None:
        # Every page takes the same number of bytes; asking a daemon would wait for its copy.
        self._page_bytes = self._page_bytes or segment.page_bytes
        stay.host[entry] = segment, at
        if segment not in self._segments:
            self._bytes += segment.pages * self._page_bytes
        self._segments[segment] = self._segments.get(segment, 0) + 1

    def _drop(self, stay: _Stay, entry: int) -> None:
        segment, _ = stay.host.pop(entry)
        self._segments[segment] -= 1
        if not self._segments[segment]:
            del self._segments[segment]
            stay.copying.discard(segment)
            self._bytes -= segment.pages * self._page_bytes

    def _fit(self) -> None:
        """Keep host memory within its budget.

        What is on the devices too is dropped first, then what matters least of the rest, which cannot come back.
        """
        while self._bytes and self._host_bytes > self._budget:
            here = {slot: set(self._pool.present(slot)) for slot in self._stays}
            gone, _, slot, entry = min(
                (entry not in here[slot], self._score(stay, entry), slot, entry)
                for slot, stay in self._stays.items()
                for entry in stay.host
            )
            self._drop(self._stays[slot], entry)
            if gone:
                if not self._lost:
                    _log.warning("--kvflash-host-mb: host memory is full, the least important pages are given up")
                self._lost += 1
                self._stays[slot].lost = True

    def _only(self, pages: list[int]) -> list[list[int]]:
        return [pages if group == self._group else [] for group in range(len(self._backend.capacity.windows))]


def _batches(entries: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(entries), _BATCH):
        yield entries[begin : begin + _BATCH]


def _runs(stay: _Stay, entries: Iterable[int]) -> Iterator[tuple[Segment, int, list[int]]]:
    """(segment, its first page, entries) of what lies side by side in host memory."""
    run: list[int] = []
    for entry in entries:
        segment, at = stay.host[entry]
        if run and stay.host[run[-1]] == (segment, at - 1):
            run.append(entry)
            continue
        if run:
            yield (*stay.host[run[0]], run)
        run = [entry]
    if run:
        yield (*stay.host[run[0]], run)
