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
from luce.cache.manifest import Recall
from luce.cache.prefix import Hit, PrefixCache
from luce.cache.tree import Point
from luce.engine.scheduler import Sequence
from luce.engine.sequence import Texts
from luce.engine.speculate import Speculator
from luce.errors import LuceError

_log = logging.getLogger(__name__)


class Points:
    """Of all sequences, with what the drafter reads of them. `interval`: tokens between those of long prompts.

    All but `cuts` on the engine's thread.
    """

    def __init__(self, cache: PrefixCache, backend: Backend, speculator: Speculator | None, interval: int) -> None:
        self._cache = cache
        self._backend = backend
        self._speculator = speculator
        self._interval = interval
        #: the newest point of each sequence
        self._newest: dict[Sequence, Point] = {}

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
        if sequence.done in sequence.cuts:
            self._keep(sequence, passing=False)

    def read(self, sequence: Sequence, logits: NDArray[np.float32] | None, *, bounded: bool) -> None:
        """The prompt is read; `logits` of its last row, which are copied. `bounded`: it was kept at a boundary."""
        # A state is large; its end of the prompt is soon followed by the end of the reply.
        alone = not (self._cache.exact and bounded)
        self._keep(sequence, None if logits is None else logits.copy(), save=alone)

    def finished(self, sequence: Sequence, texts: Texts) -> None:
        """The reply ends in order; `texts` of it as in TextOutput."""
        recall = None
        if texts and sequence.reply and not sequence.prompt_left:
            recall = Recall(texts, tuple(sequence.tokens[sequence.done :].tolist()))
        self._keep(sequence, recall=recall)

    def ended(self, sequence: Sequence) -> None:
        """The sequence is over, in order or not."""
        self._newest.pop(sequence, None)

    def _keep(
        self,
        sequence: Sequence,
        logits: NDArray[np.float32] | None = None,
        *,
        passing: bool = True,
        save: bool = True,
        recall: Recall | None = None,
    ) -> None:
        """Let later sequences begin where this one is."""
        if sequence.slot is None or not sequence.done:
            return
        if sequence.shared is not None and sequence.done > sequence.shared:
            return
        if sequence.accepted and self._backend.recurrent:
            try:
                self._backend.accept(sequence.slot, sequence.path or range(sequence.accepted))
            except LuceError as error:
                _log.warning("a prefix could not be kept: %s", error)
                return
            sequence.accepted, sequence.path = 0, ()
        ids = sequence.tokens[: sequence.done]
        tail = None if self._speculator is None else self._speculator.tail(sequence.slot, sequence.done)
        after = self._newest.get(sequence)
        kept = self._cache.keep(
            sequence.slot, ids, logits, tail, passing=passing, after=after, save=save, recall=recall
        )
        if kept is not None:
            self._newest[sequence] = kept
