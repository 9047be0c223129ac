"""Compression with a scripted small model: verdicts, failures, memory, bounds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from luce.compress.compression_options import CompressionOptions, Verdict
from luce.compress.compressor import MOST_FAILURES, RETRY, Bounds, CompressedPrompt, Compressor
from luce.compress.selection import PromptTokens
from luce.errors import ContextError, DeviceError, OutOfMemoryError, RequestError, UnavailableError
from tests.support.scorers import ScriptedScorer

N = 3200
TOKENS = np.random.default_rng(0).permutation(N).astype(np.int32)
WIDE = Bounds(8192, 8191)


def made(
    scorer: ScriptedScorer | None = None,
    *,
    load: Callable[[], ScriptedScorer] | None = None,
    keep_loaded: bool = True,
    **options: object,
) -> Compressor:
    found = scorer or ScriptedScorer()
    settings = CompressionOptions(**{"mode": "always", "keep_ratio": 0.5, **options})  # type: ignore[arg-type]
    return Compressor(settings, load or (lambda: found), identity="a", keep_loaded=keep_loaded)


def compressed(
    compressor: Compressor, tokens: np.ndarray = TOKENS, bounds: Bounds = WIDE, keep_ratio: float | None = None
) -> CompressedPrompt:
    return compressor.compress(PromptTokens.plain(tokens), bounds, keep_ratio=keep_ratio)


def test_the_kept_tokens_are_those_of_the_spans() -> None:
    found = compressed(made())
    assert found.verdict is Verdict.COMPRESS and found.original == N and len(found.ids) == N // 2
    assert list(found.ids) == [int(token) for begin, end in found.spans for token in TOKENS[begin:end]]


def test_a_share_of_the_scores_decides() -> None:
    """Token t has the score t, so that half of the scores is a third of the tokens, and some at the
    beginning."""
    ordered = np.arange(N, dtype=np.int32)
    compressor = made(keep_mass=0.5)
    found = compressed(compressor, ordered)
    assert 0.5 <= sum(found.ids) / ordered.sum() < 0.52 and len(found.ids) < 0.4 * N
    assert len(compressed(compressor, ordered, keep_ratio=0.5).ids) == N // 2
    frozen = compressor.freeze(PromptTokens.plain(ordered), ((0, N),))
    assert frozen.ids == found.ids
    bounded = compressed(made(keep_mass=1, keep_most=0.1), ordered)
    assert len(bounded.ids) < 0.12 * N and bounded.covered is not None and bounded.covered < 0.5


def test_auto_predicts_by_what_a_share_of_the_scores_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ordered = np.arange(N, dtype=np.int32)
    for mass, verdict in ((0.5, Verdict.COMPRESS), (0.9, Verdict.SLOWER)):
        compressor = made(clock.scorer(), threshold=100, keep_mass=mass)
        for tokens in (ordered, ordered + 1):
            compressed(compressor, tokens)
        # 0.37 of the tokens: 1 + 0.3 * 1.9 < 1.9; 0.7 of them: 1 + 0.7 * 1.9 > 1.9
        compressor.observe(N, 1.9 * N / 1000)
        assert compressor.verdict(N, "auto", None, continues=False, fits=True) is verdict


def test_a_prompt_is_read_once() -> None:
    scorer = ScriptedScorer()
    compressor = made(scorer)
    first, second, other = compressed(compressor), compressed(compressor), compressed(compressor, keep_ratio=0.4)
    assert (first.reused, second.reused, other.reused) == (False, True, False)
    assert second.ids == first.ids and second.seconds == 0 < first.seconds
    assert scorer.read == [N, N]


def test_the_share_of_one_and_short_prompts_need_no_small_model() -> None:
    scorer = ScriptedScorer()
    compressor = made(scorer)
    assert compressed(compressor, keep_ratio=1.0).verdict is Verdict.UNCHANGED
    short = compressed(compressor, TOKENS[:8])
    assert short.verdict is Verdict.UNCHANGED and list(short.ids) == TOKENS[:8].tolist() and not scorer.read


def test_a_prompt_that_cannot_be_shortened_is_unchanged() -> None:
    found = compressed(made(), TOKENS[:20])
    assert found.verdict is Verdict.UNCHANGED and list(found.ids) == TOKENS[:20].tolist()


@pytest.mark.parametrize(
    ("mode", "tokens", "continues", "fits", "verdict"),
    [
        ("auto", 99, False, True, Verdict.SHORT),
        ("auto", 100, False, True, Verdict.COMPRESS),
        ("auto", 99, False, False, Verdict.COMPRESS),
        ("auto", 100, True, True, Verdict.CONTINUATION),
        ("auto", 100, True, False, Verdict.CONTINUATION),
        ("always", 1, False, True, Verdict.COMPRESS),
        ("always", 100, True, True, Verdict.CONTINUATION),
    ],
)
def test_verdicts(mode: str, tokens: int, continues: bool, fits: bool, verdict: Verdict) -> None:
    compressor = made(threshold=100)
    assert compressor.verdict(tokens, mode, None, continues=continues, fits=fits) is verdict


class Clock:
    """A clock that a scripted small model moves on by 1 ms for each of N tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        #: seconds of the next texts
        self.takes = N / 1000
        monkeypatch.setattr("luce.compress.compressor.time.monotonic", lambda: self.now)

    def scorer(self) -> ScriptedScorer:
        return ScriptedScorer(self._tick)

    def _tick(self, text: int) -> None:
        self.now += self.takes


