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
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from luce.draft.drafter import AwayError, Draftable, Drafter, Proposal
from luce.draft.tails import Tail, Tails
from luce.engine.scheduler import Plan, Sequence, fair_shares
from luce.errors import LuceError
from luce.runtime.step import Int32

_log = logging.getLogger(__name__)

# A drafter that fails so often in a row is given up.
_FAILURES = 3
# Weight of the newest outcome in the rates of a sequence, and in those that new sequences begin with.
_NEWEST, _NEWEST_OF_ALL = 0.1, 0.02
# What is believed of a guess without a probability, and how fast rates go back to that while nothing is verified.
_PRIOR, _FORGETTING = 0.5, 0.005
_BINS = 10
# Rows of steps that are chosen between, beside all that could be verified: each number needs kernels and graphs of its
# own, and products take up to the next of these at about the same price.
_SIZES = (2, 4, 8, 16)
# Steps of a number of rows that build kernels and capture graphs: their times say nothing about later ones.
_WARMING = 2
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
    def accept_rate(self) -> float:
        """Share of the proposed rows that counted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a verification."""
        return 1 + self.accepted / self.steps if self.steps else 0.0


class StepSeconds:
    """Measured seconds by number of rows; of other numbers by interpolation, 0 while nothing is known."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._seen: Counter[int] = Counter()

    def known(self, rows: int) -> bool:
        """Whether steps of so many rows were measured."""
        return self._seen[rows] > _WARMING

    def add(self, rows: int, seconds: float) -> None:
        """A step took so long. What holds up a single one counts less than what lets it be faster."""
        self._seen[rows] += 1
        if not self.known(rows):
            return
        at = bisect_left(self._rows, rows)
        if at == len(self._rows) or self._rows[at] != rows:
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)
            return
        known = self._seconds[at]
        self._seconds[at] += 0.5 * (seconds - known) if seconds < known else 0.1 * (min(seconds, 2 * known) - known)

    def __call__(self, rows: int) -> float:
        """The nearest measured numbers' beyond the ends, so that what was not tried looks worth trying."""
        return float(np.interp(rows, self._rows, self._seconds)) if self._rows else 0.0


def choose_rows(
    reaches: Many[Many[float]],
    room: int,
    plain: int,
    seconds: Callable[[int], float],
    drafting: float,
    sizes: Container[int],
) -> tuple[list[int], float]:
    """How many proposed rows of each sequence to verify, and how much faster that is than not to draft.

    reaches   per sequence, descending: the chance that row 1, 2, ... counts
    room      most of these rows
    plain     rows of the step without them, each of which gives a token
    seconds   of a step by number of rows
    drafting  seconds that the proposals take
    sizes     of the whole step, beside `plain` and that with all rows there is room for
    """
    rows = sorted(((-reach, index) for index, chances in enumerate(reaches) for reach in chances))[:room]
    counts, best = [0] * len(reaches), 0
    expected, most = float(plain), plain / (drafting + seconds(plain))
    for count, (reach, _) in enumerate(rows, 1):
        expected -= reach
        if count < len(rows) and plain + count not in sizes:
            continue
        rate = expected / (drafting + seconds(plain + count))
        if rate > most:
            most, best = rate, count
    for _, index in rows[:best]:
        counts[index] += 1
    return counts, most * seconds(plain) / plain


class _Rates:
    """How often guesses were right where those before them were, by the drafter's own probability if it has one."""

    def __init__(self, like: _Rates | None = None) -> None:
        self._rates: dict[int, float] = {} if like is None else dict(like._rates)

    def reaches(self, proposal: Proposal) -> list[float]:
        """The chance that row 1, 2, ... counts."""
        reach, reaches = 1.0, []
        for depth in range(len(proposal.tokens)):
            key, prior = _bin(proposal, depth)
            reach *= self._rates.get(key, prior)
            reaches.append(reach)
        return reaches

    def learn(self, proposal: Proposal, verified: int, right: int, newest: float) -> None:
        """Of the first `verified` guesses the first `right` were right."""
        for depth in range(min(right + 1, verified)):
            self._move(*_bin(proposal, depth), float(depth < right), newest)

    def forget(self, proposal: Proposal) -> None:
        """Nothing of a proposal was verified: in time it is again."""
        for key, prior in {_bin(proposal, depth) for depth in range(len(proposal.tokens))}:
            self._move(key, prior, prior, _FORGETTING)

    def _move(self, key: int, prior: float, to: float, weight: float) -> None:
        rate = self._rates.get(key, prior)
        self._rates[key] = rate + weight * (to - rate)


def _bin(proposal: Proposal, depth: int) -> tuple[int, float]:
    """Where a guess is counted, and what is believed of it at first."""
    if not proposal.chances:
        return -1, _PRIOR
    chance = min(max(float(proposal.chances[depth]), 0.0), 1.0)
    return min(int(chance * _BINS), _BINS - 1), chance


