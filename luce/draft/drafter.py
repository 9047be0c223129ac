"""The interface between the engine and a drafter, which proposes the next tokens. A wrong proposal costs time, never a
token.

The engine calls a drafter from its own thread: `observe` when it has queued a step, `propose` before a step with rows
to spare. It waits for the proposals later, after the host's other work between two steps. An exception from any of
these calls ends drafting for the sequences that run, and the engine asks the drafter again for later sequences; after a
DrafterUnavailableError it asks again for the running ones too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from luce.errors import LuceError
from luce.runtime.draws import Draw
from luce.runtime.step import Int32, Span


class DrafterUnavailableError(LuceError):
    """The drafter does not answer now: sequences go on without it, and the engine may ask it again."""


@dataclass(frozen=True)
class Draftable:
    """A sequence that can take a proposal."""

    #: as in Span; after the next `forget` the slot belongs to another sequence
    slot: int
    #: int32 [committed + 1], read-only: the tokens in the target's cache at positions 0.., and behind them the seed,
    #: which is chosen but not computed yet
    tokens: Int32
    #: most tokens wanted behind the seed, > 0
    max_tokens: int
    #: > 0: the proposal may be a tree of up to this many tokens one behind another
    max_depth: int = 0
    #: whose text it is: what one session says is not looked up for another
    session: str = ""
    #: how the target's tokens are drawn; None: it takes the likeliest ones
    draw: Draw | None = None


@dataclass(frozen=True)
class Proposal:
    """The tokens proposed behind the seed; empty if the drafter has none.

    The likeliest texts come first, so that any number of the first tokens is a tree.
    """

    tokens: Sequence[int] = ()
    #: the drafter's probability of each token, given that the tokens before it are right, and, where the target draws,
    #: in the distribution that the drafter drew it from: one for each token, or empty if the drafter computes none.
    #: NaN, from a draft whose logits are NaN, becomes 0
    probabilities: Sequence[float] = ()
    #: of a tree: the index of the earlier token that each token follows, or -1 for the seed; tokens with one parent
    #: differ. Empty: each token follows the one before it
    parents: Sequence[int] = ()
    #: of tokens that repeat an earlier text: how many tokens before each are known to stand before its source too; 0
    #: for the others. One for each token, or empty if none repeats one
    copied: Sequence[int] = ()

    def __post_init__(self) -> None:
        if any(map(math.isnan, self.probabilities)):
            numbers = [0.0 if math.isnan(probability) else probability for probability in self.probabilities]
            object.__setattr__(self, "probabilities", numbers)


#: Waits for proposals that have begun. Called once, before the next proposals begin. Raises the errors of `propose`.
PendingProposals = Callable[[], Sequence[Proposal]]


class Drafter(Protocol):
    """Proposes tokens for several sequences at once."""

    @property
    def block(self) -> int:
        """Most tokens of one proposal, > 0."""

    def observe(self, spans: Sequence[Span]) -> None:
        """These rows are in the target's cache: computed, or restored from a checkpoint. For a drafter that reads the
        target's features, they are also in its ring (luce.layers.features).

        The device may still compute them; work that the drafter queues there now runs afterwards. The rows of a
        speculative span may be run again with other tokens; the tokens of the next `propose` say which rows are
        committed. A span at a position below an earlier one rewinds the sequence. A tree
        comes as one speculative span of all its rows, with the `ancestors` of its last branch.
        """

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        """Begin one proposal for each sequence."""

    def forget(self, slot: int) -> None:
        """The sequence in a slot has ended."""

    def idle(self) -> None:
        """No sequence runs or waits: the drafter may free memory that it can allocate again."""

    def describe(self) -> dict[str, str | int]:
        """Facts for people: the kind of drafter, its files, devices and limits. Any thread may call it."""

    def close(self) -> None:
        """Release everything. Idempotent."""
