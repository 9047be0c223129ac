"""Restores the cached prefix of a sequence, and saves checkpoints while it runs.

Checkpoints of a model with recurrent states or windows are large, so there are few of them: at the first and the last
boundary of a prompt, at intervals between them, at lengths where prompts diverged, at the prompt's end, and at the
reply's end. Other models can resume after any page: they need only the last two.
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
from luce.kvcache.saver import SnapshotExtras

_log = logging.getLogger(__name__)

#: most tokens from a prompt's last checkpoint to its end for which the snapshot gets the logits of the end
_PROMPT_END = 64


class Checkpoints:
    """The checkpoints of all sequences, with features for the drafter. `interval`: tokens between two checkpoints of a
    long prompt.

    All methods but `checkpoint_lengths` run on the engine's thread.
    """

    def __init__(self, cache: PrefixCache, backend: Backend, speculator: Speculator | None, interval: int) -> None:
        self._cache = cache
        self._backend = backend
        self._speculator = speculator
        self._interval = interval
        #: the newest checkpoint of each sequence
        self._newest: dict[Sequence, Checkpoint] = {}
        #: for each prompt being read, its last checkpoint, if that is not queued for the disk yet
        self._last: dict[Sequence, Checkpoint] = {}

    def checkpoint_lengths(
        self, boundaries: Many[int], length: int, max_cached_tokens: int | None = None
    ) -> tuple[int, ...]:
        """The lengths of a prompt of `length` tokens at which checkpoints are saved.

        These are its first boundary, which conversations share, its last boundary, which the next turn shares with any
        reply, and intervals between them. With `max_cached_tokens`, this length is added, and longer ones are left out.
        """
        end = length if max_cached_tokens is None else min(max_cached_tokens, length)
        found = {end} if 0 < end < length else set()
        if self._cache.checkpoints_only:
            inside = [at for at in boundaries if 0 < at < end]
            found |= {*inside[:1], *inside[-1:], *range(self._interval, end, self._interval)}
        return tuple(sorted(found))

    def resume(self, sequence: Sequence) -> Hit | None:
        """Restore the longest cached prefix of a sequence that has a slot; None if there is none."""
        # A prompt with scores needs logits at every position.
        if sequence.scores_prompt or sequence.cache.max_tokens == 0:
            return None
        assert sequence.slot is not None
        limit = sequence.cache.max_tokens
        if sequence.reply:
            # Behind a loss: the row of the reply's last token is the next one, whatever the cache has.
            limit = sequence.read_end if limit is None else min(limit, sequence.read_end)
        hit = self._cache.resume(sequence.prefix_ids, sequence.slot, limit)
        if self._cache.checkpoints_only and hit.length < hit.matched < len(sequence.prompt):
            # Two prompts diverge at this length. With a checkpoint here, the next prompt that diverges here can resume.
            sequence.cache.lengths = tuple(sorted({*sequence.cache.lengths, hit.matched}))
        if not hit.length:
            return None
        if hit.checkpoint is not None:
            self._newest[sequence] = hit.checkpoint
            if self._speculator is not None:
                self._speculator.resume(sequence.slot, hit.length, hit.checkpoint.features)
        return hit

    def prompt_part_read(self, sequence: Sequence) -> None:
        """A part of the prompt has been read, and a part remains."""
        if sequence.computed not in sequence.cache.lengths:
            return
        state = sequence.cache
        last = sequence.computed == state.lengths[-1] and sequence.prompt_remaining <= _PROMPT_END
        last = last and self._cache.checkpoints_only and state.saves_logits
        checkpoint = self._save(sequence, interim=False, extras=None if last else SnapshotExtras())
        if last and checkpoint is not None:
            self._last[sequence] = checkpoint

    def prompt_read(self, sequence: Sequence, logits: NDArray[np.float32] | None) -> None:
        """The prompt has been read. `logits`: of its last row, float32 [vocab]; they are copied."""
        if logits is not None:
            logits = logits.copy()
        # States are large: if a checkpoint lies just before, the disk gets only the logits of the prompt's end.
        complete = not (self._cache.checkpoints_only and sequence.cache.has_boundary)
        self._save(sequence, logits, extras=SnapshotExtras() if complete else None)
        last = self._last.pop(sequence, None)
        if last is not None:
            rest = tuple(sequence.prefix_ids[last.length : len(sequence.prompt)].tolist())
            self._cache.enqueue(last, SnapshotExtras(prompt_end=None if logits is None else (rest, logits)))

    def reply_finished(self, sequence: Sequence, texts: Texts) -> None:
        """The reply is complete. `texts` as in TextOutput."""
        reply: ReplyTokens | None = None
        if texts and sequence.reply and not sequence.unread:
            reply = ReplyTokens(texts, tuple(sequence.tokens[sequence.computed :].tolist()))
        self._save(sequence, extras=SnapshotExtras(reply))

    def sequence_ended(self, sequence: Sequence) -> None:
        """The sequence has ended, complete or not."""
        self._newest.pop(sequence, None)
        last = self._last.pop(sequence, None)
        if last is not None:
            self._cache.enqueue(last, SnapshotExtras())

    def _save(
        self,
        sequence: Sequence,
        logits: NDArray[np.float32] | None = None,
        *,
        interim: bool = True,
        extras: SnapshotExtras | None,
    ) -> Checkpoint | None:
        """Save a checkpoint at the sequence's current length; see PrefixCache.save."""
        if sequence.slot is None or not sequence.computed:
            return None
        if sequence.cache.max_tokens is not None and sequence.computed > sequence.cache.max_tokens:
            return None
        state = sequence.schedule
        if state.accepted and self._backend.capacity.recurrent:
            try:
                self._backend.accept(sequence.slot, state.path or range(state.accepted))
            except LuceError as error:
                _log.warning("a checkpoint could not be saved: %s", error)
                return None
            state.accept_applied()
        ids = sequence.prefix_ids[: sequence.computed]
        tail = None if self._speculator is None else self._speculator.feature_tail(sequence.slot, sequence.computed)
        after = self._newest.get(sequence)
        checkpoint = self._cache.save(sequence.slot, ids, logits, tail, interim=interim, after=after, extras=extras)
        if checkpoint is not None:
            self._newest[sequence] = checkpoint
        return checkpoint
