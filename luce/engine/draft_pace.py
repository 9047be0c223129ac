"""Chooses the sequences to draft for: by times, by forecasts of the gain of each sequence's drafts, and by the account.

A forecast is the mean over a sequence's recent proposals of the probabilities that their rows are accepted, by what is
known once the reply has gone on; a new sequence has that of all sequences. Sequences for which drafting does not pay by
it rest. Each is tried again from time to time, as far as the account of drafting allows (luce.engine.draft_account).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from luce.engine.draft_account import DraftAccount
from luce.engine.draft_budget import worth_drafting
from luce.engine.draft_times import BatchTimes, StepTimes
from luce.engine.drafted import DraftedSequence

# Weight of the newest proposal in a forecast, once there are many.
_WEIGHT = 0.1
# From so many proposals on, a sequence's own forecast holds alone.
_OWN_PROPOSALS = 4
# The share by which drafting must be faster than plain steps.
_MARGIN = 0.03
# Forecasts are compared with the times again after so many steps at most.
_STEPS = 16


class Pace:
    """The sequences of an engine that are drafted for. `sizes`: rows of steps to choose between.

    Steps whose drafts are all forced or copied, without the drafter, are not booked.
    """

    def __init__(self, sizes: Many[int]) -> None:
        self.sizes = sizes
        self.step_times = BatchTimes()
        # One text takes a pass of the draft as several do.
        self.draft_times = StepTimes(fixed=0.5)
        #: what proposals take longer where sequences rested, by the tokens that the drafter has not read yet
        self.owed_times = StepTimes(fixed=0.0, first=0)
        #: of proposals that no drafter was asked for
        self.forced_times = StepTimes()
        self.account = DraftAccount()
        self._new: list[float] = []
        self._chosen_for: tuple[int, ...] = ()
        self._stale = 0
        # Of the newest step that decodes: its seconds with proposals, its sequences, and the tokens it gave more.
        self._drafted: tuple[float, int] | None = None
        self._accepted = 0

    def ask(self, known: Many[DraftedSequence], budget: int) -> list[bool]:
        """Which of all sequences that decode to draft for in the next step, of `budget` rows beside one for each."""
        able = [one for one in known if not one.off]
        if not able:
            return [False] * len(known)
        here = tuple(map(id, able))
        if self._stale <= 0 or here != self._chosen_for:
            self._choose(able, budget, len(known))
            self._chosen_for, self._stale = here, _STEPS
        self._stale -= 1
        asked = {id(one) for one in able if one.pays} if not self.account.overdrawn else set[int]()
        if tried := self._tried([one for one in able if id(one) not in asked], len(asked)):
            asked.add(id(tried))
        for one in able:
            one.asked |= id(one) in asked
        return [id(one) in asked for one in known]

    def _choose(self, able: Many[DraftedSequence], budget: int, plain: int) -> None:
        times = self.step_times.by_rows(plain), self.draft_times
        forecasts = [self._forecast(one) for one in able]
        known = [index for index, forecast in enumerate(forecasts) if forecast]
        expected = [forecasts[index] for index in known]
        pays = worth_drafting(expected, budget, plain, *times, self.sizes, margin=_MARGIN)
        worth = {known[place] for place, found in enumerate(pays) if found}
        for index, one in enumerate(able):
            # Without any forecast each of them is tried.
            one.judge(pays=index in worth or (one.forecast is None and not self._new))

    def _forecast(self, one: DraftedSequence) -> list[float]:
        """A sequence's, and as far as that is from few proposals that of all sequences."""
        return _mean(self._new, one.forecast or [], min(1.0, one.learned / _OWN_PROPOSALS))

    def _tried(self, resting: Many[DraftedSequence], asked: int) -> DraftedSequence | None:
        """One of the resting sequences whose pause is over, if the account affords the time of its proposal."""
        ready = [one for one in resting if one.waited()]
        if not ready:
            return None
        tried = max(ready, key=lambda one: (not one.learned, sum(one.forecast or [])))
        cost = self.draft_times(asked + 1) - (self.draft_times(asked) if asked else 0.0)
        cost = max(cost, 0.0) + self.owed_times(tried.owed)
        return tried if self.account.affords(cost) else None

    def record_drafting(self, asked: int, owed: int, seconds: float) -> tuple[float, float]:
        """Proposals for `asked` sequences took so long, with `owed` tokens to be read first behind rests and prompts.
        Returns what such proposals usually take, and what is booked for them."""
        usual = self.draft_times(asked)
        if not usual or not owed:
            # The first proposals for so many sequences build and capture, once.
            counts = self.draft_times.add(asked, seconds)
            usual = self.draft_times(asked)
            return usual, min(seconds, 2 * usual if counts else usual)
        self.owed_times.add(1 << (owed - 1).bit_length(), max(0.0, seconds - usual))
        usual += self.owed_times(owed)
        # Other work of the host may have held them up.
        return usual, min(seconds, 2 * usual)

    def learn(self, one: DraftedSequence, probabilities: Many[float]) -> None:
        """The rows of a sequence's newest proposal are accepted with these probabilities."""
        one.forecast = _mean(one.forecast or [], probabilities, max(_WEIGHT, 1 / (one.learned + 1)))
        one.learned += 1
        self._new = _mean(self._new, probabilities, _WEIGHT)
        # Choosing among 15 sequences takes a quarter of a millisecond, with which the devices wait.
        self._stale = min(self._stale, len(self._chosen_for) // 4)

    def record_step(
        self, rows: int, plain: int, longest: int, seconds: float, drafting: float | None, *, pending: bool
    ) -> None:
        """A step of only replies took so long.

        longest   the most rows of a sequence
        drafting  seconds that are booked for its proposals, None if no drafter was asked
        pending   whether it verifies, or accepts rows of the step before
        """
        self._settle()
        counts = self.record_time(rows, plain, longest, seconds, pending=pending)
        if not counts or not self.step_times.measured(plain, plain):
            return
        # Any step may be held up.
        seconds = min(seconds, 2 * self.step_times(rows, plain))
        if drafting is not None:
            self._drafted = seconds + drafting, plain
        elif rows == plain:
            self.account.book_plain(seconds)

    def record_beside_prompts(self, rows: int, plain: int, drafting: float | None) -> None:
        """A step of replies and prompts: parts of their own, so that its replies took about what they take alone."""
        self._settle()
        if drafting is not None and self.step_times.measured(plain, plain):
            self._drafted = self.step_times(rows, plain) + drafting, plain

    def record_time(self, rows: int, plain: int, longest: int, seconds: float, *, pending: bool) -> bool:
        """A step took so long, of which nothing is booked; all else as in `record_step`. Returns whether it counts."""
        # What launches depend on (luce.runtime.step.StepShape): the first steps of each shape take several times as
        # long, once, which says nothing of drafting.
        return self.step_times.add(rows, plain, seconds, (rows, plain, (longest - 1).bit_length(), pending))

    def record_accepted(self, count: int) -> None:
        """So many draft rows of the newest step were accepted."""
        self._accepted += count

    def _settle(self) -> None:
        if self._drafted is not None:
            seconds, plain = self._drafted
            self.account.book_drafted(seconds, plain + self._accepted, plain, self.step_times(plain, plain))
        self._drafted, self._accepted = None, 0


def _mean(old: Many[float], new: Many[float], weight: float) -> list[float]:
    """The mean of two lists of probabilities, the shorter one with zeros behind it; `new` if there is no old one."""
    if not old or not new:
        return list(new or old)
    length = max(len(old), len(new))
    padded = ([*own, *[0.0] * (length - len(own))] for own in (old, new))
    return [a + weight * (b - a) for a, b in zip(*padded, strict=True)]
