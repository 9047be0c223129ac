"""Speculative decoding: a step verifies several draft tokens of a sequence at once.

Row 0 of a verification is the seed: the reply's last token, which the target chose itself. Row i + 1 holds draft token
i. Each row's next token is chosen as it would be without a draft. A draft row is accepted if its token is the one that
was chosen after its parent row. So the reply is the one that plain decoding gives, sampled or not; drafts change only
its pace.

Where a constraint holds, tokens that its grammar forces come before the drafter's proposal, and without one; tokens
that the grammar refuses are taken out before anything is verified. Tokens that end the reasoning come without one. All
this changes the pace only: forced tokens are verified too, as the model may write the same text in other tokens.

Measured step times and acceptance rates decide how many draft rows pay: `choose_draft_rows` makes tokens per second as
many as it can. A drafter that costs more than it gains is asked ever more rarely.
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
from luce.engine.draft_budget import AcceptanceRates, StepTimes, choose_draft_rows, fair_shares
from luce.engine.draft_tree import behind, in_row_order, merge_branches, part_of, refused_tokens, well_formed
from luce.engine.failures import Failures
from luce.engine.scheduler import ScheduledSequence, ScheduledStep
from luce.engine.sequence import Draft, Sequence
from luce.errors import LuceError
from luce.runtime.step import Int32

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# The drafter is disabled after this many failures in a row.
_MAX_FAILURES = 3
# Weight of the newest outcome in the acceptance rates of a sequence, and in those that new sequences begin with.
_SEQUENCE_WEIGHT, _GLOBAL_WEIGHT = 0.1, 0.02
# Rows of steps to choose between, beside all rows that could be verified: each number of rows needs kernels and graphs
# of its own, and products take up to the next of these numbers at about the same price.
_STEP_SIZES = (2, 4, 8, 16)
# A step that lost more than this share of its time to drafting is followed by steps without drafting: the first number
# of them at first, doubled each time up to the second.
_TOLERATED_LOSS, _MIN_PAUSE, _MAX_PAUSE = 0.02, 4, 64


@dataclass(frozen=True)
class DraftStats:
    """Counters since the start, and the drafter's state."""

    #: facts of the drafter: which one, its files, devices and limits
    facts: dict[str, str | int]
    #: "on", or why sequences are not drafted for
    state: str
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


@dataclass
class _DraftedSequence:
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
    #: tokens of it that are verified
    rows: int = 0
    #: whether the drafter failed while the sequence ran
    off: bool = False

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
class _Request:
    """Proposals that the drafter was asked for."""

    texts: tuple[tuple[Sequence, Draftable], ...]
    #: sequences with forced tokens that the drafter was not asked for, with how many these are
    others: tuple[tuple[Sequence, int], ...]
    pending: PendingProposals
    #: when it was asked
    started: float
    #: most draft rows of the step
    budget: int
    #: sequences that decode
    plain: int


