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
from luce.engine.scheduler import Sequence
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
        if sequence.scored or sequence.shared == 0:
            return None
        assert sequence.slot is not None
        hit = self._cache.resume(sequence.prompt, sequence.slot, sequence.shared)
        if self._cache.exact and hit.length < hit.known < len(sequence.prompt):
            # Prompts part here that are alike up to here: the next one of this kind can be resumed where they do.
            sequence.cuts = tuple(sorted({*sequence.cuts, hit.known}))
        if not hit.length:
            return None
        sequence.done = hit.length
        if hit.point is not None:
            self._newest[sequence] = hit.point
            if self._speculator is not None:
                self._speculator.resumed(sequence.slot, hit.length, hit.point.features)
        return hit

    def reading(self, sequence: Sequence) -> None:
        """Some of the prompt is read, and some is left."""
        if sequence.done not in sequence.cuts:
            return
        left = sequence.prompt_left
        last = sequence.done == sequence.cuts[-1] and left <= _OPENING and self._cache.exact and sequence.kept
        point = self._keep(sequence, passing=False, offer=None if last else Offer())
        if last and point is not None:
            self._last[sequence] = point

    def read(self, sequence: Sequence, logits: NDArray[np.float32] | None, *, bounded: bool) -> None:
        """The prompt is read; `logits` of its last row, which are copied. `bounded`: it was kept at a boundary."""
        if logits is not None:
            logits = logits.copy()
        # A state is large: of the prompt's end the disk gets the logits only, if there is a point a few tokens before.
        alone = not (self._cache.exact and bounded)
        self._keep(sequence, logits, offer=Offer() if alone else None)
        last = self._last.pop(sequence, None)
        if last is not None:
            behind = tuple(sequence.prompt[last.length :].tolist())
            self._cache.offer(last, Offer(opening=None if logits is None else (behind, logits)))

    def finished(self, sequence: Sequence, texts: Texts) -> None:
        """The reply ends in order; `texts` of it as in TextOutput."""
        recall: ReplyTokens | None = None
        if texts and sequence.reply and not sequence.prompt_left:
            recall = ReplyTokens(texts, tuple(sequence.tokens[sequence.done :].tolist()))
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
        if sequence.slot is None or not sequence.done:
            return None
        if sequence.shared is not None and sequence.done > sequence.shared:
            return None
        if sequence.accepted and self._backend.capacity.recurrent:
            try:
                self._backend.accept(sequence.slot, sequence.path or range(sequence.accepted))
            except LuceError as error:
                _log.warning("a prefix could not be kept: %s", error)
                return None
            sequence.accepted, sequence.path = 0, ()
        ids = sequence.tokens[: sequence.done]
        tail = None if self._speculator is None else self._speculator.tail(sequence.slot, sequence.done)
        after = self._newest.get(sequence)
        kept = self._cache.keep(sequence.slot, ids, logits, tail, passing=passing, after=after, offer=offer)
        if kept is not None:
            self._newest[sequence] = kept
        return kept
