"""luce/engine/events.py."""

from __future__ import annotations

from luce.engine.events import DraftCounts
from luce.engine.sequence import Draft


def test_draft_tokens_are_counted_by_where_they_come_from() -> None:
    counts = DraftCounts()
    # Two forced tokens and two of a drafter: the first three are in the reply.
    counts = counts.plus(Draft((5, 6, 7, 8), forced=2), (1, 2, 3))
    assert counts == DraftCounts(drafted=4, accepted=3, forced_drafted=2, forced_accepted=2, grammar_forced=2)
    # A forced token that the model would have written otherwise.
    counts = counts.plus(Draft((5, 6), forced=2), (1,))
    assert counts == DraftCounts(drafted=6, accepted=4, forced_drafted=4, forced_accepted=3, grammar_forced=3)
    # The end of a reasoning.
    counts = counts.plus(Draft((5,), forced=1, ends_reasoning=True), (1,))
    assert counts == DraftCounts(drafted=7, accepted=5, forced_drafted=5, forced_accepted=4, grammar_forced=3)
    # A tree of a drafter, of which the second branch is right.
    counts = counts.plus(Draft((5, 6, 7), (0, 0, 2)), (2, 3))
    assert counts == DraftCounts(drafted=10, accepted=7, forced_drafted=5, forced_accepted=4, grammar_forced=3)
