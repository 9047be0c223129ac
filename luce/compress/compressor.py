"""Compresses prompts: a small model scores their tokens, and the target reads the kept ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from luce.compress.compression_options import CompressionOptions, Verdict
from luce.compress.reading_time import ReadingTime
from luce.compress.scorer import Scorer, no_check
from luce.compress.selection import (
    SHORTEST,
    Keep,
    PromptTokens,
    Selection,
    Spans,
    count_tokens,
    gather,
    spans_of,
)
from luce.compress.session_ratio import MOST, SessionRatios
from luce.compress.span_cache import SpanCache, SpanStore
from luce.errors import ContextError, LuceError, ModelError, RequestError, UnavailableError

_log = logging.getLogger(__name__)

#: version of the algorithm: cached spans of another one are not used
VERSION = 2
#: consecutive failures after which no prompt is compressed any more
MOST_FAILURES = 3
#: of so many prompts that would be read whole because that is faster, one is compressed: the measured time of the small
#: model may be out of date
RETRY = 16
_CACHE_BYTES = 64 << 20
_LARGEST = Keep(MOST)


@dataclass(frozen=True)
class CompressedPrompt:
    """A prompt as the target reads it."""

    ids: Sequence[int]
    #: tokens of the whole prompt
    original: int
    verdict: Verdict
    #: the kept tokens in the whole prompt
    spans: Spans = ()
    #: seconds of the small model, with its loading and the text in its vocabulary
    seconds: float = 0.0
    #: the share of the sum of all scores that the kept tokens have; None if the small model has not read the prompt
    covered: float | None = None
    #: `covered` as a share of what the largest keep ratio of a session would cover
    reached: float | None = None
    #: whether the spans come from the cache, so that the small model did not read the prompt again
    reused: bool = False
    #: why the compression failed
    reason: str = ""
    #: int32 [n]: the position of each kept token in the whole prompt, if the target takes these; None: they are counted
    #: anew
    position_ids: NDArray[np.int32] | None = None

    @property
    def shortened(self) -> bool:
        """Whether the target reads fewer tokens."""
        return self.verdict in (Verdict.COMPRESS, Verdict.FREEZE)

    @classmethod
    def whole(cls, ids: Sequence[int], verdict: Verdict, reason: str = "") -> CompressedPrompt:
        """A prompt that keeps all its tokens."""
        return cls(ids, len(ids), verdict, ((0, len(ids)),), reason=reason)


@dataclass(frozen=True)
class Bounds:
    """The room for a compressed prompt."""

    #: tokens of the target's context, for error messages
    context: int
    #: most tokens of the compressed prompt
    most: int


@dataclass(frozen=True)
class CompressionStats:
    """Numbers at one moment; counters are since the start."""

    #: prompts by verdict, without OFF
    prompts: Mapping[Verdict, int] = field(default_factory=dict)
    #: tokens of compressed prompts, and the kept ones among them
    original: int = 0
    kept: int = 0
    #: prompts whose spans came from the cache
    reused: int = 0
    #: seconds of the small model
    seconds: float = 0.0
    #: on, or why no prompt is compressed any more
    state: str = "on"
    #: whether the small model's weights are loaded
    loaded: bool = False


class Compressor:
    """Compresses prompts, one at a time. Thread-safe.

    `load` loads the small model; `identity` names it in the keys of cached spans. `keep_loaded`: its weights stay
    loaded between prompts. `facts` describe it to users. `store`: keeps spans beyond the end of the process.
    """

    def __init__(
        self,
        options: CompressionOptions,
        load: Callable[[], Scorer],
        *,
        identity: str,
        keep_loaded: bool = True,
        facts: Mapping[str, str | int] | None = None,
        store: SpanStore | None = None,
    ) -> None:
        self.options = options
        self.facts = dict(facts or {})
        #: None unless conversations have keep ratios of their own
        self.sessions = SessionRatios() if options.by_session else None
        self._load = load
        self._keep_loaded = keep_loaded
        self._scorer: Scorer | None = None
        #: held while a prompt is compressed
        self._lock = threading.Lock()
        self._cache = SpanCache(f"{VERSION} {identity}", _CACHE_BYTES, store)
        self._failures = 0
        self._stats, self._stats_lock = CompressionStats(), threading.Lock()
        #: held for the times below
        self._times_lock = threading.Lock()
        self._scorer_time, self._target_time = ReadingTime(), ReadingTime()
        #: whether the loaded small model has read a text: the first one waits for kernel builds and page faults
        self._warm = False
        #: share of the tokens that was kept of the last text
        self._kept_share = 1.0
        #: verdicts SLOWER since the small model last read a prompt
        self._slower_verdicts = 0
        if keep_loaded:
            try:
                self._scorer = load()
            except LuceError as error:
                self._failed(error)

    def verdict(self, tokens: int, mode: str, keep_ratio: float | None, *, continues: bool, fits: bool) -> Verdict:
        """Whether a prompt of so many tokens is to be compressed in a `mode`, auto or always: COMPRESS, FREEZE, or why
        not.

        `keep_ratio`: the request's; None for the options'. `continues`: the prompt continues a conversation. `fits`:
        the context holds the whole prompt.
        """
        if continues and not self.options.freeze:
            return Verdict.CONTINUATION
        if mode == "auto" and fits and tokens < self.options.threshold:
            return Verdict.SHORT
        if continues:
            return Verdict.FREEZE
        if self.options.freeze and fits:
            return Verdict.FIRST_TURN
        return Verdict.SLOWER if mode == "auto" and fits and self._slower(tokens, keep_ratio) else Verdict.COMPRESS

    def compress(
        self,
        prompt: PromptTokens,
        bounds: Bounds,
        *,
        keep_ratio: float | None = None,
        check: Callable[[], None] = no_check,
    ) -> CompressedPrompt:
        """Compress a prompt by `keep_ratio` (None: the options'), or by as much more as the bounds need.

        `check` is called between layers; a RequestError that it raises ends the work. If the small model fails, the
        prompt stays whole. Raises ContextError if the kept tokens do not fit, and UnavailableError if the small model
        failed and the whole prompt does not fit.
        """
        tokens = prompt.ids
        keep = self.options.keep_for(len(tokens), keep_ratio)
        if len(tokens) < SHORTEST or (keep.share == keep.most == 1 and len(tokens) <= bounds.most):
            return CompressedPrompt.whole(tokens.tolist(), Verdict.UNCHANGED)
        with self._lock:
            try:
                spans, seconds, (covered, reached) = self._spans(prompt, keep, bounds.most, check)
            except RequestError:
                raise
            except Exception as error:
                return self._without(tokens.tolist(), bounds, self._failed(error))
        if count_tokens(spans) > bounds.most:
            raise ContextError(
                f"This model's maximum context length is {bounds.context} tokens. However, your messages resulted in "
                f"{len(tokens)} tokens, of which compression keeps at least {count_tokens(spans)}. Please reduce the "
                "length of the messages.",
                tokens=count_tokens(spans),
                context=bounds.context,
            )
        kept = gather(tokens, spans)
        verdict = Verdict.COMPRESS if len(kept) < len(tokens) else Verdict.UNCHANGED
        return CompressedPrompt(kept, len(tokens), verdict, spans, seconds, covered, reached, reused=not seconds)

    def freeze(
        self,
        prompt: PromptTokens,
        messages: Spans,
        *,
        keep_ratio: float | None = None,
        check: Callable[[], None] = no_check,
    ) -> CompressedPrompt:
        """Compress some messages of a prompt, each for itself: what is kept of one depends on its own tokens alone.

        So the prompts of the next turns begin alike, and the prefix cache has them. `messages`: their tokens. A message
        for which the small model fails stays whole. `keep_ratio`, `check`: as in `compress`.
        """
        kept, seconds, reason = np.ones(len(prompt), np.bool_), 0.0, ""
        for begin, end in messages:
            part = prompt.part(begin, end)
            keep = self.options.keep_for(len(part), keep_ratio)
            with self._lock:
                try:
                    spans, took, _ = self._spans(part, keep, len(part), check)
                except RequestError:
                    raise
                except Exception as error:
                    reason = self._failed(error)
                    continue
            seconds += took
            kept[begin:end] = False
            for low, high in spans:
                kept[begin + low : begin + high] = True
        spans = spans_of(kept)
        unchanged = Verdict.FAILED if reason else Verdict.UNCHANGED
        verdict = unchanged if kept.all() else Verdict.FREEZE
        ids = gather(prompt.ids, spans)
        return CompressedPrompt(
            ids, len(prompt), verdict, spans, seconds, reused=not (seconds or reason), reason=reason
        )

    def observe(self, tokens: int, seconds: float) -> None:
        """Note that the target has read so many tokens of a prompt in so many seconds."""
        with self._times_lock:
            self._target_time.observe(tokens, seconds)

    def count(self, prompt: CompressedPrompt) -> None:
        """Count a prompt."""
        done = prompt.shortened
        with self._stats_lock:
            was = self._stats
            self._stats = replace(
                was,
                prompts={**was.prompts, prompt.verdict: was.prompts.get(prompt.verdict, 0) + 1},
                original=was.original + done * prompt.original,
                kept=was.kept + done * len(prompt.ids),
                reused=was.reused + prompt.reused,
                seconds=was.seconds + prompt.seconds,
            )

    def stats(self) -> CompressionStats:
        """The numbers now."""
        return replace(self._stats, loaded=self._scorer is not None)

    def close(self) -> None:
        """Release the small model. Idempotent."""
        with self._lock:
            self._release()

    def _slower(self, tokens: int, keep_ratio: float | None) -> bool:
        """Whether the target alone reads a prompt at least as soon, by the measured times; False without them."""
        keep = self.options.keep_for(tokens, keep_ratio)
        with self._times_lock:
            # What a share of the scores leaves is known only afterwards: as much as of the last prompt.
            ratio = self._kept_share if keep.mass else keep.share
            scorer, whole = self._scorer_time.predict(tokens), self._target_time.predict(tokens)
            kept = self._target_time.predict(round(ratio * tokens))
            if scorer is None or whole is None or kept is None or scorer + kept < whole:
                return False
            self._slower_verdicts = (self._slower_verdicts + 1) % RETRY
            return self._slower_verdicts != 0

    def _spans(
        self, prompt: PromptTokens, keep: Keep, most: int, check: Callable[[], None]
    ) -> tuple[Spans, float, tuple[float, float] | tuple[None, None]]:
        """The kept tokens of a prompt, the seconds of the small model, and `covered` and `reached`: for cached ones 0
        and None. The lock is held."""
        check()
        key = self._cache.key(prompt, keep, most)
        spans = self._cache.get(key)
        if spans is not None:
            return spans, 0.0, (None, None)
        if self._failures >= MOST_FAILURES:
            raise ModelError(self._stats.state)
        began = time.monotonic()
        scores = self._scores(prompt.ids, check)
        seconds = max(time.monotonic() - began, 1e-9)
        spans, covered = self._select(prompt, scores, keep, most)
        self._cache.put(key, spans)
        with self._times_lock:
            self._kept_share = count_tokens(spans) / len(prompt)
        self._failures = 0
        return spans, seconds, covered

    def _select(
        self, prompt: PromptTokens, scores: NDArray[np.float64], keep: Keep, most: int
    ) -> tuple[Spans, tuple[float, float]]:
        selection = Selection(prompt, scores)
        spans = selection.spans(selection.count(keep))
        spans = spans if count_tokens(spans) <= most else selection.largest(most)
        covered, most_covered = (
            selection.covered(each) for each in (spans, selection.spans(selection.count(_LARGEST)))
        )
        return spans, (covered, min(1.0, covered / most_covered) if most_covered else 1.0)

    def _scores(self, tokens: NDArray[np.int32], check: Callable[[], None]) -> NDArray[np.float64]:
        began = time.monotonic()
        if self._scorer is None:
            self._scorer, self._warm = self._load(), False
        try:
            scores = self._scorer(tokens, check=check)
        finally:
            if not self._keep_loaded:
                self._release()
        with self._times_lock:
            # Without residency each prompt waits for the weights, which is a part of its time.
            if self._warm or not self._keep_loaded:
                self._scorer_time.observe(len(tokens), time.monotonic() - began)
            self._warm, self._slower_verdicts = True, 0
        return scores

    def _failed(self, error: Exception) -> str:
        """Count a failure; returns the reason."""
        if self._failures >= MOST_FAILURES:
            return str(error)
        reason = str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}"
        self._failures += 1
        _log.warning("a prompt is not compressed: %s", reason, exc_info=not isinstance(error, LuceError))
        if self._failures == MOST_FAILURES:
            state = f"off after {MOST_FAILURES} failures: {reason}"
            _log.warning("prompts are not compressed any more until a restart: %s", reason)
            with self._stats_lock:
                self._stats = replace(self._stats, state=state)
        return reason

    def _without(self, ids: Sequence[int], bounds: Bounds, reason: str) -> CompressedPrompt:
        """The whole prompt after a failure. Raises UnavailableError if it does not fit."""
        if len(ids) <= bounds.most:
            return CompressedPrompt.whole(ids, Verdict.FAILED, reason)
        raise UnavailableError(
            f"the prompt has {len(ids)} tokens, the context {bounds.context}, and it could not be compressed: {reason}",
            code="compression_failed",
        )

    def _release(self) -> None:
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            scorer.close()
