"""Speculative decoding: a step verifies several draft tokens of a sequence at once.

Row 0 of a verification is the seed: the reply's last token, which the target chose itself. Row i + 1 holds draft token
i. Each row's next token is chosen as it would be without a draft. A draft row is accepted if its token is the one that
was chosen after its parent row. So the reply is the one that plain decoding gives, sampled or not; drafts change only
its pace.

Where a constraint holds, tokens that its grammar forces come before the drafter's proposal, and without one; tokens
that the grammar refuses are taken out before anything is verified. Tokens that end the reasoning come without one. All
this changes the pace only: forced tokens are verified too, as the model may write the same text in other tokens.

Measured step times and acceptance rates decide how many draft rows pay, and for whom (luce.engine.draft_pace).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from luce.backend.backend import Backend
from luce.draft.drafter import Draftable, Drafter, DrafterUnavailableError, PendingProposals, Proposal
from luce.draft.feature_tail import FeatureTail, FeatureTails
from luce.draft.prompt_lookup import Lookup
from luce.engine.draft_budget import AcceptanceRates, choose_draft_rows, fair_shares
from luce.engine.draft_costs import CostTable
from luce.engine.draft_pace import Pace
from luce.engine.draft_times import StepIntervals
from luce.engine.draft_tree import behind, checked, compared, merge_branches, part_of, refused_tokens
from luce.engine.draft_turns import DraftTurns, Turn
from luce.engine.drafted import (
    DraftedSequence,
    DraftLimits,
    DraftRequest,
    DraftStats,
    DraftText,
    SequenceDrafts,
)
from luce.engine.drafter_health import DrafterHealth
from luce.engine.failures import FailureBoundary, Failures
from luce.engine.scheduler import ScheduledSequence, ScheduledStep
from luce.engine.sequence import Draft, DraftState, Sequence

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# Weight of the newest outcome in the acceptance rates of a sequence, and in those that new sequences begin with.
_SEQUENCE_WEIGHT, _GLOBAL_WEIGHT = 0.1, 0.02
_NO_DRAFT = Draft()


class Speculator:
    """Asks a drafter for the sequences of an engine, and closes it. All but `stats` on the engine's thread.

    feature_tails  the part of the drafter's feature ring that is saved with checkpoints
    on_verified    as Engine's
    lookup         finds texts that repeat, which are verified with the drafter's proposals; None: only these are
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: DraftLimits,
        *,
        feature_tails: FeatureTails | None = None,
        on_verified: Callable[[int, int], None] | None = None,
        lookup: Lookup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self._limits = limits
        self._max_verify_rows = min(limits.verify_rows, limits.width or limits.verify_rows)
        self._fixed = limits.width > 0
        self._feature_tails = feature_tails
        self._on_verified = on_verified
        self._lookup = lookup
        self._clock = clock
        self._sequences: dict[Sequence, DraftedSequence] = {}
        self._request: DraftRequest | None = None
        self._rates = AcceptanceRates()
        # Rows of steps to choose between, beside all rows that could be verified: each number of rows needs kernels and
        # graphs of its own, and products take up to the next of these numbers at about the same price.
        self.pace = Pace([1 << power for power in range(1, limits.step_rows.bit_length())])
        #: seconds that are booked for the newest proposals; None if no drafter was asked
        self._drafting: float | None = None
        self._intervals = StepIntervals()
        self._health = DrafterHealth()
        self._idle = True
        self._counts = DraftStats()
        self._turns = DraftTurns(self.pace, lookup, fixed=self._fixed)

    def stats(self) -> DraftStats:
        """Counters and state. Any thread may ask."""
        states = Counter(s.draft_state for s in list(self._sequences) if s.draft_state is not None)
        return replace(self._counts, facts=self.drafter.describe(), state=self._health.state(), states=states)

    def drafts(self, sequence: Sequence) -> SequenceDrafts | None:
        """What drafting did for a sequence that runs; None without a drafter. Any thread may ask."""
        known, state = self._sequences.get(sequence), sequence.draft_state
        if known is None or state is None:
            return None
        return SequenceDrafts(state, known.steps, known.proposed, known.accepted)

    def forced(self) -> tuple[int, int]:
        """Draft rows that grammars forced, and how many of them were accepted. Any thread may ask."""
        return self._counts.forced, self._counts.forced_accepted

    def propose(self, running: Many[Sequence]) -> Failures:
        """Begin proposals for the next step, for those of the sequences that decode. `receive` waits for them.

        Until then their drafts have as many tokens as is likely, and these tokens mean nothing. Returns the sequences
        whose own bookkeeping failed; a drafter that fails costs drafts only.
        """
        failures, started = Failures(), self._clock()
        decoding, turns = running, self._turns.planned(running)
        if turns is None:
            decoding, turns = self._decide(running, failures)
        if not turns:
            return failures
        budget, texts = self._limits.budget(len(decoding)), list[DraftText]()
        for sequence, turn in zip(decoding, turns, strict=True):
            if turn.asks or turn.looks or sequence.ending or sequence.constraint is not None:
                with failures.of(sequence):
                    texts += self._text(sequence, budget, asks=turn.asks)
        asked = [text.asked for text in texts if text.asked is not None]
        pending: PendingProposals | None = list
        if asked:
            self._idle = False
            pending = self._attempt(lambda: self.drafter.propose(asked))
        # What repeats is looked up while the drafter's device works.
        found = []
        for text in texts:
            with failures.of(text.sequence):
                if self._copies(text) or text.asked is not None or self._forced_tokens(text.sequence, text.most):
                    # What the last step verified is recorded after this, so that forced tokens are not noted yet.
                    found.append(text)
        if pending is not None and found:
            self._idle = False
            owed = sum(self._sequences[text.sequence].reads() for text in found if text.asked is not None)
            self._request = DraftRequest(tuple(found), pending, started, budget, len(decoding), owed)
            if self._limits.tree_tokens is None:
                self._estimate_lengths(found, budget)
        return failures

    @property
    def drafts_nothing(self) -> bool:
        """Whether nothing is drafted or looked up for the next step, if it has the sequences of the newest one."""
        return self._turns.drafts_nothing

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
        for text in request.texts:
            text.sequence.draft = Draft()
        asked = request.asked
        proposals = self._attempt(
            lambda: [checked(p, one, self._limits.vocab) for p, one in zip(request.pending(), asked, strict=True)]
        )
        if proposals is not None and asked:
            self._health.note_answer()
        answers = iter(proposals or ())
        alive = []
        for text in request.texts:
            if text.asked is not None and proposals is None:
                continue
            proposal = Proposal() if text.asked is None else next(answers)
            # Some sequences may have ended since.
            if text.sequence in self._sequences:
                with failures.of(text.sequence):
                    known = self._sequences[text.sequence]
                    joined = known.joined(proposal, text.most, tree=self._limits.tree_tokens is not None)
                    alive.append((text, self._behind_forced(text.sequence, joined, text.most)))
        seconds, pace = self._clock() - request.started, self.pace
        self._intervals.drafting += seconds
        if asked:
            self._counts.seconds += seconds
            usual, self._drafting = pace.record_drafting(len(asked), request.owed, seconds)
        else:
            pace.forced_times.add(len(request.texts), seconds)
            usual = pace.forced_times(len(request.texts))
        if alive:
            self._choose(alive, request, usual, failures)
        return failures

    def observe(self, scheduled: ScheduledStep) -> None:
        """A step is queued: its features are written before anything that the drafter asks its device for now."""
        if not self.drafter.block:
            return
        try:
            spans = merge_branches(scheduled.step.spans)
            if self._feature_tails is not None:
                self._feature_tails.observe(spans)
            if self._health.disabled or all(self._sequences[s.sequence].off for s in scheduled.sequences):
                return
            self.drafter.observe(spans)
        except Exception as error:
            self._note_failure(error)
            return
        self._health.note_step()

    def prepare(self, scheduled: ScheduledStep) -> None:
        """Choose for whom to draft in the step behind this one, while the devices work: if each reply gets one token,
        and nothing is left to learn from."""
        decoding = [one.sequence for one in scheduled.sequences if one.rows == 1 and not one.sequence.unread]
        if len(decoding) < len(scheduled.sequences) or any(self._sequences[s].offered for s in decoding):
            return
        # What fails for one sequence fails again between the steps, for that one alone.
        with FailureBoundary(lambda error: _log.debug("no drafts were planned", exc_info=error)):
            turns = self._turns_of(decoding)
            for sequence in [one for one, turn in zip(decoding, turns, strict=False) if not turn.asks]:
                self._rest(sequence)
            if turns or self._limits.budget(len(decoding)) <= 0:
                self._turns.plan(decoding, [self._sequences[sequence] for sequence in decoding], turns)

    def record_step(self, scheduled: ScheduledStep, seconds: float) -> None:
        """Record what a step took the devices."""
        seconds = self._intervals.end(tuple(one.sequence for one in scheduled.sequences), self._clock(), seconds)
        counts = [one.rows for one in scheduled.sequences if one.position >= one.sequence.read_end]
        if len(counts) == len(scheduled.sequences):
            pending = any(span.speculative or span.accepted for span in scheduled.step.spans)
            self.pace.record_step(sum(counts), len(counts), max(counts), seconds, self._drafting, pending=pending)
        else:
            self.pace.record_beside_prompts(sum(counts), len(counts), self._drafting)
        self._drafting = None

    def measure_costs(self, backend: Backend, seconds: float) -> None:
        """Measure what steps and proposals take, for so long at most, while no sequence runs and no page is in use."""
        if self._drafts and not self._fixed:
            self._idle, limits = False, (self._limits.step_rows, self._max_verify_rows)
            CostTable(backend, self.drafter, self.pace, *limits, self._clock).measure(seconds)

    def limit_rows(self, rows: int) -> None:
        """The backend has moved: steps that verify have so many rows at most."""
        self._limits = replace(self._limits, step_rows=rows)

    def feature_tail(self, slot: int, end: int) -> FeatureTail | None:
        """The features to save with the first `end` positions of a slot's sequence, all of which are computed."""
        return None if self._feature_tails is None else self._feature_tails.save(slot, end)

    def resume(self, slot: int, end: int, tail: FeatureTail | None) -> None:
        """A sequence begins with `end` restored positions and this feature tail."""
        span = None if self._feature_tails is None or tail is None else self._feature_tails.restore(slot, end, tail)
        if span is None and self._feature_tails is not None:
            _log.debug("the checkpoint of %d tokens has no features for the draft: drafting begins anew", end)
        if span is not None and not self._health.disabled:
            self._notify(partial(self.drafter.observe, [span]))

    def record_verification(
        self, sequence: Sequence, scheduled: ScheduledSequence, accepted: Many[int], *, ended: bool
    ) -> None:
        """Record that these draft rows were accepted. `ended`: the reply ends there."""
        draft = scheduled.draft
        known, forced = self._sequences[sequence], draft.forced
        known.steps += 1
        known.proposed += len(draft.tokens)
        known.accepted += len(accepted)
        self.pace.record_accepted(len(accepted))
        if self._on_verified is not None and not forced:
            self._on_verified(len(draft.tokens), len(accepted))
        parents = draft.parents or range(len(draft.tokens))
        # Where the reply ends, no token was chosen that the children of the last row could be compared with.
        compared = [0, *accepted][:-1] if ended else [0, *accepted]
        copied = sum(known.repeats(row - forced - 1) for row in accepted if row > forced)
        self._counts.verified(draft, accepted, copied)
        known.copying = copied > 0
        rows = [(row, parent) for row, parent in enumerate(parents, 1) if row > forced]
        outcomes = [(row - forced - 1, row in accepted) for row, parent in rows if parent in compared]
        self._learn(known, known.proposal, outcomes)

    def forget(self, sequence: Sequence) -> None:
        """A sequence that had a slot has ended, or is read again."""
        self._sequences.pop(sequence, None)
        self._turns.drop_plan()
        slot = sequence.slot
        if slot is not None:
            if self._feature_tails is not None:
                self._feature_tails.forget(slot)
            if self._lookup is not None:
                self._lookup.forget(slot)
            self._notify(lambda: self.drafter.forget(slot))

    def idle(self) -> None:
        """No sequence runs or waits."""
        if not self._idle:
            self._idle = True
            self._notify(self.drafter.idle)

    def close(self) -> None:
        """Idempotent."""
        self._notify(self.drafter.close)

    def _estimate_lengths(self, texts: Many[DraftText], budget: int) -> None:
        """Give drafts as many tokens as they will probably have, so that the step can be planned meanwhile."""
        likely = []
        for text in texts:
            most = text.most if text.asked is None or self._lookup is not None else text.asked.max_tokens
            likely.append(most if self._fixed else min(most, self._sequences[text.sequence].rows))
        for text, count in zip(texts, fair_shares(budget, likely), strict=True):
            text.sequence.draft = Draft((0,) * count)

    def _notify(self, call: Callable[[], None]) -> None:
        try:
            call()
        except DrafterUnavailableError as error:
            self._health.note_unavailable(error)
        except Exception as error:
            self._note_failure(error)

    @property
    def _drafts(self) -> bool:
        """Whether a drafter is asked at all."""
        return self.drafter.block > 0 and not self._health.disabled

    def _room(self, sequence: Sequence, budget: int) -> int:
        """Most draft tokens of a sequence, one behind another."""
        # Each row gives a token, and the last token needs no row after it.
        rows = min(self._max_verify_rows, sequence.max_new_tokens - len(sequence.reply))
        if sequence.rows_before_stretching is not None:
            rows = min(rows, sequence.rows_before_stretching)
        limit = sequence.paging.max_draft
        return min(rows - 1, budget if limit is None else min(limit, budget))

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
            if wrong := refused_tokens(proposal, allowed):
                self._counts.refused += len(allowed) - sum(allowed)
                known.rates.update(proposal, [(node, False) for node in wrong], _SEQUENCE_WEIGHT)
                self._rates.update(proposal, [(node, False) for node in wrong], _GLOBAL_WEIGHT)
                proposal = part_of(proposal, [node for node, kept in enumerate(allowed) if kept])
        return behind(proposal, known.forced, most - len(known.forced))

    def _decide(self, running: Many[Sequence], failures: Failures) -> tuple[list[Sequence], list[Turn]]:
        """The sequences that decode, and whom to draft for now; nobody while steps without drafts are measured."""
        for sequence in running:
            sequence.draft = _NO_DRAFT
            if sequence not in self._sequences:
                sequence.draft_state = DraftState.PROMPT if self.drafter.block else None
                self._sequences[sequence] = DraftedSequence(AcceptanceRates(self._rates), np.empty(0, np.int32))
        decoding = [s for s in running if not s.unread]
        for sequence in decoding:
            with failures.of(sequence):
                self._compare(sequence, self._sequences[sequence])
                self._rest(sequence)
        failed = {sequence for sequence, _ in failures}
        decoding = [sequence for sequence in decoding if sequence not in failed]
        return decoding, self._turns_of(decoding)

    def _turns_of(self, decoding: Many[Sequence]) -> list[Turn]:
        """The turns of sequences in a step that gives each of them a token at least; none if nothing may be drafted."""
        budget, plain = self._limits.budget(len(decoding)), len(decoding)
        measured = self._fixed or self.pace.step_times.measured(plain, plain)
        if budget > 0 and measured:
            known = [self._sequences[sequence] for sequence in decoding]
            return self._turns.choose(decoding, known, budget, drafts=self._drafts)
        # Steps without drafts are measured first.
        for sequence in decoding if self.drafter.block else ():
            sequence.draft_state = DraftState.FULL if budget <= 0 else DraftState.MEASURING
        return []

    def _compare(self, sequence: Sequence, known: DraftedSequence) -> None:
        """Learn from a proposal of which no token was verified, once the reply has gone on otherwise."""
        offered = known.offered
        if offered is None or known.rows:
            return
        text = sequence.reply[known.offered_at :]
        outcomes = compared(offered, text)
        if sum(right for _, right in outcomes) < len(text):
            self._learn(known, offered, outcomes)

    def _learn(self, known: DraftedSequence, proposal: Proposal, outcomes: Many[tuple[int, bool]]) -> None:
        """Learn from tokens of a sequence's newest proposal, and what it promised by what is known now."""
        known.rates.update(proposal, outcomes, _SEQUENCE_WEIGHT)
        self._rates.update(proposal, outcomes, _GLOBAL_WEIGHT)
        if known.offered is not None:
            self.pace.learn(known, known.rates.probabilities(known.offered))
            known.offered = None

    def _text(self, sequence: Sequence, budget: int, *, asks: bool) -> list[DraftText]:
        """A sequence with the draft rows that could be verified after its seed, if there are any."""
        known, tree = self._sequences[sequence], self._limits.tree_tokens
        known.copy = None
        depth = self._room(sequence, budget)
        if sequence.paging.max_draft is not None and tree is not None:
            # The query of the last of these rows may rank pages, and a tree's rows at one position overwrite each
            # other's queries (luce.ops.page_ranking).
            depth = min(depth, sequence.paging.max_draft - 1)
        most = min(depth if tree is None else tree, self._max_verify_rows - 1, budget)
        if asks:
            sequence.draft_state, known.now = DraftState.DRAFTING, len(sequence.prompt) + len(sequence.reply)
        if not asks or sequence.ending or min(depth, most) <= 0:
            room = self._room(sequence, budget)
            return [DraftText(sequence, room, min(depth, most), None)] if room > 0 else []
        own = min(self.drafter.block, depth)
        draftable = Draftable(
            sequence.slot or 0,
            known.tokens(sequence),
            min(own, most) if tree is None else most,
            0 if tree is None else own,
            sequence.session,
            sequence.draw,
        )
        return [DraftText(sequence, most, depth, draftable)]

    def _rest(self, sequence: Sequence) -> None:
        """Nothing is proposed for a sequence in the next step, as far as is known."""
        known = self._sequences[sequence]
        if self.drafter.block:
            sequence.draft_state = DraftState.FAILED if known.off or self._health.disabled else DraftState.RESTING
        known.copy = None

    def _copies(self, text: DraftText) -> bool:
        """Look up how a text may go on; whether anything is found."""
        sequence, known = text.sequence, self._sequences[text.sequence]
        if self._lookup is None or sequence.ending or known.off or self._health.disabled:
            return False
        depth = min(text.depth, text.most)
        if depth > 0:
            known.copy = self._lookup.find(sequence.slot or 0, sequence.session, known.tokens(sequence), depth)
        return known.copy is not None

    def _attempt(self, call: Callable[[], _Result]) -> _Result | None:
        """What the drafter returns, None if it fails."""
        try:
            return call()
        except DrafterUnavailableError as error:
            self._health.note_unavailable(error)
        except Exception as error:
            self._note_failure(error)
        return None

    def _choose(
        self, proposals: Many[tuple[DraftText, Proposal]], request: DraftRequest, seconds: float, failures: Failures
    ) -> None:
        """Choose the draft rows to verify, of proposals that took so many seconds."""
        if self._fixed:
            demands = [len(self._sequences[t.sequence].forced) + len(proposal.tokens) for t, proposal in proposals]
            counts = fair_shares(request.budget, demands)
        else:
            probabilities, rated = [], []
            for text, proposal in proposals:
                with failures.of(text.sequence):
                    known = self._sequences[text.sequence]
                    sure = [1.0] * len(known.forced)
                    probabilities.append([*sure, *known.rates.probabilities(proposal)])
                    rated.append((text, proposal))
            proposals = rated
            pace = self.pace
            # Blocks cut short by the ends of replies would be steps of any number of rows, each of which is captured.
            block = min(self.drafter.block, self._max_verify_rows - 1)
            whole = not any(text.cut_short(self._sequences[text.sequence], block) for text, _ in rated)
            times = pace.step_times.by_rows(request.plain), seconds, pace.sizes
            counts, _ = choose_draft_rows(probabilities, request.budget, request.plain, *times, whole=whole)
        for (text, proposal), count in zip(proposals, counts, strict=True):
            with failures.of(text.sequence):
                known = self._sequences[text.sequence]
                text.sequence.draft = known.draft(proposal, count)
                # What grammars force, and what repeats, says nothing of the drafter.
                if text.asked is not None and not known.forced and (count or known.offered is None):
                    known.offered, known.offered_at = proposal, len(text.sequence.reply)

    def _note_failure(self, error: Exception) -> None:
        """Let the sequences that run go on without drafts."""
        self._health.note_failure(error)
        for sequence, known in self._sequences.items():
            known.off, sequence.draft_state = True, DraftState.FAILED
            sequence.draft = Draft()
