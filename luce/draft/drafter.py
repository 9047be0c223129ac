"""What the engine needs of a drafter: a guess at the tokens that come next. A wrong guess costs time, never a token.

The engine calls it from its own thread: `observe` when a step is queued, `propose` before one that has rows to spare.
What is proposed is waited for later, when the host has done what else there is to do between two steps. An exception
from any of these ends drafting for the sequences that run, and the drafter is asked again for later ones; but after an
DrafterUnavailableError for these as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from luce.errors import LuceError
from luce.runtime.step import Int32, Span


class DrafterUnavailableError(LuceError):
    """The drafter is not there now: sequences go on without it, and it may be asked again."""


@dataclass(frozen=True)
class Draftable:
    """A sequence that could take a proposal.

    slot    its place, as in Span; another sequence's from the next `forget` on
    tokens  int32 [committed + 1], not to be written to: what the target has in its cache, at positions 0.., and behind
            it the seed, which is chosen but not computed yet
    most    most tokens that are wanted behind the seed, > 0
    depth   if it is more than 0 a tree may be proposed, of up to so many tokens one behind another
    """

    slot: int
    tokens: Int32
    max_tokens: int
    max_depth: int = 0


@dataclass(frozen=True)
class Proposal:
    """The tokens behind the seed, none if there is no guess.

    chances: the drafter's probability of each token, given that those before it are right; as many as tokens, or empty
    if it has none to give. One that is not a number, as of a draft whose logits are none, becomes 0. parents: of each
    token of a tree the one that it follows, an earlier one, or -1 for the seed, no two tokens behind one being the
    same; empty if each follows the one before it. The likeliest texts come first, so that any number of the first
    tokens is a tree.
    """

    tokens: Sequence[int] = ()
    probabilities: Sequence[float] = ()
    parents: Sequence[int] = ()

    def __post_init__(self) -> None:
        if any(map(math.isnan, self.probabilities)):
            numbers = [0.0 if math.isnan(chance) else chance for chance in self.probabilities]
            object.__setattr__(self, "probabilities", numbers)


#: Waits for proposals that were begun; called once, before others are begun. Raises what `propose` raises.
PendingProposals = Callable[[], Sequence[Proposal]]


class Drafter(Protocol):
    """Proposes tokens for several sequences at once."""

    @property
    def block(self) -> int:
        """Most tokens that it proposes at a time, > 0."""

    def observe(self, spans: Sequence[Span]) -> None:
        """These rows are in the target's cache, or came back to it from a snapshot: of a drafter that reads the
        target's features, they are in its ring (luce.layers.features). The device may still be at them: what a drafter
        queues there now comes behind. Rows of a speculative span may be run again with other tokens; what is committed,
        `propose` tells. A span at a position below one that was told before rewinds. `ancestors` of a speculative span,
        which here is no branch: it is a tree.
        """

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        """Begin a proposal for each."""

    def forget(self, slot: int) -> None:
        """The sequence in a slot has ended."""

    def idle(self) -> None:
        """No sequence runs or waits: memory that can be had again may go."""

    def describe(self) -> dict[str, str | int]:
        """Facts for people: which drafter, its files, devices and limits. Any thread may ask."""

    def close(self) -> None:
        """Release everything. Idempotent."""
