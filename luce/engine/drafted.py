"""What the speculator knows of drafts: of each sequence, and since the start."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.draft.prompt_lookup import Copy
from luce.engine.draft_budget import AcceptanceRates
from luce.engine.draft_tree import in_row_order, part_of, with_branch, with_copy
from luce.engine.sequence import Draft, DraftState, Sequence
from luce.runtime.step import Int32

# A sequence whose drafts cost more than they gain is not drafted for in the next steps: the first number of them at
# first, doubled each time up to the second.
_MIN_PAUSE, _MAX_PAUSE = 4, 64
# A step adds no more tokens to a reply.
_MOST_ROWS = 16


@dataclass
class DraftStats:
    """Counters since the start, and the drafter's state."""

    #: facts of the drafter: which one, its files, devices and limits
    facts: dict[str, str | int] = field(default_factory=dict)
    #: "on", or why sequences are not drafted for
    state: str = ""
    #: verifications of a sequence
    steps: int = 0
    #: draft rows that were verified
    proposed: int = 0
    #: draft rows that were accepted
    accepted: int = 0
    #: seconds that the proposals took
    seconds: float = 0.0
    #: draft tokens that grammars refused, so that no row verified them
    refused: int = 0
    #: of the accepted ones, those that repeat an earlier text
    copied: int = 0
    #: rows that grammars forced, and those that were accepted
    forced: int = 0
    forced_accepted: int = 0
    #: number of sequences that run, by state
    states: Mapping[DraftState, int] = field(default_factory=dict)

    @property
    def on(self) -> bool:
        """Whether sequences are drafted for."""
        return self.state == "on"

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the verified draft rows."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a verification."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    def verified(self, draft: Draft, accepted: Many[int], copied: int) -> None:
        """These rows of a draft were accepted, of which so many repeat an earlier text."""
        self.steps += 1
        self.proposed += len(draft.tokens)
        self.accepted += len(accepted)
        self.copied += copied
        if not draft.ends_reasoning:
            self.forced += draft.forced
            self.forced_accepted += sum(row <= draft.forced for row in accepted)


@dataclass(frozen=True)
class SequenceDrafts:
    """What drafting did for one sequence so far."""

    state: DraftState
    #: verifications, the draft rows in them, and those that were accepted
    steps: int
    proposed: int
    accepted: int


