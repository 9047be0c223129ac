"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the text's last tokens.

The longest suffix of `longest` down to `shortest` tokens that occurred before decides, at its latest occurrence
(Saxena, "Prompt Lookup Decoding", 2023). Each proposal searches the whole text: 100k tokens take half a millisecond,
and an index of them would take 100 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.runtime.step import Int32, Span


class NgramDrafter:
    """Proposes up to `block` tokens that followed the longest known suffix of `longest` .. `shortest` tokens."""

    def __init__(self, *, block: int, longest: int = 4, shortest: int = 2) -> None:
        self.block = block
        self._longest = longest
        self._shortest = shortest

    def observe(self, spans: Sequence[Span]) -> None:
        pass

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        return lambda: [self.propose_one(one) for one in asked]

    def forget(self, slot: int) -> None:
        pass

    def idle(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        return {"kind": "ngram", "block": self.block, "longest": self._longest, "shortest": self._shortest}

    def close(self) -> None:
        pass

    def propose_one(self, one: Draftable) -> Proposal:
        """The proposal for one text; empty where its end does not occur before."""
        place = _behind(one.tokens, self._longest, self._shortest)
        if place is None:
            return Proposal()
        # An occurrence that overlaps the end of the text is a repetition: it continues with the proposed tokens.
        text = one.tokens[place:].tolist()
        for _ in range(min(one.max_tokens, self.block) - len(text)):
            text.append(text[len(text) - (len(one.tokens) - place)])
        return Proposal(text[: min(one.max_tokens, self.block)])


def _behind(tokens: Int32, longest: int, shortest: int) -> int | None:
    """The place behind the latest earlier occurrence of the longest suffix that has one."""
    end = len(tokens)
    # Places behind occurrences of a suffix that grows; a token follows each.
    places = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    found = None
    for size in range(1, min(longest, end - 1) + 1):
        places = places[places >= size]
        places = places[tokens[places - size] == tokens[end - size]]
        if not len(places):
            break
        if size >= shortest:
            found = int(places[-1])
    return found
