"""The policy that --kvflash-policy names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from luce.backend.backend import Backend
from luce.config.settings import Config
from luce.errors import LuceError
from luce.kvcache.paging import Age, Policy, Scores
from luce.runtime.step import Int32

_log = logging.getLogger(__name__)


class PageScorer(Protocol):
    """Scores texts page by page, as luce.kvcache.draft_scorer does."""

    def __call__(self, tokens: Int32) -> Scores:
        """Of the full pages of a text, int32 [n] -> float32 [n // PAGE]. Raises LuceError."""

    def close(self) -> None:
        """Idempotent."""


def ranked(config: Config) -> bool:
    """Whether shards have to rank pages: see ModelSpec.ranked."""
    return config.kvflash != "off" and config.kvflash_policy != DraftPolicy.label


def open_policy(
    config: Config, backend: Backend, scorer: Callable[[], Callable[[], PageScorer]], budget: int
) -> Policy:
    """It is closed with the pager that gets it, and keeps at most `budget` bytes of host memory.

    `scorer` finds a drafter, for the policy that needs one, and returns what loads it. Raises what `scorer` raises.
    """
    if config.kvflash_policy == DraftPolicy.label:
        return DraftPolicy(scorer())
    chosen = QueryPolicy if config.kvflash_policy == QueryPolicy.name else UsePolicy
    return chosen(backend, budget)


class QueryPolicy:
    """Pages that the newest row would attend to, by the model's own heads (luce.shard.shard.ShardRanking).

    What is kept of pages takes `budget` bytes at most; nothing is known of those that are too many.
    """

    name = "qk"
    reads = asks = True

    def __init__(self, backend: Backend, budget: int) -> None:
        self._backend = backend
        self._most = budget // max(1, backend.capacity.ranking_bytes)
        self._sealed: dict[int, set[int]] = {}

    @property
    def nbytes(self) -> int:
        return self._count * self._backend.capacity.ranking_bytes

    @property
    def _count(self) -> int:
        return sum(map(len, tuple(self._sealed.values())))

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        self.leave(slot, range(len(pages)), pages)
        return self._ranked(slot, tokens, len(pages), (e for e in self._sealed.get(slot, ()) if e < len(pages)))

    def _ranked(self, slot: int, tokens: Int32, count: int, entries: Iterable[int]) -> Scores | None:
        """Scores of the first `count` pages, of which only some are known."""
        known = np.array(sorted(entries), np.int32)
        if not len(known):
            return None
        scores = np.full(count, -np.inf, np.float32)
        # The newest token is not in the cache yet. Shares differ by many orders of magnitude.
        shares = self._backend.ranking.rank(slot, len(tokens) - 2, known)
        with np.errstate(divide="ignore"):
            scores[known] = np.log(np.where(shares > 0, shares, 0.0))
        return scores

    def leave(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        sealed = self._sealed.setdefault(slot, set())
        fresh = [(entry, page) for entry, page in zip(entries, pages, strict=True) if page >= 0 and entry not in sealed]
        if fresh := fresh[: max(0, self._most - self._count)]:
            self._backend.ranking.add(slot, [entry for entry, _ in fresh], [page for _, page in fresh])
            sealed.update(entry for entry, _ in fresh)

    def forget(self, slot: int) -> None:
        if self._sealed.pop(slot, None):
            # Who has failed keeps nothing.
            with contextlib.suppress(LuceError):
                self._backend.ranking.drop(slot)

    def close(self) -> None:
        pass


class UsePolicy(QueryPolicy):
    """Of the pages on the devices those stay that the newest row uses most. None comes back."""

    name = "lru"
    reads = False

    def scores(self, slot: int, tokens: Int32, pages: Sequence[int]) -> Scores | None:
        here = [entry for entry, page in enumerate(pages) if page >= 0]
        super().leave(slot, here, [pages[entry] for entry in here])
        return self._ranked(slot, tokens, len(pages), here)

    def leave(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        pass


class DraftPolicy:
    """Pages that a small model attends to when it reads the last tokens. While it cannot, age decides."""

    label = "drafter"
    reads = asks = False
    nbytes = 0

    def __init__(self, load: Callable[[], PageScorer]) -> None:
        self._trouble = ""
        #: of each slot the newest scores, and of how many tokens they are
        self._newest: dict[int, tuple[int, Scores]] = {}
        self._scorer: PageScorer | None = None
        self._age = Age()
        try:
            self._scorer = load()
        except LuceError as error:
            self._failed(error)

    @property
    def name(self) -> str:
        return f"lru ({self.label}: {self._trouble})" if self._trouble else self.label

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
        self._trouble = ""
        self._newest[slot] = len(tokens), scores
        return scores

    def leave(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        pass

    def forget(self, slot: int) -> None:
        self._newest.pop(slot, None)

    def close(self) -> None:
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            scorer.close()

    def _failed(self, error: LuceError) -> None:
        if str(error) != self._trouble:
            _log.warning("--kvflash-policy drafter: pages go by age: %s", error)
        self._trouble = str(error)