@dataclass
class DraftedSequence:
    """What the speculator knows of a sequence."""

    rates: AcceptanceRates
    #: prompt and reply, in memory that grows by doubling; `length` tokens are in use
    text: Int32
    length: int = 0
    #: what comes before the newest proposal, whatever the model would choose
    forced: tuple[int, ...] = ()
    #: whether that ends the reasoning; otherwise a grammar forces it
    ends_reasoning: bool = False
    #: the newest proposal
    proposal: Proposal = field(default_factory=Proposal)
    #: all that the drafter proposed last, if it was asked, and nothing was learned from that yet
    offered: Proposal | None = None
    #: length of the reply before what was offered
    offered_at: int = 0
    #: tokens of it that are verified
    rows: int = 0
    #: whether the drafter failed while the sequence ran
    off: bool = False
    #: its verifications, the draft rows in them, and those that were accepted
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    #: the continuation of an earlier text, found before the newest proposal
    copy: Copy | None = None
    #: whether tokens of it were accepted in the last verification
    copying: bool = False
    #: the mean over recent proposals of the probability that row 1, 2, ... is accepted; None before the first one
    forecast: list[float] | None = None
    #: proposals that it was learned from
    learned: int = 0
    #: whether drafting pays by the forecast
    pays: bool = False
    #: length of prompt and reply now, and when the drafter was asked last
    now: int = 0
    read: int = 0
    #: whether the drafter was asked since that was judged last
    asked: bool = False
    #: length of the last pause, and steps of it that are still to come
    pause: int = 0
    pause_steps: int = 0

    def judge(self, *, pays: bool) -> None:
        """Note whether drafting pays. Where it does not, a pause begins: a longer one if the drafter was asked behind
        the last one."""
        self.pays = pays
        if pays:
            self.pause = self.pause_steps = 0
        elif self.asked or not self.pause:
            self.pause = self.pause_steps = min(max(2 * self.pause, _MIN_PAUSE), _MAX_PAUSE)
        self.asked = False

    @property
    def owed(self) -> int:
        """Tokens that the drafter has to read behind a rest or a prompt; 0 if there was neither."""
        rows = self.now - self.read
        return rows if rows > _MOST_ROWS else 0

    def reads(self) -> int:
        """Note that the drafter is asked; returns what is `owed`."""
        owed, self.read = self.owed, self.now
        return owed

    def waited(self) -> bool:
        """Whether no pause is left; counts this step of it."""
        self.pause_steps = max(0, self.pause_steps - 1)
        return not self.pause_steps

    def joined(self, proposal: Proposal, most: int, *, tree: bool) -> Proposal:
        """A proposal with the copied text of this step, up to `most` tokens: in trees a branch, in chains its end, or
        in its place if more of it is expected to be accepted."""
        copy = self.copy
        if copy is None:
            return proposal
        if tree:
            merged = with_branch(proposal, copy)
            reach = self.rates.reach(merged)
            # No token is likelier than the one that it follows, which comes first among equals.
            nodes = sorted(range(len(reach)), key=lambda node: -reach[node])[:most]
            return part_of(merged, nodes)
        found = [part_of(one, range(min(most, len(one.tokens)))) for one in with_copy(proposal, copy)]
        first, *second = sorted(found, key=lambda one: -sum(self.rates.probabilities(one)))
        for other in second:
            # Its tokens that are not verified teach nothing: it gets another chance after a while.
            same = next(n for n, (a, b) in enumerate(zip(first.tokens, other.tokens, strict=False)) if a != b)
            self.rates.decay(part_of(other, range(same, len(other.tokens)), same - 1))
        return first

    def draft(self, proposal: Proposal, count: int) -> Draft:
        """What the next step verifies: the first `count` tokens of what is forced and, behind it, of a proposal."""
        self.rows = count
        forced = self.forced[:count]
        rest = count - len(forced)
        parents: tuple[int, ...] = ()
        self.proposal = proposal
        if proposal.parents:
            self.proposal, parents = in_row_order(proposal, rest)
        tokens = (*forced, *self.proposal.tokens[:rest])
        if parents:
            parents = (*range(len(forced)), *(row + len(forced) for row in parents))
        return Draft(tokens, parents, len(forced), self.ends_reasoning)

    def repeats(self, node: int) -> bool:
        """Whether a token of the newest proposal repeats an earlier text."""
        copied = self.proposal.copied
        return bool(len(copied) and copied[node])

    def tokens(self, sequence: Sequence) -> Int32:
        """Prompt and reply: int32 [n], not to be written to."""
        prompt = len(sequence.prompt)
        end = prompt + len(sequence.reply)
        if end > len(self.text):
            self.text = np.concatenate((self.text[: self.length], np.empty(2 * end - self.length, np.int32)))
        if not self.length:
            self.text[:prompt] = sequence.prompt
            self.length = prompt
        self.text[self.length : end] = sequence.reply[self.length - prompt :]
        self.length = end
        return self.text[:end]


@dataclass(frozen=True)
class DraftLimits:
    """How much a speculator may propose and verify."""

    #: ids of draft tokens are below it
    vocab: int
    #: most rows of a step that verifies, of all sequences together
    step_rows: int
    #: most rows of a sequence, the seed's included
    verify_rows: int
    #: rows of each sequence, whatever they gain; 0: the speculator chooses
    width: int = 0
    #: most tokens of the draft trees that the drafter is asked for; None: it is asked for chains
    tree_tokens: int | None = None
    #: most draft rows of a step of trees, whose branches need pages
    tree_rows: int = 15

    def budget(self, plain: int) -> int:
        """Most draft rows of a step beside so many rows of replies; 0 or less: none."""
        rows = self.step_rows - plain
        return rows if self.tree_tokens is None else min(rows, self.tree_rows)


@dataclass(frozen=True)
class DraftText:
    """A sequence that may have drafts in the next step."""

    sequence: Sequence
    #: most draft rows
    most: int
    #: most of them one behind another
    depth: int
    #: what the drafter was asked; None: only forced and copied tokens are verified
    asked: Draftable | None

    def cut_short(self, known: DraftedSequence, block: int) -> bool:
        """Whether the drafter alone proposes, and less than its block, as the reply ends soon."""
        return self.asked is not None and self.depth < block and known.copy is None and not known.forced


@dataclass(frozen=True)
class DraftRequest:
    """Proposals of the next step, some of which the drafter was asked for."""

    texts: tuple[DraftText, ...]
    #: waits for the proposals that the drafter was asked for
    pending: PendingProposals
    #: when it was asked
    started: float
    #: most draft rows of the step
    budget: int
    #: sequences that decode
    plain: int
    #: tokens that the drafter has to read first, behind rests and prompts
    owed: int

    @property
    def asked(self) -> list[Draftable]:
        """What the drafter was asked."""
        return [text.asked for text in self.texts if text.asked is not None]
