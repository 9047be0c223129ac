"""Policies: which pages of a long sequence stay resident. --kvflash-policy names one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.config.prefill_settings import RESIDENCY
from luce.config.settings import Config
from luce.errors import LuceError
from luce.runtime.step import Int32

_log = logging.getLogger(__name__)

#: float32, one score for each page: higher is more important, -inf if nothing is known of the page
Scores = NDArray[np.float32]


class Policy(Protocol):
    """Scores the pages of sequences. Called on the engine's thread between two steps, so it may call the backend."""

    @property
    def name(self) -> str:
        """The policy in force, for people."""

    @property
    def needs_pages(self) -> bool:
        """Whether the policy must see a page on the devices before it can score it."""

    @property
    def needs_row(self) -> bool:
        """Whether scores depend on the sequence's newest row, so that one must have run."""

    @property
    def nbytes(self) -> int:
        """Host memory for data of pages, in bytes. Thread-safe."""

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        """Scores for the first pages of the sequence in a slot, at least for those in `pages`.

        `tokens`: the sequence so far. `pages`: the pages of all full entries, -1 if swapped out; empty before a prompt
        is read, when all pages of the prompt may be scored. None: only age counts. Raises LuceError: the old scores
        stay.
        """

    def before_swap_out(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Full pages of a sequence are about to be swapped out; they are still on the devices. Raises LuceError."""

    def forget(self, slot: int) -> None:
        """The sequence in a slot has ended. Idempotent."""

    def close(self) -> None:
        """Idempotent."""


class PageScorer(Protocol):
    """Scores texts page by page: luce.kvcache.draft_scorer.DraftScorer."""

    def __call__(self, tokens: Int32) -> Scores:
        """Scores of the full pages of a text: int32 [n] -> float32 [n // PAGE]. Raises LuceError."""

    def close(self) -> None:
        """Idempotent."""


def ranks_pages(config: Config) -> bool:
    """Whether the policy needs shards that rank pages."""
    return config.kvflash != "off" and not reads_texts(config)


def reads_texts(config: Config) -> bool:
    """Whether the policy is that of a small model."""
    return config.kvflash_policy == DraftPolicy.label or config.prefill_compression == RESIDENCY


def open_policy(
    config: Config, backend: Backend, scorer: Callable[[], Callable[[], PageScorer]], budget: int
) -> Policy:
    """The policy of `config`. The pager that gets it closes it. It uses at most `budget` bytes of host memory.

    `scorer` finds the drafter for the policy that needs one, and returns a function that loads it. Raises what `scorer`
    raises.
    """
    if reads_texts(config):
        return DraftPolicy(scorer())
    chosen = QueryPolicy if config.kvflash_policy == QueryPolicy.name else UsePolicy
    return chosen(backend, budget)


class AgePolicy:
    """The pages that were written or swapped in last stay."""

    name = "lru"
    needs_pages = needs_row = False
    nbytes = 0

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        return None

    def before_swap_out(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass


class QueryPolicy:
    """The pages stay that the newest row would attend to, by the model's own heads (luce.shard.shard.ShardRanking).

    Ranking data takes at most `budget` bytes; pages beyond that have no score.
    """

    name = "qk"
    needs_pages = needs_row = True

    def __init__(self, backend: Backend, budget: int) -> None:
        self._backend = backend
        self._max_pages = budget // max(1, backend.capacity.ranking_bytes)
        #: by slot, the pages with ranking data
        self._added: dict[int, set[int]] = {}

    @property
    def nbytes(self) -> int:
        return self._count * self._backend.capacity.ranking_bytes

    @property
    def _count(self) -> int:
        return sum(map(len, tuple(self._added.values())))

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        self.before_swap_out(slot, range(len(pages)), pages)
        return self._rank(slot, tokens, len(pages), (e for e in self._added.get(slot, ()) if e < len(pages)))

    def _rank(self, slot: int, tokens: Int32, count: int, entries: Iterable[int]) -> Scores | None:
        """Scores of the first `count` pages, -inf but for `entries`. None if there are no entries."""
        known = np.array(sorted(entries), np.int32)
        if not len(known):
            return None
        scores = np.full(count, -np.inf, np.float32)
        # The newest token is not in the cache yet. Shares of attention differ by many orders of magnitude.
        shares = self._backend.ranking.rank(slot, len(tokens) - 2, known)
        with np.errstate(divide="ignore"):
            scores[known] = np.log(np.where(shares > 0, shares, 0.0))
        return scores

    def before_swap_out(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        added = self._added.setdefault(slot, set())
        fresh = [(entry, page) for entry, page in zip(entries, pages, strict=True) if page >= 0 and entry not in added]
        if fresh := fresh[: max(0, self._max_pages - self._count)]:
            self._backend.ranking.add(slot, [entry for entry, _ in fresh], [page for _, page in fresh])
            added.update(entry for entry, _ in fresh)

    def forget(self, slot: int) -> None:
        if self._added.pop(slot, None):
            # A shard that failed has no ranking data.
            with contextlib.suppress(LuceError):
                self._backend.ranking.drop(slot)

    def close(self) -> None:
        pass


class UsePolicy(QueryPolicy):
    """The resident pages stay that the newest row attends to most. No page is swapped in."""

    name = "lru"
    needs_pages = False

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        resident = [entry for entry, page in enumerate(pages) if page >= 0]
        super().before_swap_out(slot, resident, [pages[entry] for entry in resident])
        return self._rank(slot, tokens, len(pages), resident)

    def before_swap_out(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        pass


class DraftPolicy:
    """The pages stay that a small model attends to when it reads the last tokens. If it fails, only age counts."""

    label = "drafter"
    needs_pages = needs_row = False
    nbytes = 0

    def __init__(self, load: Callable[[], PageScorer]) -> None:
        self._problem = ""
        #: by slot: a number of tokens, and the scores at that length
        self._newest: dict[int, tuple[int, Scores]] = {}
        self._scorer: PageScorer | None = None
        self._age = AgePolicy()
        try:
            self._scorer = load()
        except LuceError as error:
            self._failed(error)

    @property
    def name(self) -> str:
        return f"lru ({self.label}: {self._problem})" if self._problem else self.label

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        known = self._newest.get(slot)
        if known is not None and known[0] == len(tokens):
            return known[1]
        if self._scorer is None:
            return self._age.scores(slot, tokens, pages)
        try:
            scores = self._scorer(tokens)
        except LuceError as error:
            self._failed(error)
            return self._age.scores(slot, tokens, pages)
        self._problem = ""
        self._newest[slot] = len(tokens), scores
        return scores

    def before_swap_out(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        pass

    def forget(self, slot: int) -> None:
        self._newest.pop(slot, None)

    def close(self) -> None:
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            scorer.close()

    def _failed(self, error: LuceError) -> None:
        if str(error) != self._problem:
            _log.warning("--kvflash-policy drafter: the oldest pages are swapped out first: %s", error)
        self._problem = str(error)
