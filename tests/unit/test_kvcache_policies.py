"""KVFlash's policies over a scripted backend and a scripted drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.config.resolve import resolve
from luce.config.settings import Config
from luce.errors import DeviceError, LuceError, OutOfMemoryError, UsageError
from luce.kvcache.paging import Scores
from luce.kvcache.policies import DraftPolicy, PageScorer, QueryPolicy, UsePolicy, open_policy
from luce.runtime.step import PAGE, Int32


class Ranking:
    """A backend that remembers which pages were added, and gives each the share that its number says."""

    def __init__(self) -> None:
        self.capacity = self
        self.ranking = self
        self.ranking_bytes = 100
        self.added: list[tuple[int, int, int]] = []
        self.dropped: list[int] = []
        self.asked: list[tuple[int, int, list[int]]] = []

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        self.added += [(slot, entry, page) for entry, page in zip(entries, pages, strict=True)]

    def drop(self, slot: int) -> None:
        self.dropped.append(slot)

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        self.asked.append((slot, position, entries.tolist()))
        return np.where(entries == 7, 0.0, 10.0 ** -entries.astype(np.float64))


def tokens(count: int) -> Int32:
    return np.arange(count, dtype=np.int32)


def query(budget: int = 1 << 30) -> tuple[QueryPolicy, Ranking]:
    backend = Ranking()
    return QueryPolicy(cast(Backend, backend), budget), backend


def test_ranking_data_is_added_once_and_before_a_page_is_swapped_out() -> None:
    policy, backend = query()
    assert policy.scores(1, tokens(0), []) is None
    policy.before_swap_out(1, [2, 1], [5, 4])
    assert backend.added == [(1, 2, 5), (1, 1, 4)]
    scores = policy.scores(1, tokens(4 * PAGE + 9), [3, -1, -1, 6])
    assert backend.added[2:] == [(1, 0, 3), (1, 3, 6)]
    assert backend.asked == [(1, 4 * PAGE + 7, [0, 1, 2, 3])], "the newest row in the cache asks"
    assert scores is not None and scores.dtype == np.float32
    np.testing.assert_allclose(scores, np.log(10.0) * -np.arange(4), rtol=1e-6)
    policy.before_swap_out(1, [3], [9])
    assert len(backend.added) == 4


def test_unknown_pages_score_lowest() -> None:
    policy, _ = query()
    scores = policy.scores(0, tokens(9 * PAGE), [0, -1, 2, 3, -1, 5, 6, 7])
    assert scores is not None
    assert np.isneginf(scores[[1, 4, 7]]).all() and np.isfinite(scores[[0, 2, 3, 5, 6]]).all()
    assert policy.scores(2, tokens(9 * PAGE), [-1, -1]) is None


def test_another_sequence_begins_anew() -> None:
    policy, backend = query()
    policy.before_swap_out(0, [0, 1], [8, 9])
    policy.forget(0)
    policy.forget(0)
    assert backend.dropped == [0]
    assert policy.scores(0, tokens(2 * PAGE), [-1, -1]) is None and not backend.asked
    policy.before_swap_out(0, [0], [3])
    assert backend.added[2:] == [(0, 0, 3)]


def test_ranking_data_has_a_budget() -> None:
    policy, backend = query(599)
    assert policy.nbytes == 0
    policy.before_swap_out(0, [0, 1, 2], [3, 4, 5])
    assert policy.nbytes == 300
    policy.before_swap_out(1, [0, 1], [6, 7])
    policy.before_swap_out(1, [0, 1, 2], [6, 7, 8])
    assert policy.nbytes == 500 and backend.added[3:] == [(1, 0, 6), (1, 1, 7)]
    scores = policy.scores(1, tokens(3 * PAGE + 9), [6, 7, 8])
    assert scores is not None and np.isfinite(scores).tolist() == [True, True, False]
    policy.forget(0)
    assert policy.nbytes == 200 and backend.dropped == [0]
    assert np.isfinite(policy.scores(1, tokens(3 * PAGE + 9), [6, 7, 8])).all()  # type: ignore[call-overload]


def test_a_sequence_may_end_after_its_shard_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, backend = query()
    policy.before_swap_out(0, [0], [3])

    def drop(slot: int) -> None:
        raise DeviceError("gone")

    monkeypatch.setattr(backend, "drop", drop)
    policy.forget(0)
    assert policy.nbytes == 0


def test_lru_ranks_resident_pages_and_swaps_none_in() -> None:
    backend = Ranking()
    policy = UsePolicy(cast(Backend, backend), 1 << 30)
    assert policy.scores(0, tokens(9), []) is None
    policy.before_swap_out(0, [1], [4])
    assert not backend.added
    scores = policy.scores(0, tokens(4 * PAGE + 9), [3, -1, 5, 6])
    assert backend.asked == [(0, 4 * PAGE + 7, [0, 2, 3])]
    assert scores is not None and np.isneginf(scores).tolist() == [False, True, False, False]
    assert scores[0] > scores[2] > scores[3]
    policy.scores(0, tokens(4 * PAGE + 9), [-1, 7, 5, 6])
    assert backend.asked[1:] == [(0, 4 * PAGE + 7, [1, 2, 3])] and backend.added[3:] == [(0, 1, 7)]


class Scripted:
    """A drafter that scores a page by its first token, or fails."""

    def __init__(self) -> None:
        self.error: LuceError | None = None
        self.calls = self.closed = 0

    def __call__(self, tokens: Int32) -> Scores:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return tokens[: len(tokens) // PAGE * PAGE : PAGE].astype(np.float32)

    def close(self) -> None:
        self.closed += 1


def test_a_drafter_scores_a_prompt_before_it_is_read_and_once() -> None:
    scorer = Scripted()
    policy = DraftPolicy(lambda: scorer)
    assert policy.name == "drafter"
    scores = policy.scores(0, tokens(3 * PAGE + 5), [])
    assert scores is not None and scores.tolist() == [0, PAGE, 2 * PAGE]
    assert policy.scores(0, tokens(3 * PAGE + 5), [1, 2, 3]) is scores and scorer.calls == 1
    assert policy.scores(1, tokens(3 * PAGE + 5), []) is not scores
    grown = policy.scores(0, tokens(3 * PAGE + 6), [1, 2, 3])
    assert grown is not None and scorer.calls == 3
    policy.forget(0)
    policy.scores(0, tokens(3 * PAGE + 6), [])
    assert scorer.calls == 4
    policy.close()
    policy.close()
    assert scorer.closed == 1


def test_pages_go_by_age_while_the_drafter_fails(caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scripted()
    policy = DraftPolicy(lambda: scorer)
    scorer.error = DeviceError("cuda:0: out of sorts")
    for length in (100, 200):
        assert policy.scores(0, tokens(length), [1]) is None
    assert policy.name == "lru (drafter: cuda:0: out of sorts)"
    assert len(caplog.records) == 1 and "the oldest pages are swapped out first" in caplog.text
    scorer.error = None
    assert policy.scores(0, tokens(300), [1]) is not None and policy.name == "drafter"


def test_pages_go_by_age_if_the_drafter_cannot_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> PageScorer:
        raise OutOfMemoryError("cuda:0: 2 bytes are free")

    policy = DraftPolicy(load)
    assert policy.name == "lru (drafter: cuda:0: 2 bytes are free)" and "2 bytes are free" in caplog.text
    assert policy.scores(0, tokens(100), [1]) is None
    policy.close()


@pytest.mark.parametrize("name", ["qk", "drafter", "lru"])
def test_settings_choose(name: str) -> None:
    scorer = Scripted()
    policy = open_policy(Config(kvflash_policy=name), cast(Backend, Ranking()), lambda: lambda: scorer, 1 << 30)
    assert policy.name == name
    policy.close()
    assert scorer.closed == (name == "drafter")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kvflash_policy": "drafter"}, "--kvflash-policy drafter: requires --kvflash-drafter"),
        ({"kvflash_policy": "drafter", "draft": "ngram"}, "--kvflash-policy drafter: requires --kvflash-drafter"),
        ({"kvflash_drafter": "a.gguf"}, "--kvflash-drafter: requires --kvflash-policy drafter"),
        ({"kvflash_policy": "quest"}, "--kvflash-policy: expected qk or drafter or lru"),
    ],
)
def test_settings_that_lack_something(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({"kvflash": "512", **given}, env={})
    assert message in str(caught.value)


def test_a_drafter_may_be_that_of_the_draft() -> None:
    given = {"kvflash": "512", "kvflash_policy": "drafter"}
    assert resolve({**given, "draft": "a.gguf"}, env={}).kvflash_drafter == ""
    assert resolve({**given, "kvflash_drafter": "b.gguf"}, env={}).kvflash_drafter == "b.gguf"
