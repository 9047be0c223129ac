"""A scorer in a daemon, on the daemon's side: scores, refused requests, cancellation, weights that go and come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from luce.compress.daemon import ScorerSession
from luce.compress.messages import CancelScore, LoadScorer, Release, Score, Scored, ScorerLoaded
from luce.compress.scorer import TextScorer
from luce.draft.messages import Idle
from luce.errors import BackendError, ModelError, RequestError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.remote.messages import Done
from luce.remote.service import Work
from luce.runtime.host import HostDevice
from luce.shard.layerwise import Reading
from tests.support.reference import Reference

SMALL = Reference("qwen3-a-F32")
TOKENS = np.random.default_rng(0).integers(0, SMALL.spec.vocab, 150).astype(np.int32)


def load_of(**fields: Any) -> LoadScorer:
    with open_gguf(SMALL.path) as file:
        load = LoadScorer(str(SMALL.path), fingerprint(file), Reading(16), 4096)
    return msgspec.structs.replace(load, **fields)


@pytest.fixture
def session() -> Iterator[ScorerSession]:
    with ExitStack() as stack:
        yield ScorerSession(load_of(), HostDevice(), None, stack)


def scored(session: ScorerSession, message: Score) -> np.ndarray:
    work = session.handle(message)
    assert isinstance(work, Work)
    work.over.wait()
    assert work.over.done()
    response = work.response()
    assert isinstance(response, Scored)
    return response.scores


def test_scores_are_those_of_a_scorer_in_this_process(session: ScorerSession) -> None:
    assert session.loaded() == ScorerLoaded(min(4096, SMALL.spec.context_length - 64))
    with open_gguf(SMALL.path) as file:
        here = TextScorer(file, SMALL.spec, HostDevice(), reading=Reading(16))
        for segment, rotated in ((4096, False), (4096, True), (60, False)):
            expected = here(TOKENS, segment=segment, rotated=rotated)
            np.testing.assert_array_equal(scored(session, Score(TOKENS, segment, rotated)), expected)


def test_the_weights_go_and_come_back(session: ScorerSession, monkeypatch: pytest.MonkeyPatch) -> None:
    first = scored(session, Score(TOKENS, 4096, False))
    closed: list[TextScorer] = []
    monkeypatch.setattr(TextScorer, "close", lambda scorer: closed.append(scorer))
    assert session.handle(Release()) == session.handle(Release()) == Done()
    assert len(closed) == 1
    np.testing.assert_array_equal(scored(session, Score(TOKENS, 4096, False)), first)


def test_a_cancelled_text_ends_before_its_next_layer(session: ScorerSession, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[int] = []

    def tail_attention(self: object, tokens: object, rows: object, *, rotated: bool, check: Any) -> None:
        while True:
            layers.append(1)
            check()
            if len(layers) == 3:
                session.handle(CancelScore())

    with monkeypatch.context() as patch:
        patch.setattr("luce.compress.scorer.LayerwiseModel.tail_attention", tail_attention)
        with pytest.raises(RequestError, match="cancelled"):
            scored(session, Score(TOKENS, 4096, False))
    assert len(layers) == 4
    # A message that comes too late cancels nothing.
    session.handle(CancelScore())
    assert len(scored(session, Score(TOKENS, 4096, False))) == len(TOKENS)


@pytest.mark.parametrize(
    "message",
    [
        Score(TOKENS[:0], 4096, False),
        Score(TOKENS, 0, False),
        Score(TOKENS.reshape(2, -1), 4096, False),
        Score(TOKENS - SMALL.spec.vocab, 4096, False),
        Score(TOKENS + SMALL.spec.vocab, 4096, False),
    ],
    ids=["empty", "segment", "shape", "negative", "beyond the vocabulary"],
)
def test_refused_texts(session: ScorerSession, message: Score) -> None:
    with pytest.raises(BackendError, match="the text of the message is not valid"):
        session.handle(message)


def test_other_requests_are_refused(session: ScorerSession) -> None:
    with pytest.raises(BackendError, match="a daemon that holds a scorer does not handle Idle requests"):
        session.handle(Idle())


REFUSED = [Reading(0), Reading(1 << 20), Reading(16, -1), Reading(16, 1.5), Reading(16, 0, -1), Reading(16, 0, 0, -1)]


@pytest.mark.parametrize("limits", [*({"reading": each} for each in REFUSED), {"longest": 0}, {"longest": 1 << 30}])
def test_refused_limits(limits: dict[str, Any]) -> None:
    with ExitStack() as stack, pytest.raises(BackendError, match="the limits of the scorer are not valid"):
        ScorerSession(load_of(**limits), HostDevice(), None, stack)


def test_another_file_is_refused() -> None:
    other = Reference("qwen35-a-F32").path
    with ExitStack() as stack, pytest.raises(ModelError, match="the daemon's file is not the server's"):
        ScorerSession(load_of(), HostDevice(), Path(other), stack)
