"""What an engine without --draft has in place of a drafter: it proposes nothing.

What a grammar forces needs no drafter: the speculator asks the constraints of replies, and puts forced tokens before
what a drafter proposes (luce.engine.speculate).
"""

from __future__ import annotations

from collections.abc import Sequence

from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.runtime.step import Span


class NoDrafter:
    """See luce.draft.drafter.Drafter. It is never asked, as its proposals have no tokens."""

    block = 0

    def observe(self, spans: Sequence[Span]) -> None:
        pass

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        return lambda: [Proposal() for _ in asked]

    def forget(self, slot: int) -> None:
        pass

    def idle(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        return {"kind": "none"}

    def close(self) -> None:
        pass
