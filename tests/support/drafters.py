"""Drafters that know the reply, or do not, or break."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from luce.draft.drafter import Draftable, Proposal
from luce.runtime.step import Span

#: what follows a text: (tokens so far, how many) -> tokens
Continuation = Callable[[Sequence[int], int], Sequence[int]]


class ScriptedDrafter:
    """Proposes the continuation of a text, with a wrong token wherever `wrong(position)` says so.

    `chances`: whether it says how sure it is. It checks what it is told: positions that are committed only grow, unless
    a sequence is forgotten.
    """

    def __init__(
        self,
        continuation: Continuation,
        *,
        vocab: int,
        block: int = 15,
        wrong: Callable[[int], bool] = lambda position: False,
        chances: bool = False,
        hook: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.block = block
        self._continuation = continuation
        self._vocab = vocab
        self._wrong = wrong
        self._chances = chances
        self._hook = hook
        self._known: dict[int, list[int]] = {}
        self.asked = self.idled = 0
        self.forgotten: list[int] = []
        self.seen: list[Span] = []
        self.closed = False

    def observe(self, spans: Sequence[Span]) -> None:
        self._hook("observe")
        self.seen += spans

    def propose(self, asked: Sequence[Draftable]) -> list[Proposal]:
        self._hook("propose")
        self.asked += 1
        return [self._propose(one) for one in asked]

    def forget(self, slot: int) -> None:
        self.forgotten.append(slot)
        self._known.pop(slot, None)

    def idle(self) -> None:
        self.idled += 1

    def describe(self) -> dict[str, str | int]:
        return {"kind": "scripted"}

    def close(self) -> None:
        self.closed = True

    def _propose(self, one: Draftable) -> Proposal:
        text = one.tokens.tolist()
        known = self._known.get(one.slot, [])
        assert text[: len(known)] == known and len(text) > len(known), "a text that does not go on"
        self._known[one.slot] = text
        assert 0 < one.most <= self.block
        right = self._continuation(text, self.block)[: one.most]
        tokens = [
            (token + 1) % self._vocab if self._wrong(len(text) + i) else int(token) for i, token in enumerate(right)
        ]
        return Proposal(tokens, [0.9] * len(tokens) if self._chances else ())


def sometimes(share: float, seed: int) -> Callable[[int], bool]:
    """Wrong at some positions, always the same."""
    return lambda position: bool(np.random.default_rng((seed, position)).random() < share)