@dataclass
class _Drafted:
    """What is known of a sequence: its text for the drafter, its rates, its newest proposal."""

    rates: _Rates
    text: Int32
    length: int = 0
    proposal: Proposal = field(default_factory=Proposal)
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


class Speculator:
    """Asks a drafter, which it closes, for the sequences of an engine; all but `stats` on the engine's thread.

    vocab: proposed ids are below it. rows: most rows of a step that verifies; verify: most of a sequence, the seed's
    included; width: so many of each sequence whatever it gains, 0 to choose; tails: what of the drafter's ring is kept
    with prefixes.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab: int,
        rows: int,
        verify: int,
        width: int = 0,
        tails: Tails | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._vocab = vocab
        self._rows = rows
        self._verify = min(verify, width or verify)
        self._fixed = width > 0
        self._tails = tails
        self._clock = clock
        self._sequences: dict[Sequence, _Drafted] = {}
        self._rates = _Rates()
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

    def propose(self, running: Many[Sequence]) -> None:
        """Give the sequences that decode their proposals for the next step."""
        decoding = [s for s in running if not s.prompt_left]
        for sequence in running:
            sequence.proposal = ()
            if sequence not in self._sequences:
                self._sequences[sequence] = _Drafted(_Rates(self._rates), np.empty(0, np.int32))
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
        asked = [(s, most) for s in decoding if (most := self._most(s, room)) > 0]
        if not asked:
            return
        self._idle = False
        started = self._clock()
        proposals = self._ask(asked)
        taken = self._clock() - started
        self._spent += taken
        self._drafting.add(len(asked), taken)
        if proposals is not None:
            self._share([s for s, _ in asked], proposals, room, len(decoding))

    def ran(self, plan: Plan, seconds: float) -> None:
        """A step ran, and took so long."""
        if all(part.position >= len(part.sequence.prompt) for part in plan.parts):
            self._seconds.add(plan.step.rows, seconds)
        if self._tails is not None:
            self._tails.observe(plan.step.spans)
        if self._failures < _FAILURES and not all(self._sequences[part.sequence].off for part in plan.parts):
            try:
                self._drafter.observe(plan.step.spans)
            except Exception as error:
                self._failed(error)
                return
            if self._answered:
                self._failures, self._trouble = 0, ""

    def tail(self, slot: int, end: int) -> Tail | None:
        """What is to be kept with the first `end` positions of a slot's sequence, all of which are computed."""
        return None if self._tails is None else self._tails.take(slot, end)

    def resumed(self, slot: int, end: int, tail: Tail | None) -> None:
        """A sequence begins behind `end` positions that were kept, with this tail."""
        span = None if self._tails is None or tail is None else self._tails.put(slot, end, tail)
        if span is not None and self._failures < _FAILURES:
            spans = [span]
            self._tell(lambda: self._drafter.observe(spans))

    def verified(self, sequence: Sequence, proposed: int, accepted: int, *, over: bool) -> None:
        """Of so many proposed tokens so many are in the reply; `over`: the reply ends there."""
        self._steps += 1
        self._proposed += proposed
        self._accepted += accepted
        known, looked_at = self._sequences[sequence], accepted if over else proposed
        known.rates.learn(known.proposal, looked_at, accepted, _NEWEST)
        self._rates.learn(known.proposal, looked_at, accepted, _NEWEST_OF_ALL)

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
        except AwayError as error:
            self._away(error)
        except Exception as error:
            self._failed(error)

    def _most(self, sequence: Sequence, room: int) -> int:
        """Rows that could be verified behind a sequence's seed."""
        if self._sequences[sequence].off:
            return 0
        # Each row gives a token, and the last one needs no row behind it.
        left = sequence.room - len(sequence.reply) - 1
        if sequence.ahead is not None:
            left = min(left, sequence.ahead)
        return min(self._drafter.block, self._verify - 1, left, room)

    def _ask(self, asked: Many[tuple[Sequence, int]]) -> list[Proposal] | None:
        try:
            given = self._drafter.propose(
                [Draftable(s.slot or 0, self._sequences[s].tokens(s), most) for s, most in asked]
            )
            proposals = [self._checked(p, most) for p, (_, most) in zip(given, asked, strict=True)]
        except AwayError as error:
            self._away(error)
            return None
        except Exception as error:
            self._failed(error)
            return None
        self._answered = True
        return proposals

    def _checked(self, proposal: Proposal, most: int) -> Proposal:
        """What there is of a proposal up to the first id that is none."""
        tokens = [int(token) for token in proposal.tokens[:most]]
        count = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab), len(tokens))
        chances = proposal.chances[:count] if len(proposal.chances) >= count else ()
        return Proposal(tokens[:count], chances)

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
            known.proposal = proposal
            sequence.proposal = tuple(proposal.tokens[:count])
            if not count:
                known.rates.forget(proposal)

    def _away(self, error: AwayError) -> None:
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
            sequence.proposal = ()
