"""Stretched sequences: those beyond the original context of a model with LongRoPE (luce.models.spec.LongContext).

All of their rows are rotated by the long context's frequencies, also the first ones. A sequence's own length decides,
as in transformers: a prompt beyond the original context is stretched from its first row on, and a reply that leaves it
is read again. Their rows have other position ids (luce.runtime.step.STRETCHED), by which the prefix cache tells them
from others: pages of one kind are never used for the other.
"""

from __future__ import annotations

import logging

from luce import log
from luce.engine.commit import Committer
from luce.engine.delivery import Delivery
from luce.engine.parts import EngineParts
from luce.engine.sequence import Sequence

_log = logging.getLogger(__name__)


class Stretching:
    """Stretches the sequences of an engine. `original`: most positions of one that is not stretched; None: none is."""

    def __init__(self, original: int | None, parts: EngineParts, delivery: Delivery, committer: Committer) -> None:
        self._original = original
        self._parts = parts
        self._delivery = delivery
        self._committer = committer

    def begin(self, sequence: Sequence) -> None:
        """Decide for a new sequence. Any thread may call it."""
        if self._original is None:
            return
        tokens = len(sequence.prompt)
        gap = 0 if sequence.position_ids is None else int(sequence.position_ids[-1]) - (tokens - 1)
        sequence.original_rows = self._original - gap
        # Which pages of a long sequence are on the devices depends on all steps so far: it is not read again. Its last
        # token needs no row.
        rows = tokens if self._parts.paging is None else tokens + max(0, sequence.max_new_tokens - 1)
        sequence.stretched = rows > sequence.original_rows

    def stretch(self) -> None:
        """Let those be read again whose next row is beyond the original context. On the engine's thread."""
        if self._original is None:
            return
        for reply in self._delivery.of(s for s in self._parts.scheduler.running if s.rows_before_stretching == 0):
            with self._delivery.bookkeeping(reply):
                sequence = reply.sequence
                sequence.stretched, sequence.schedule.chunked = True, sequence.computed
                self._parts.restart(sequence)
                log.event(_log, "reply read again beyond the original context", tokens=sequence.read_end)
                self._committer.resume_restarted(reply)