def test_auto_reads_a_prompt_whole_if_the_target_alone_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    compressor = made(clock.scorer(), threshold=100)

    def verdict(mode: str = "auto", *, keep_ratio: float | None = None, fits: bool = True) -> Verdict:
        return compressor.verdict(N, mode, keep_ratio, continues=False, fits=fits)

    # The first text after a load also waits for kernel builds.
    clock.takes = 100.0
    compressed(compressor)
    compressor.observe(N, 1.9 * N / 1000)
    assert verdict() is Verdict.COMPRESS, "the small model is not measured yet"
    clock.takes = N / 1000
    compressed(compressor, TOKENS[::-1])
    assert verdict() is Verdict.SLOWER, "1 + 0.5 * 1.9 > 1.9"
    assert verdict(keep_ratio=0.4) is Verdict.COMPRESS, "1 + 0.4 * 1.9 < 1.9"
    assert verdict("always") is Verdict.COMPRESS and verdict(fits=False) is Verdict.COMPRESS
    for _ in range(20):
        compressor.observe(N, 5.0 * N / 1000)
    assert verdict() is Verdict.COMPRESS, "1 + 0.5 * 5 < 5"


def test_auto_measures_the_small_model_again_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    compressor = made(clock.scorer(), threshold=100)
    for tokens in (TOKENS, TOKENS[::-1]):
        compressed(compressor, tokens)
    compressor.observe(N, N / 1000)
    verdicts = [compressor.verdict(N, "auto", None, continues=False, fits=True) for _ in range(2 * RETRY)]
    assert [i for i, verdict in enumerate(verdicts) if verdict is Verdict.COMPRESS] == [RETRY - 1, 2 * RETRY - 1]


def test_loading_is_a_part_of_the_time_if_the_weights_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    compressor = made(clock.scorer(), threshold=100, keep_loaded=False)
    compressed(compressor)
    compressor.observe(N, N / 1000)
    assert compressor.verdict(N, "auto", None, continues=False, fits=True) is Verdict.SLOWER


def test_what_does_not_fit_is_kept_in_part() -> None:
    found = compressed(made(), bounds=Bounds(1001, 1000))
    assert len(found.ids) == 1000 // 32 * 32
    with pytest.raises(ContextError, match="3200 tokens, of which compression keeps at least 3200") as caught:
        made().compress(replace(PromptTokens.plain(TOKENS), protected=np.ones(N, np.bool_)), Bounds(1001, 1000))
    assert (caught.value.tokens, caught.value.context) == (N, 1001)


