"""Scripted drafters, right or wrong by plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.runtime.step import Span
from tests.support.scripted_backend import ScriptedBackend

#: the continuation of a text: (tokens so far, number) -> tokens
Continuation = Callable[[Sequence[int], int], Sequence[int]]


class ScriptedDrafter:
    """Proposes the continuation of a text, with a wrong token wherever `wrong(position)` says so.

    With `probabilities` proposals have probabilities. The drafter asserts that committed positions only grow, unless
    a sequence is forgotten.
    """

    def __init__(
        self,
        continuation: Continuation,
        *,
        vocab: int,
        block: int = 15,
        wrong: Callable[[int], bool] = lambda position: False,
        probabilities: bool = False,
        hook: Callable[[str], None] = lambda call: None,
    ) -> None:
        self.block = block
        self._continuation = continuation
        self._vocab = vocab
        self._wrong = wrong
        self._probabilities = probabilities
        self._hook = hook
        self._known: dict[int, list[int]] = {}
        self.asked = self.idled = 0
        self._drafting = False
        self.forgotten: list[int] = []
        self.seen: list[Span] = []
        self.closed = False

    def observe(self, spans: Sequence[Span]) -> None:
        self._hook("observe")
        self.seen += spans

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        self._hook("propose")
        self.asked += 1
        assert not self._drafting, "proposals began before the last ones were waited for"
        self._drafting = True

        def wait() -> list[Proposal]:
            self._drafting = False
            self._hook("wait")
            return [self.propose_one(one) for one in asked]

        return wait

    def forget(self, slot: int) -> None:
        self.forgotten.append(slot)
        self._known.pop(slot, None)

    def idle(self) -> None:
        self.idled += 1

    def describe(self) -> dict[str, str | int]:
        return {"kind": "scripted"}

    def close(self) -> None:
        self.closed = True

    def propose_one(self, one: Draftable) -> Proposal:
        text = one.tokens.tolist()
        known = self._known.get(one.slot, [])
        assert text[: len(known)] == known and len(text) > len(known), "a text that does not continue the last one"
        self._known[one.slot] = text
        assert one.max_tokens > 0 and 0 < (one.max_depth or one.max_tokens) <= self.block
        right = self._continuation(text, self.block)[: one.max_depth or one.max_tokens]
        tokens = [
            (token + 1) % self._vocab if self._wrong(len(text) + i) else int(token) for i, token in enumerate(right)
        ]
        return Proposal(tokens, [0.9] * len(tokens) if self._probabilities else ())


class BranchingDrafter(ScriptedDrafter):
    """Proposes trees in which tokens of the continuation are among the proposals, on any branch."""

    def propose_one(self, one: Draftable) -> Proposal:
        chain = super().propose_one(one).tokens
        random = np.random.default_rng(len(one.tokens))
        tokens: list[int] = []
        parents: list[int] = []
        depths, right = [], {-1}
        for _ in range(8 * one.max_tokens):
            if len(tokens) == one.max_tokens:
                break
            # New nodes hang on late ones more often, so that trees are deep.
            parent = max(-1, len(tokens) - 1 - int(random.geometric(0.4)) + 1) if tokens else -1
            depth = depths[parent] + 1 if parent >= 0 else 0
            if depth >= min(one.max_depth, len(chain)):
                parent, depth = -1, 0
            taken = [token for token, above in zip(tokens, parents, strict=True) if above == parent]
            follows = parent in right and chain[depth] not in taken and random.random() < 0.7
            token = int(chain[depth]) if follows else int(random.integers(self._vocab))
            if token in taken:
                continue
            if parent in right and token == chain[depth]:
                right.add(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return Proposal(tokens, [0.5] * len(tokens) if self._probabilities else (), parents)


def sometimes(share: float, seed: int) -> Callable[[int], bool]:
    """Wrong at some positions, always the same."""
    return lambda position: bool(np.random.default_rng((seed, position)).random() < share)


def always(position: int) -> bool:
    """For a drafter that is wrong at every position."""
    return True


def never(position: int) -> bool:
    """For a drafter that is wrong nowhere."""
    return False


def oracle(backend: ScriptedBackend, wrong: Callable[[int], bool] = never, **options: Any) -> ScriptedDrafter:
    """A drafter that knows the replies of a scripted backend."""
    return ScriptedDrafter(backend.reply, vocab=backend.capacity.vocab, wrong=wrong, **options)
