"""Where the prefix cache takes part in a sequence: which of its positions are kept, and where it begins.

A point of a model with states or windows is large, so they are few: at a prompt's first and last boundary, every so
many tokens in between, where prompts were seen to part, behind the prompt, and at the reply's end. Other models can be
resumed behind any page, and need the last two only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Backend
from luce.engine.events import Texts
from luce.engine.sequence import Sequence
from luce.engine.speculate import Speculator
from luce.errors import LuceError
from luce.kvcache.disk.manifest import ReplyTokens
from luce.kvcache.prefix_cache import Hit, PrefixCache
from luce.kvcache.prefix_tree import Checkpoint
from luce.kvcache.saver import Offer

_log = logging.getLogger(__name__)

# Most tokens between a prompt's last point and its end for which the disk has the logits at the end.
_OPENING = 64


class Checkpoints:
    """Of all sequences, with what the drafter reads of them. `interval`: tokens between those of long prompts.

    All but `cuts` on the engine's thread.
    """

    def __init__(self, cache: PrefixCache, backend: Backend, speculator: Speculator | None, interval: int) -> None:
        self._cache = cache
        self._backend = backend
        self._speculator = speculator
        self._interval = interval
        #: the newest point of each sequence
        self._newest: dict[Sequence, Checkpoint] = {}
        #: the last point inside each prompt that is read, which is not offered to the disk yet
        self._last: dict[Sequence, Checkpoint] = {}

    def cuts(self, boundaries: Many[int], length: int, shared: int | None = None) -> tuple[int, ...]:
        """Where in a prompt points are kept: at its first boundary, which conversations share, and at its last one,
        which the next turn shares whatever becomes of the reply; in long prompts between them as well. Nowhere behind
        `shared` tokens, if that is given, but there."""
        end = length if shared is None else min(shared, length)
        found = {end} if 0 < end < length else set()
        if self._cache.exact:
            inside = [at for at in boundaries if 0 < at < end]
            found |= {*inside[:1], *inside[-1:], *range(self._interval, end, self._interval)}
        return tuple(sorted(found))

    def resume(self, sequence: Sequence) -> Hit | None:
        """Let a sequence that has a slot begin where the cache leaves off; None if that is at its beginning."""
        # Scores are wanted at every position.
        if sequence.scores_prompt or sequence.cache.max_tokens == 0:
            return None
        assert sequence.slot is not None
        hit = self._cache.resume(sequence.prompt, sequence.slot, sequence.cache.max_tokens)
        if self._cache.exact and hit.length < hit.known < len(sequence.prompt):
            # Prompts part here that are alike up to here: the next one of this kind can be resumed where they do.
            sequence.cache.lengths = tuple(sorted({*sequence.cache.lengths, hit.known}))
        if not hit.length:
            return None
        if hit.point is not None:
            self._newest[sequence] = hit.point
            if self._speculator is not None:
                self._speculator.resume(sequence.slot, hit.length, hit.point.features)
        return hit

    def reading(self, sequence: Sequence) -> None:
        """Some of the prompt is read, and some is left."""
        if sequence.computed not in sequence.cache.lengths:
            return
        state = sequence.cache
        last = sequence.computed == state.lengths[-1] and sequence.prompt_remaining <= _OPENING
        last = last and self._cache.exact and state.saves_logits
        point = self._keep(sequence, passing=False, offer=None if last else Offer())
        if last and point is not None:
            self._last[sequence] = point

    def read(self, sequence: Sequence, logits: NDArray[np.float32] | None) -> None:
        """The prompt is read; `logits` of its last row, which are copied."""
        if logits is not None:
            logits = logits.copy()
        # A state is large: of the prompt's end the disk gets the logits only, if there is a point a few tokens before.
        alone = not (self._cache.exact and sequence.cache.has_boundary)
        self._keep(sequence, logits, offer=Offer() if alone else None)
        last = self._last.pop(sequence, None)
        if last is not None:
            behind = tuple(sequence.prompt[last.length :].tolist())
            self._cache.offer(last, Offer(opening=None if logits is None else (behind, logits)))

    def finished(self, sequence: Sequence, texts: Texts) -> None:
        """The reply ends in order; `texts` of it as in TextOutput."""
        recall: ReplyTokens | None = None
        if texts and sequence.reply and not sequence.prompt_remaining:
            recall = ReplyTokens(texts, tuple(sequence.tokens[sequence.computed :].tolist()))
        self._keep(sequence, offer=Offer(recall))

    def ended(self, sequence: Sequence) -> None:
        """The sequence is over, in order or not."""
        self._newest.pop(sequence, None)
        last = self._last.pop(sequence, None)
        if last is not None:
            self._cache.offer(last, Offer())

    def _keep(
        self,
        sequence: Sequence,
        logits: NDArray[np.float32] | None = None,
        *,
        passing: bool = True,
        offer: Offer | None,
    ) -> Checkpoint | None:
        """Let later sequences begin where this one is; as PrefixCache.keep."""
        if sequence.slot is None or not sequence.computed:
            return None
        if sequence.cache.max_tokens is not None and sequence.computed > sequence.cache.max_tokens:
            return None
        state = sequence.schedule
        if state.accepted and self._backend.capacity.recurrent:
            try:
                self._backend.accept(sequence.slot, state.path or range(state.accepted))
            except LuceError as error:
                _log.warning("a prefix could not be kept: %s", error)
                return None
            state.accept_applied()
        ids = sequence.tokens[: sequence.computed]
        tail = None if self._speculator is None else self._speculator.feature_tail(sequence.slot, sequence.computed)
        after = self._newest.get(sequence)
        kept = self._cache.keep(sequence.slot, ids, logits, tail, passing=passing, after=after, offer=offer)
        if kept is not None:
            self._newest[sequence] = kept
        return kept
