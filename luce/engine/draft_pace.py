"""Chooses the sequences to draft for: by times, by forecasts of the gain of each sequence's drafts, and by the account.

A forecast is the mean over a sequence's recent proposals of the probabilities that their rows are accepted, by what is
known once the reply has gone on; a new sequence has that of all sequences. Sequences for which drafting does not pay by
it rest. Each is tried again from time to time, as far as the account of drafting allows (luce.engine.draft_account).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from luce.engine.draft_account import DraftAccount
from luce.engine.draft_budget import StepTimes, worth_drafting
from luce.engine.drafted import DraftedSequence

# Weight of the newest proposal in the forecast of its sequence, once there are many, and in that of new sequences.
_OWN_WEIGHT, _NEW_WEIGHT = 0.25, 0.1
# The share by which drafting must be faster than plain steps.
_MARGIN = 0.02
# Forecasts are compared with the times again after so many steps at most.
_STEPS = 16


class Pace:
    """The sequences of an engine that are drafted for. `sizes`: rows of steps to choose between.

    Steps whose drafts are all forced or copied, without the drafter, are not booked.
    """

    def __init__(self, sizes: Many[int]) -> None:
        self.sizes = sizes
        self.step_times = StepTimes()
        # One text takes a pass of the draft as several do.
        self.draft_times = StepTimes(fixed=0.5)
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
        times = self.step_times, self.draft_times
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
        return _mean(self._new, one.forecast or [], min(1.0, _OWN_WEIGHT * one.learned))

    def _tried(self, resting: Many[DraftedSequence], asked: int) -> DraftedSequence | None:
        """One of the resting sequences whose pause is over, if the account affords the time of its proposal."""
        ready = [one for one in resting if one.waited()]
        cost = self.draft_times(asked + 1) - (self.draft_times(asked) if asked else 0.0)
        if not ready or not self.account.affords(max(cost, 0.0)):
            return None
        return max(ready, key=lambda one: (not one.learned, sum(one.forecast or [])))

    def learn(self, one: DraftedSequence, probabilities: Many[float]) -> None:
        """The rows of a sequence's newest proposal are accepted with these probabilities."""
        one.forecast = _mean(one.forecast or [], probabilities, max(_OWN_WEIGHT, 1 / (one.learned + 1)))
        one.learned += 1
        self._new = _mean(self._new, probabilities, _NEW_WEIGHT)
        # Choosing among 15 sequences takes a quarter of a millisecond, with which the devices wait.
        self._stale = min(self._stale, len(self._chosen_for) // 4)

    def record_step(self, rows: int, plain: int, longest: int, seconds: float, drafting: float, asked: int) -> None:
        """A step of only replies took so long, with proposals for `asked` sequences that took `drafting` seconds.
        `longest`: the most rows of a sequence."""
        self._settle()
        # What launches depend on (luce.runtime.step.StepShape): two steps of each shape take several times as long,
        # once, which says nothing of drafting.
        shape = rows, plain, (longest - 1).bit_length(), rows > plain
        if not self.step_times.add(rows, seconds, shape) or not self.step_times.measured(plain):
            return
        # Any step may be held up.
        seconds = min(seconds, 2 * self.step_times(rows))
        if asked:
            self._drafted = seconds + min(drafting, 2 * self.draft_times(asked)), plain
        elif rows == plain:
            self.account.book_plain(seconds)

    def record_accepted(self, count: int) -> None:
        """So many draft rows of the newest step were accepted."""
        self._accepted += count

    def _settle(self) -> None:
        if self._drafted is not None:
            seconds, plain = self._drafted
            self.account.book_drafted(seconds, plain + self._accepted, plain, self.step_times(plain))
        self._drafted, self._accepted = None, 0


def _mean(old: Many[float], new: Many[float], weight: float) -> list[float]:
    """The mean of two lists of probabilities, the shorter one with zeros behind it; `new` if there is no old one."""
    if not old or not new:
        return list(new or old)
    length = max(len(old), len(new))
    padded = ([*own, *[0.0] * (length - len(own))] for own in (old, new))
    return [a + weight * (b - a) for a, b in zip(*padded, strict=True)]
