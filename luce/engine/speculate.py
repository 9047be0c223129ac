"""Speculative decoding: what a drafter proposes is verified, several rows of a sequence in one step.

Row 0 of a verification is the seed, which the target chose itself; row i + 1 holds the i-th proposed token. Each row's
next token is chosen as it would be without a draft, and rows count as long as the token chosen behind one is the token
of the next: so the reply is the one that plain decoding gives, sampled or not, and only its pace depends on guesses.

How many rows are worth it is a matter of measured times and of how often guesses were right: `choose_rows` makes
tokens per second as many as it can. A drafter that costs more than it gains is asked ever more rarely.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from luce.draft.drafter import Draftable, Drafter, DrafterUnavailableError, PendingProposals, Proposal
from luce.draft.feature_tail import FeatureTail, FeatureTails
from luce.engine.draft_budget import Rates, StepSeconds, choose_rows
from luce.engine.draft_tree import in_rows, well_formed, whole
from luce.engine.scheduler import Plan, Sequence, StepShare
from luce.errors import LuceError
from luce.runtime.step import Int32

_log = logging.getLogger(__name__)

_Given = TypeVar("_Given")

# A drafter that fails so often in a row is given up.
_FAILURES = 3
# Weight of the newest outcome in the rates of a sequence, and in those that new sequences begin with.
_NEWEST, _NEWEST_OF_ALL = 0.1, 0.02
# Rows of steps that are chosen between, beside all that could be verified: each number needs kernels and graphs of its
# own, and products take up to the next of these at about the same price.
_SIZES = (2, 4, 8, 16)
# Steps without drafting after one that lost more than a trifle: doubled each time, from the first to the last.
_TRIFLE, _SHORTEST_REST, _LONGEST_REST = 0.02, 4, 64


@dataclass(frozen=True)
class DraftStats:
    """Counters since the start. steps: verifications of a sequence; proposed: rows behind their seeds; accepted: of
    these, the rows that counted; seconds: what drafting took. `state`: on, or why not; `facts` of the drafter."""

    facts: dict[str, str | int]
    state: str
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def on(self) -> bool:
        """Whether sequences are drafted for."""
        return self.state == "on"

    @property
    def accept_rate(self) -> float:
        """Share of the proposed rows that counted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a verification."""
        return 1 + self.accepted / self.steps if self.steps else 0.0


@dataclass
class _Drafted:
    """What is known of a sequence: its text for the drafter, its rates, its newest proposal."""

    rates: Rates
    text: Int32
    length: int = 0
    proposal: Proposal = field(default_factory=Proposal)
    #: tokens of it that were verified
    rows: int = 0
    #: whether the drafter failed while it ran
    off: bool = False

    def tokens(self, sequence: Sequence) -> Int32:
        """Prompt and reply, in memory that grows by doubling."""
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
class _Asked:
    """Proposals that were begun at a time: for which texts, how many rows they may have, and of how many sequences."""

    texts: tuple[tuple[Sequence, Draftable], ...]
    begun: PendingProposals
    started: float
    room: int
    plain: int


class Speculator:
    """Asks a drafter, which it closes, for the sequences of an engine; all but `stats` on the engine's thread.

    vocab: proposed ids are below it. rows: most rows of a step that verifies; verify: most of a sequence, the seed's
    included; width: so many of each sequence whatever it gains, 0 to choose; tree: most tokens of a tree that the
    drafter is asked for, None if it is asked for chains; tails: what of the drafter's ring is kept with prefixes.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab: int,
        rows: int,
        verify: int,
        width: int = 0,
        tree: int | None = None,
        tails: FeatureTails | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._vocab = vocab
        self._rows = rows
        self._verify = min(verify, width or verify)
        self._fixed = width > 0
        self._tree = tree
        self._tails = tails
        self._clock = clock
        self._sequences: dict[Sequence, _Drafted] = {}
        self._asked: _Asked | None = None
        self._rates = Rates()
        self._seconds = StepSeconds()
        self._drafting = StepSeconds()
        self._rest = self._resting = 0
        self._failures = 0
        self._trouble = ""
        #: whether the drafter has answered since it failed
        self._answered = False
        self._idle = True
        self._steps = self._proposed = self._accepted = 0
        self._spent = 0.0

    def stats(self) -> DraftStats:
        """Numbers for people. Any thread may ask."""
        given_up, away = self._failures >= _FAILURES, not self._failures
        kind = "given up" if given_up else "away" if away else "failed"
        state = f"{kind}: {self._trouble}" if self._trouble else "on"
        facts = self._drafter.describe()
        return DraftStats(facts, state, self._steps, self._proposed, self._accepted, self._spent)

    def ask(self, running: Many[Sequence]) -> None:
        """Begin proposals for those of the sequences that decode, for the next step. `take` comes before it; until then
        their proposals are of as many tokens as is likely, whatever these are."""
        decoding = [s for s in running if not s.prompt_left]
        for sequence in running:
            sequence.proposal = sequence.parents = ()
            if sequence not in self._sequences:
                self._sequences[sequence] = _Drafted(Rates(self._rates), np.empty(0, np.int32))
                self._rest = self._resting = 0
        room = self._rows - len(decoding)
        if room <= 0 or self._failures >= _FAILURES:
            return
        if not self._fixed and not self._seconds.known(len(decoding)):
            # What steps take without drafting is measured first.
            return
        if self._resting:
            self._resting -= 1
            return
        asked = [one for s in decoding if (one := self._draftable(s, room)) is not None]
        if not asked:
            return
        self._idle = False
        started = self._clock()
        begun = self._attempt(lambda: self._drafter.propose([one for _, one in asked]))
        if begun is not None:
            self._asked = _Asked(tuple(asked), begun, started, room, len(decoding))
            if self._tree is None:
                likely = [
                    one.max_tokens if self._fixed else min(one.max_tokens, self._sequences[s].rows) for s, one in asked
                ]
                for (sequence, _), count in zip(asked, fair_shares(room, likely), strict=True):
                    sequence.proposal = (0,) * count

    @property
    def asking(self) -> bool:
        """Whether proposals were begun that `take` waits for."""
        return self._asked is not None

    def take(self) -> None:
        """Wait for the proposals that were begun, and give the sequences those that pay."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        for sequence, _ in asked.texts:
            sequence.proposal = ()
        proposals = self._attempt(
            lambda: [self._checked(p, one) for p, (_, one) in zip(asked.begun(), asked.texts, strict=True)]
        )
        taken = self._clock() - asked.started
        self._spent += taken
        self._drafting.add(len(asked.texts), taken)
        if proposals is None:
            return
        self._answered = True
        # Some may have ended since.
        left = [(s, p) for (s, _), p in zip(asked.texts, proposals, strict=True) if s in self._sequences]
        self._share([s for s, _ in left], [p for _, p in left], asked.room, asked.plain)

    def observe(self, plan: Plan) -> None:
        """A step is queued: what it leaves of its rows comes before all that the drafter asks its device for now."""
        spans = whole(plan.step.spans)
        if self._tails is not None:
            self._tails.observe(spans)
        if self._failures < _FAILURES and not all(self._sequences[part.sequence].off for part in plan.parts):
            try:
                self._drafter.observe(spans)
            except Exception as error:
                self._failed(error)
                return
            if self._answered:
                self._failures, self._trouble = 0, ""

    def ran(self, plan: Plan, seconds: float) -> None:
        """A step ran, and took so long."""
        if all(part.position >= len(part.sequence.prompt) for part in plan.parts):
            self._seconds.add(plan.step.rows, seconds)

    def tail(self, slot: int, end: int) -> FeatureTail | None:
        """What is to be kept with the first `end` positions of a slot's sequence, all of which are computed."""
        return None if self._tails is None else self._tails.save(slot, end)

    def resumed(self, slot: int, end: int, tail: FeatureTail | None) -> None:
        """A sequence begins behind `end` positions that were kept, with this tail."""
        span = None if self._tails is None or tail is None else self._tails.restore(slot, end, tail)
        if span is None and self._tails is not None:
            _log.debug("drafting begins anew: of %d tokens there is nothing that the draft reads", end)
        if span is not None and self._failures < _FAILURES:
            spans = [span]
            self._tell(lambda: self._drafter.observe(spans))

    def verified(self, sequence: Sequence, part: StepShare, right: Many[int], *, over: bool) -> None:
        """Of a part's proposal the tokens of these rows are in the reply; `over`: the reply ends there."""
        self._steps += 1
        self._proposed += len(part.proposal)
        self._accepted += len(right)
        known = self._sequences[sequence]
        parents = part.parents or range(len(part.proposal))
        # Nobody knows what would have followed the reply's end.
        looked_at = [0, *right][:-1] if over else [0, *right]
        outcomes = [(row - 1, row in right) for row, parent in enumerate(parents, 1) if parent in looked_at]
        known.rates.learn(known.proposal, outcomes, _NEWEST)
        self._rates.learn(known.proposal, outcomes, _NEWEST_OF_ALL)

    def ended(self, sequence: Sequence) -> None:
        """A sequence that had a slot has ended."""
        self._sequences.pop(sequence, None)
        slot = sequence.slot
        if slot is not None:
            if self._tails is not None:
                self._tails.forget(slot)
            self._tell(lambda: self._drafter.forget(slot))

    def idle(self) -> None:
        """Nothing runs or waits."""
        if not self._idle:
            self._idle = True
            self._tell(self._drafter.idle)

    def close(self) -> None:
        """Idempotent."""
        self._tell(self._drafter.close)

    def _tell(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except DrafterUnavailableError as error:
            self._away(error)
        except Exception as error:
            self._failed(error)

    def _draftable(self, sequence: Sequence, room: int) -> tuple[Sequence, Draftable] | None:
        """A sequence with the rows that could be verified behind its seed, if there are any."""
        known = self._sequences[sequence]
        # Each row gives a token, and the last one needs no row behind it.
        depth = min(self._drafter.block, sequence.room - len(sequence.reply) - 1)
        if sequence.ahead is not None:
            # Behind the last of these rows pages may be ranked by its query, and a tree's rows at one position
            # overwrite each other's (luce.ops.page_ranking).
            depth = min(depth, sequence.ahead - (self._tree is not None))
        most = min(depth if self._tree is None else self._tree, self._verify - 1, room)
        if known.off or min(depth, most) <= 0:
            return None
        tokens = known.tokens(sequence)
        return sequence, Draftable(sequence.slot or 0, tokens, most, 0 if self._tree is None else depth)

    def _attempt(self, ask: Callable[[], _Given]) -> _Given | None:
        """What the drafter gives, None if it fails."""
        try:
            return ask()
        except DrafterUnavailableError as error:
            self._away(error)
        except Exception as error:
            self._failed(error)
        return None

    def _checked(self, proposal: Proposal, asked: Draftable) -> Proposal:
        """What there is of a proposal up to the first id that is none."""
        tokens = [int(token) for token in proposal.tokens[: asked.max_tokens]]
        count = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab), len(tokens))
        chances = proposal.probabilities[:count] if len(proposal.probabilities) >= count else ()
        parents = tuple(proposal.parents[:count])
        if parents and not well_formed(parents, tokens, asked.max_depth):
            raise ValueError(f"tokens {tokens} behind {list(parents)} are no tree of depth {asked.max_depth}")
        return Proposal(tokens[:count], chances, parents)

    def _share(self, asked: Many[Sequence], proposals: Many[Proposal], room: int, plain: int) -> None:
        """Choose the rows to verify."""
        if self._fixed:
            counts = fair_shares(room, [len(proposal.tokens) for proposal in proposals])
        else:
            reaches = [self._sequences[s].rates.reaches(p) for s, p in zip(asked, proposals, strict=True)]
            drafting = self._drafting(len(asked))
            counts, gain = choose_rows(reaches, room, plain, self._seconds, drafting, _SIZES)
            self._rest = 0 if gain > 1 - _TRIFLE else min(max(2 * self._rest, _SHORTEST_REST), _LONGEST_REST)
            self._resting = self._rest
        for sequence, proposal, count in zip(asked, proposals, counts, strict=True):
            known = self._sequences[sequence]
            known.rows = count
            if not count:
                known.rates.forget(proposal)
            known.proposal, sequence.parents = in_rows(proposal, count) if proposal.parents else (proposal, ())
            sequence.proposal = tuple(known.proposal.tokens[:count])

    def _away(self, error: DrafterUnavailableError) -> None:
        """The next step asks again."""
        if not self._trouble:
            _log.warning("replies go on without drafting: %s", error)
        self._trouble = str(error)
        self._answered = False

    def _failed(self, error: Exception) -> None:
        """The sequences that run go on without drafting."""
        self._failures += 1
        self._answered = False
        self._trouble = str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}"
        rest = "no more drafting" if self._failures >= _FAILURES else "replies that run go on without drafting"
        _log.warning("the drafter failed: %s; %s", self._trouble, rest, exc_info=not isinstance(error, LuceError))
        for sequence, known in self._sequences.items():
            known.off = True
            sequence.proposal = sequence.parents = ()


def fair_shares(budget: int, demands: Many[int]) -> list[int]:
    """Split `budget` rows so that the smallest share is as large as it can be; none exceeds its demand.

    Demands that are equal differ by at most one row, the earlier ones getting more.
    """
    shares = [0] * len(demands)
    left = budget
    for place, index in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        shares[index] = min(demands[index], -(-left // (len(demands) - place)))
        left -= shares[index]
    return shares
