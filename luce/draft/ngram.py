"""Prompt lookup alone, as the drafter of `--draft ngram`: it needs no file and no memory of a device."""

from __future__ import annotations

from collections.abc import Sequence

from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.draft.prompt_lookup import LONGEST, SHORTEST, Lookup
from luce.runtime.step import Span


class NgramDrafter:
    """Proposes up to `block` tokens that followed the longest known suffix of `longest` .. `shortest` tokens."""

    def __init__(self, *, block: int, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.block = block
        self._lookup = Lookup(longest=longest, shortest=shortest)

    def observe(self, spans: Sequence[Span]) -> None:
        pass

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        return lambda: [self.propose_one(one) for one in asked]

    def forget(self, slot: int) -> None:
        self._lookup.forget(slot)

    def idle(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        own = self._lookup
        return {"kind": "ngram", "block": self.block, "longest": own.longest, "shortest": own.shortest}

    def close(self) -> None:
        pass

    def propose_one(self, one: Draftable) -> Proposal:
        """The proposal for one text; empty where its end does not occur before."""
        copy = self._lookup.find(one.slot, one.session, one.tokens, min(one.max_tokens, self.block))
        return Proposal() if copy is None else Proposal(copy.tokens, copied=copy.lengths)
