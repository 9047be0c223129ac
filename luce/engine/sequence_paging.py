"""Swaps the pages of long sequences before their steps (KVFlash), and limits these steps."""

from __future__ import annotations

from dataclasses import replace

from luce.engine.sequence import PagingLimits, Sequence
from luce.kvcache.paging import QUESTION_ROWS, Pager


def prompt_limits(pager: Pager) -> PagingLimits:
    """The limits of steps that read a prompt of more than `pager.max_positions` tokens."""
    return PagingLimits(prompt_multiple=pager.segment, prompt_bound=pager.max_positions, query_rows=QUESTION_ROWS)


class SequencePaging:
    """Asks the pager for the pages of each sequence."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager

    def prepare(self, sequence: Sequence) -> None:
        """Swap in the pages that matter for the next step of a running sequence. Raises LuceError."""
        pager, slot, computed = self._pager, sequence.slot, sequence.computed
        assert slot is not None
        if (
            sequence.prompt_remaining
            and not sequence.paging.prompt_multiple
            and len(sequence.prompt) > pager.max_positions
        ):
            sequence.paging = prompt_limits(pager)
            pager.begin_prompt(slot, sequence.prompt, computed)
        elif pager.rescore_due(slot, computed):
            pager.rescore(slot, computed, sequence.tokens)
        max_draft = pager.max_draft_rows(slot, computed)
        if max_draft != sequence.paging.max_draft:
            sequence.paging = replace(sequence.paging, max_draft=max_draft)

    def release(self, slot: int) -> None:
        """The sequence in a slot has ended."""
        self._pager.release(slot)