def test_a_share_of_one_is_less_where_the_context_is_smaller() -> None:
    assert len(compressed(made(), bounds=Bounds(1001, 1000), keep_ratio=1.0).ids) == 992


ERRORS = [DeviceError("lost"), OutOfMemoryError("full"), ValueError("shapes")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failure_leaves_the_prompt_whole(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    compressor = made(ScriptedScorer(lambda text: error if text == 1 else None))
    with caplog.at_level(logging.WARNING):
        found = compressed(compressor)
    assert found.verdict is Verdict.FAILED and list(found.ids) == TOKENS.tolist() and str(error) in found.reason
    assert "a prompt is not compressed" in caplog.text
    assert compressed(compressor).verdict is Verdict.COMPRESS
    assert compressor.stats().state == "on"


@pytest.mark.parametrize("keep_loaded", [True, False])
def test_a_small_model_that_does_not_load_is_tried_again(keep_loaded: bool) -> None:
    calls: list[int] = []
    scorer = ScriptedScorer()

    def load() -> ScriptedScorer:
        calls.append(1)
        if len(calls) == 1:
            raise OutOfMemoryError("full")
        return scorer

    compressor = made(load=load, keep_loaded=keep_loaded)
    if not keep_loaded:
        assert compressed(compressor).reason == "full"
    assert not compressor.stats().loaded
    assert compressed(compressor).verdict is Verdict.COMPRESS
    assert compressor.stats().loaded is keep_loaded


def test_what_fails_and_does_not_fit_is_refused() -> None:
    compressor = made(ScriptedScorer(lambda text: DeviceError("lost")))
    with pytest.raises(UnavailableError, match=r"3200 tokens, the context 1001.*: lost") as caught:
        compressed(compressor, bounds=Bounds(1001, 1000))
    assert caught.value.status == 503 and caught.value.code == "compression_failed"


def test_after_three_failures_the_small_model_is_not_tried_again() -> None:
    scorer = ScriptedScorer(lambda text: None if text == 3 else DeviceError("lost"))
    compressor = made(scorer)
    assert [compressed(compressor, TOKENS[i:]).verdict for i in range(3)] == [*[Verdict.FAILED] * 2, Verdict.COMPRESS]
    for i in range(3, 3 + MOST_FAILURES):
        assert compressor.stats().state == "on"
        assert compressed(compressor, TOKENS[i:]).reason == "lost"
    assert compressor.stats().state == "off after 3 failures: lost"
    read = len(scorer.read)
    last = compressed(compressor, TOKENS[9:])
    assert last.verdict is Verdict.FAILED and last.reason == "off after 3 failures: lost" and len(scorer.read) == read
    assert compressed(compressor, TOKENS[2:]).verdict is Verdict.COMPRESS, "it was compressed before"


def test_a_client_that_leaves_is_no_failure() -> None:
    scorer = ScriptedScorer()
    compressor = made(scorer, keep_loaded=False)
    for calls in (1, 2, 3):
        left = iter([None] * (calls - 1))

        def check(left: object = left) -> None:
            if next(left, "left") is not None:  # type: ignore[call-overload]
                raise RequestError("the client has left", code="cancelled")

        with pytest.raises(RequestError, match="left"):
            compressor.compress(PromptTokens.plain(TOKENS), WIDE, check=check)
    assert compressor.stats().state == "on" and scorer.closed == 2
    assert compressed(compressor).verdict is Verdict.COMPRESS


def test_weights_are_released_between_prompts() -> None:
    scorer = ScriptedScorer()
    compressor = made(scorer, keep_loaded=False)
    compressed(compressor)
    assert scorer.closed == 1 and not compressor.stats().loaded
    kept = ScriptedScorer()
    compressor = made(kept)
    compressed(compressor)
    assert kept.closed == 0 and compressor.stats().loaded
    compressor.close()
    compressor.close()
    assert kept.closed == 1


@pytest.mark.parametrize(
    ("mode", "tokens", "continues", "fits", "verdict"),
    [
        ("always", 5, True, True, Verdict.FREEZE),
        ("always", 5, False, True, Verdict.FIRST_TURN),
        ("always", 5, False, False, Verdict.COMPRESS),
        ("auto", 99, True, True, Verdict.SHORT),
        ("auto", 99, True, False, Verdict.FREEZE),
        ("auto", 100, True, True, Verdict.FREEZE),
        ("auto", 100, False, True, Verdict.FIRST_TURN),
    ],
)
def test_verdicts_where_older_messages_are_compressed(
    mode: str, tokens: int, continues: bool, fits: bool, verdict: Verdict
) -> None:
    compressor = made(threshold=100, freeze=True)
    assert compressor.verdict(tokens, mode, None, continues=continues, fits=fits) is verdict


OLD = ((100, 900), (1000, 2000))


def test_older_messages_are_compressed_each_for_itself() -> None:
    scorer = ScriptedScorer()
    compressor = made(scorer)
    first = compressor.freeze(PromptTokens.plain(TOKENS), OLD)
    assert first.verdict is Verdict.FREEZE and scorer.read == [800, 1000] and not first.reused
    alone = [compressed(compressor, TOKENS[begin:end], keep_ratio=0.5).ids for begin, end in OLD]
    between = [TOKENS[:100], alone[0], TOKENS[900:1000], alone[1], TOKENS[2000:]]
    assert list(first.ids) == [int(token) for part in between for token in part]
    # A longer conversation: the frozen messages elsewhere, and one more.
    scorer.read.clear()
    longer = np.concatenate([TOKENS[:100], TOKENS[100:900], TOKENS[3000:], TOKENS[1000:2000], TOKENS[2000:2900]])
    later = compressor.freeze(PromptTokens.plain(longer), ((100, 900), (1100, 2100), (2100, 2900)))
    assert (
        scorer.read == [800]
        and not later.reused
        and list(later.ids[: 100 + len(alone[0])])
        == [
            *TOKENS[:100],
            *alone[0],
        ]
    )
    again = compressor.freeze(PromptTokens.plain(longer), ((100, 900), (1100, 2100), (2100, 2900)))
    assert again.reused and again.ids == later.ids and again.seconds == 0
    assert not compressor.freeze(PromptTokens.plain(longer), ((100, 900),), keep_ratio=0.4).reused


def test_an_older_message_for_which_the_small_model_fails_stays_whole() -> None:
    compressor = made(ScriptedScorer(lambda text: DeviceError("lost") if text == 1 else None))
    found = compressor.freeze(PromptTokens.plain(TOKENS), OLD)
    assert found.verdict is Verdict.FREEZE and found.reason == "lost" and not found.reused
    assert list(found.ids[:1000]) == TOKENS[:1000].tolist() and len(found.ids) < N
    broken = made(ScriptedScorer(lambda text: DeviceError("lost")))
    assert broken.freeze(PromptTokens.plain(TOKENS), OLD).verdict is Verdict.FAILED
    assert broken.freeze(PromptTokens.plain(TOKENS), OLD).ids == TOKENS.tolist()


def test_a_client_that_leaves_ends_the_compression_of_older_messages() -> None:
    def leave() -> None:
        raise RequestError("the client has left", code="cancelled")

    compressor = made()
    with pytest.raises(RequestError, match="left"):
        compressor.freeze(PromptTokens.plain(TOKENS), OLD, check=leave)
    assert compressor.stats().state == "on"


def test_counts() -> None:
    compressor = made()
    for prompt in (compressed(compressor), compressed(compressor), CompressedPrompt.whole([1, 2], Verdict.SHORT)):
        compressor.count(prompt)
    stats = compressor.stats()
    assert stats.prompts == {Verdict.COMPRESS: 2, Verdict.SHORT: 1}
    assert (stats.original, stats.kept, stats.reused) == (2 * N, N, 1) and stats.seconds > 0