class Speculator:
    """Asks a drafter for the sequences of an engine, and closes it. All but `stats` on the engine's thread.

    vocab            ids of draft tokens are below it
    max_step_rows    most rows of a step that verifies
    max_verify_rows  most rows of a sequence, the seed's included
    verify_width     rows of each sequence, whatever they gain; 0: the speculator chooses
    tree_tokens      most tokens of the draft trees that the drafter is asked for; None: it is asked for chains
    feature_tails    the part of the drafter's feature ring that is saved with checkpoints
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab: int,
        max_step_rows: int,
        max_verify_rows: int,
        verify_width: int = 0,
        tree_tokens: int | None = None,
        feature_tails: FeatureTails | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self._vocab = vocab
        self._max_step_rows = max_step_rows
        self._max_verify_rows = min(max_verify_rows, verify_width or max_verify_rows)
        self._fixed = verify_width > 0
        self._tree_tokens = tree_tokens
        self._feature_tails = feature_tails
        self._clock = clock
        self._sequences: dict[Sequence, _DraftedSequence] = {}
        self._request: _Request | None = None
        self._rates = AcceptanceRates()
        self._step_times = StepTimes()
        self._draft_times = StepTimes()
        #: of proposals that no drafter was asked for
        self._forced_times = StepTimes()
        #: length of the last pause, and steps of it that are still to come
        self._pause = self._pause_steps = 0
        self._failures = 0
        #: why the drafter does not answer; empty while it does
        self._error = ""
        #: whether the drafter has answered since it failed
        self._answered = False
        self._idle = True
        self._steps = self._proposed = self._accepted = self._refused = self._forced = self._forced_accepted = 0
        self._seconds = 0.0

    def stats(self) -> DraftStats:
        """Counters and state. Any thread may ask."""
        disabled, unavailable = self._failures >= _MAX_FAILURES, not self._failures
        kind = "disabled" if disabled else "unavailable" if unavailable else "failed"
        state = f"{kind}: {self._error}" if self._error else "on"
        facts = self.drafter.describe()
        return DraftStats(facts, state, self._steps, self._proposed, self._accepted, self._seconds, self._refused)

    def forced(self) -> tuple[int, int]:
        """Draft rows that grammars forced, and how many of them were accepted. Any thread may ask."""
        return self._forced, self._forced_accepted

    def propose(self, running: Many[Sequence]) -> Failures:
        """Begin proposals for the next step, for those of the sequences that decode. `receive` waits for them.

        Until then their drafts have as many tokens as is likely, and these tokens mean nothing. Returns the sequences
        whose own bookkeeping failed; a drafter that fails costs drafts only.
        """
        failures = Failures()
        decoding = [s for s in running if not s.prompt_remaining]
        for sequence in running:
            sequence.draft = Draft()
            if sequence not in self._sequences:
                self._sequences[sequence] = _DraftedSequence(AcceptanceRates(self._rates), np.empty(0, np.int32))
                self._pause = self._pause_steps = 0
        budget = self._max_step_rows - len(decoding)
        if budget <= 0 or (not self._fixed and not self._step_times.measured(len(decoding))):
            # Steps without drafts are measured first.
            return failures
        texts, others = [], []
        asks, started = self._asks(), self._clock()
        for sequence in decoding:
            with failures.of(sequence):
                text = self._draftable(sequence, budget) if asks and not sequence.ending else None
                if text is not None:
                    texts.append(text)
                elif forced := self._forced_tokens(sequence, budget):
                    # What the last step verified is recorded after this, so that they are not noted yet.
                    others.append((sequence, len(forced)))
        if not texts and not others:
            return failures
        self._idle = False
        pending: PendingProposals | None = list
        if texts:
            pending = self._attempt(lambda: self.drafter.propose([draftable for _, draftable in texts]))
        if pending is not None:
            self._request = _Request(tuple(texts), tuple(others), pending, started, budget, len(decoding))
            if self._tree_tokens is None:
                self._estimate_lengths(texts, budget)
        return failures

    @property
    def pending(self) -> bool:
        """Whether proposals were begun that `receive` waits for."""
        return self._request is not None

    def receive(self) -> Failures:
        """Wait for the proposals that were begun, and give the sequences the drafts that pay. Returns as `propose`."""
        failures = Failures()
        request, self._request = self._request, None
        if request is None:
            return failures
        for sequence, _ in (*request.texts, *request.others):
            sequence.draft = Draft()
        proposals = self._attempt(
            lambda: [self._checked(p, one) for p, (_, one) in zip(request.pending(), request.texts, strict=True)]
        )
        if proposals is not None and request.texts:
            self._answered = True
        asked = [] if proposals is None else zip(request.texts, proposals, strict=True)
        found = [(s, p, one.max_tokens) for (s, one), p in asked]
        found += [(s, Proposal(), count) for s, count in request.others]
        # Some sequences may have ended since.
        alive = []
        for sequence, proposal, most in found:
            if sequence in self._sequences:
                with failures.of(sequence):
                    alive.append((sequence, self._behind_forced(sequence, proposal, most)))
        seconds = self._clock() - request.started
        if request.texts:
            self._seconds += seconds
        times = self._draft_times if request.texts else self._forced_times
        times.add(len(found), seconds)
        if found:
            self._choose(alive, request, times(len(found)), failures)
        return failures

    def observe(self, scheduled: ScheduledStep) -> None:
        """A step is queued: its features are written before anything that the drafter asks its device for now."""
        if not self.drafter.block:
            return
        try:
            spans = merge_branches(scheduled.step.spans)
            if self._feature_tails is not None:
                self._feature_tails.observe(spans)
            if self._failures >= _MAX_FAILURES or all(self._sequences[s.sequence].off for s in scheduled.sequences):
                return
            self.drafter.observe(spans)
        except Exception as error:
            self._note_failure(error)
            return
        if self._answered:
            self._failures, self._error = 0, ""

    def record_step(self, scheduled: ScheduledStep, seconds: float) -> None:
        """Record what a step took."""
        if all(one.position >= len(one.sequence.prompt) for one in scheduled.sequences):
            self._step_times.add(scheduled.step.rows, seconds)

    def feature_tail(self, slot: int, end: int) -> FeatureTail | None:
        """The features to save with the first `end` positions of a slot's sequence, all of which are computed."""
        return None if self._feature_tails is None else self._feature_tails.save(slot, end)

    def resume(self, slot: int, end: int, tail: FeatureTail | None) -> None:
        """A sequence begins with `end` restored positions and this feature tail."""
        span = None if self._feature_tails is None or tail is None else self._feature_tails.restore(slot, end, tail)
        if span is None and self._feature_tails is not None:
            _log.debug("the checkpoint of %d tokens has no features for the draft: drafting begins anew", end)
        if span is not None and self._failures < _MAX_FAILURES:
            spans = [span]
            self._notify(lambda: self.drafter.observe(spans))

    def record_verification(
        self, sequence: Sequence, scheduled: ScheduledSequence, accepted: Many[int], *, ended: bool
    ) -> None:
        """Record that these draft rows were accepted. `ended`: the reply ends there."""
        draft = scheduled.draft
        self._steps += 1
        self._proposed += len(draft.tokens)
        self._accepted += len(accepted)
        known, forced = self._sequences[sequence], draft.forced
        if not draft.ends_reasoning:
            self._forced += forced
            self._forced_accepted += sum(row <= forced for row in accepted)
        parents = draft.parents or range(len(draft.tokens))
        # Where the reply ends, no token was chosen that the children of the last row could be compared with.
        compared = [0, *accepted][:-1] if ended else [0, *accepted]
        rows = [(row, parent) for row, parent in enumerate(parents, 1) if row > forced]
        outcomes = [(row - forced - 1, row in accepted) for row, parent in rows if parent in compared]
        known.rates.update(known.proposal, outcomes, _SEQUENCE_WEIGHT)
        self._rates.update(known.proposal, outcomes, _GLOBAL_WEIGHT)

    def forget(self, sequence: Sequence) -> None:
        """A sequence that had a slot has ended."""
        self._sequences.pop(sequence, None)
        slot = sequence.slot
        if slot is not None:
            if self._feature_tails is not None:
                self._feature_tails.forget(slot)
            self._notify(lambda: self.drafter.forget(slot))

    def idle(self) -> None:
        """No sequence runs or waits."""
        if not self._idle:
            self._idle = True
            self._notify(self.drafter.idle)

    def close(self) -> None:
        """Idempotent."""
        self._notify(self.drafter.close)

    def _estimate_lengths(self, texts: Many[tuple[Sequence, Draftable]], budget: int) -> None:
        """Give drafts as many tokens as they will probably have, so that the step can be planned meanwhile."""
        likely = [one.max_tokens if self._fixed else min(one.max_tokens, self._sequences[s].rows) for s, one in texts]
        for (sequence, _), count in zip(texts, fair_shares(budget, likely), strict=True):
            sequence.draft = Draft((0,) * count)

    def _notify(self, call: Callable[[], None]) -> None:
        try:
            call()
        except DrafterUnavailableError as error:
            self._note_unavailable(error)
        except Exception as error:
            self._note_failure(error)

    def _asks(self) -> bool:
        """Whether the drafter is asked now; counts the steps of a pause."""
        if self._failures >= _MAX_FAILURES or not self.drafter.block:
            return False
        if self._pause_steps:
            self._pause_steps -= 1
            return False
        return True

    def _room(self, sequence: Sequence, budget: int) -> int:
        """Most draft tokens of a sequence, one behind another."""
        # Each row gives a token, and the last token needs no row after it.
        rows = min(self._max_verify_rows, sequence.max_new_tokens - len(sequence.reply)) - 1
        limit = sequence.paging.max_draft
        return min(rows, budget if limit is None else min(limit, budget))

    def _forced_tokens(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that come next whatever the model would choose: those that end the sequence's reasoning,
        or that its grammar forces."""
        constraint, ending = sequence.constraint, sequence.ending
        room = self._room(sequence, most) if ending or constraint is not None else 0
        if room <= 0 or ending or constraint is None:
            return ending[: max(0, room)]
        return tuple(constraint.forced(room, sequence.ends))

    def _behind_forced(self, sequence: Sequence, proposal: Proposal, most: int) -> Proposal:
        """What is left of a proposal behind the tokens that are forced, which are noted, without what the grammar
        refuses."""
        known, constraint = self._sequences[sequence], sequence.constraint
        known.forced, known.ends_reasoning = self._forced_tokens(sequence, most), bool(sequence.ending)
        if known.ends_reasoning:
            return Proposal()
        if constraint is None:
            return proposal
        if proposal.tokens:
            allowed = constraint.valid(proposal.tokens, proposal.parents, sequence.ends)
            wrong = refused_tokens(proposal, allowed)
            if wrong:
                self._refused += len(allowed) - sum(allowed)
                known.rates.update(proposal, [(node, False) for node in wrong], _SEQUENCE_WEIGHT)
                self._rates.update(proposal, [(node, False) for node in wrong], _GLOBAL_WEIGHT)
                proposal = part_of(proposal, [node for node, kept in enumerate(allowed) if kept])
        return behind(proposal, known.forced, most - len(known.forced))

    def _draftable(self, sequence: Sequence, budget: int) -> tuple[Sequence, Draftable] | None:
        """A sequence with the draft rows that could be verified after its seed, None if there are none."""
        known = self._sequences[sequence]
        depth, tree = min(self.drafter.block, self._room(sequence, budget)), self._tree_tokens
        if sequence.paging.max_draft is not None and tree is not None:
            # The query of the last of these rows may rank pages, and a tree's rows at one position overwrite each
            # other's queries (luce.ops.page_ranking).
            depth = min(depth, sequence.paging.max_draft - 1)
        tokens = min(depth if tree is None else tree, self._max_verify_rows - 1, budget)
        if known.off or min(depth, tokens) <= 0:
            return None
        text = known.tokens(sequence)
        return sequence, Draftable(sequence.slot or 0, text, tokens, 0 if tree is None else depth)

    def _attempt(self, call: Callable[[], _Result]) -> _Result | None:
        """What the drafter returns, None if it fails."""
        try:
            return call()
        except DrafterUnavailableError as error:
            self._note_unavailable(error)
        except Exception as error:
            self._note_failure(error)
        return None

    def _checked(self, proposal: Proposal, draftable: Draftable) -> Proposal:
        """A proposal up to its first id outside the vocabulary. Raises ValueError if it is no tree."""
        tokens = [int(token) for token in proposal.tokens[: draftable.max_tokens]]
        count = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab), len(tokens))
        probabilities = proposal.probabilities[:count] if len(proposal.probabilities) >= count else ()
        parents = tuple(proposal.parents[:count])
        if parents and not well_formed(parents, tokens, draftable.max_depth):
            depth = draftable.max_depth
            raise ValueError(f"tokens {tokens} with parents {list(parents)} are no tree of depth {depth}")
        return Proposal(tokens[:count], probabilities, parents)

    def _choose(
        self, proposals: Many[tuple[Sequence, Proposal]], request: _Request, seconds: float, failures: Failures
    ) -> None:
        """Choose the draft rows to verify, of proposals that took so many seconds."""
        budget = request.budget
        if self._fixed:
            demands = [len(self._sequences[s].forced) + len(proposal.tokens) for s, proposal in proposals]
            counts = fair_shares(budget, demands)
        else:
            probabilities, rated = [], []
            for sequence, proposal in proposals:
                with failures.of(sequence):
                    known = self._sequences[sequence]
                    sure = [1.0] * len(known.forced)
                    probabilities.append([*sure, *known.rates.probabilities(proposal)])
                    rated.append((sequence, proposal))
            proposals = rated
            counts, gain = choose_draft_rows(
                probabilities, budget, request.plain, self._step_times, seconds, _STEP_SIZES
            )
            if request.texts:
                # What grammars force is drafted in a pause too, and says nothing of the drafter.
                pause = min(max(2 * self._pause, _MIN_PAUSE), _MAX_PAUSE)
                self._pause = self._pause_steps = 0 if gain > 1 - _TOLERATED_LOSS else pause
        for (sequence, proposal), count in zip(proposals, counts, strict=True):
            with failures.of(sequence):
                known = self._sequences[sequence]
                known.rows = count
                if not count:
                    known.rates.decay(proposal)
                forced = known.forced[:count]
                rest = count - len(forced)
                parents: tuple[int, ...] = ()
                known.proposal = proposal
                if proposal.parents:
                    known.proposal, parents = in_row_order(proposal, rest)
                tokens = (*forced, *known.proposal.tokens[:rest])
                if parents:
                    parents = (*range(len(forced)), *(row + len(forced) for row in parents))
                sequence.draft = Draft(tokens, parents, len(forced), known.ends_reasoning)

    def _note_unavailable(self, error: DrafterUnavailableError) -> None:
        """Go on without drafts; the next step asks the drafter again."""
        if not self._error:
            _log.warning("replies go on without drafting: %s", error)
        self._error = str(error)
        self._answered = False

    def _note_failure(self, error: Exception) -> None:
        """Let the sequences that run go on without drafts."""
        self._failures += 1
        self._answered = False
        self._error = str(error) if isinstance(error, LuceError) else f"{type(error).__name__}: {error}"
        disabled = self._failures >= _MAX_FAILURES
        consequence = "drafting is disabled" if disabled else "replies that run go on without drafting"
        _log.warning("the drafter failed: %s; %s", self._error, consequence, exc_info=not isinstance(error, LuceError))
        for sequence, known in self._sequences.items():
            known.off = True
            sequence.draft = Draft()
