"""Chooses whom the drafter is asked for and whose texts are looked up in a step: while the devices work, where it can.

What is chosen between two steps, the devices wait for. A step that gives each reply one token changes nothing that the
choice depends on but that token, so the choice for the step behind it is made beside it. A text is looked up then
without its last token, which mostly shows that there is nothing to find.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

from luce.draft.prompt_lookup import Lookup
from luce.engine.draft_pace import Pace
from luce.engine.drafted import DraftedSequence
from luce.engine.sequence import Sequence

# Most texts that are looked up in turn for a step.
_LOOKED_UP = 8


class Turn(NamedTuple):
    """What a step may verify of a sequence, beside what is forced."""

    #: whether the drafter is asked
    asks: bool
    #: whether its text is looked up, though the drafter may not be asked
    looks: bool


@dataclass(frozen=True)
class _Plan:
    """The turns of the next step, if it has the same sequences."""

    sequences: tuple[Sequence, ...]
    #: none if nothing may be drafted
    turns: list[Turn]
    #: length of each reply when the turns were chosen
    lengths: list[int]


class DraftTurns:
    """The turns of an engine's sequences. `fixed`: the drafter is asked for all of them in each step.

    Without a drafter that is asked, those that copy are looked up, and some others in turn: a lookup takes the host
    0.03 to 0.1 ms, with what is chosen then.
    """

    def __init__(self, pace: Pace, lookup: Lookup | None, *, fixed: bool) -> None:
        self._pace, self._lookup, self._fixed = pace, lookup, fixed
        self._begin = 0
        self._plan: _Plan | None = None

    def choose(
        self, decoding: Many[Sequence], known: Many[DraftedSequence], budget: int, *, drafts: bool
    ) -> list[Turn]:
        """The turns of all sequences that decode, of `budget` rows beside one for each. `drafts`: whether a drafter is
        asked."""
        for one, sequence in zip(known, decoding, strict=True):
            one.now = len(sequence.prompt) + len(sequence.reply)
        if not drafts:
            asks = [False] * len(known)
        else:
            asks = [not one.off for one in known] if self._fixed else self._pace.ask(known, budget)
        return list(map(Turn, asks, self._looks([one.copying for one in known])))

    def plan(self, decoding: Many[Sequence], known: Many[DraftedSequence], turns: list[Turn]) -> None:
        """Keep turns for the next step, in which each of these sequences has one token more; without any nothing is
        drafted."""
        for sequence, one, turn in zip(decoding, known, turns, strict=True) if turns else ():
            if self._lookup is not None and turn.looks and not turn.asks:
                self._lookup.prepare(sequence.slot or 0, sequence.session, one.tokens(sequence))
        self._plan = _Plan(tuple(decoding), turns, [len(sequence.reply) for sequence in decoding])

    def drop_plan(self) -> None:
        """A sequence ends or is read again: it may go on in the next step, but not with one token more."""
        self._plan = None

    @property
    def drafts_nothing(self) -> bool:
        """Whether by the plan the drafter is asked for no sequence, and no text is looked up."""
        return self._plan is not None and not any(turn.asks or turn.looks for turn in self._plan.turns)

    def planned(self, running: Many[Sequence]) -> list[Turn] | None:
        """What was planned for the step behind the newest one; None if other sequences run now, or got other tokens."""
        plan, self._plan = self._plan, None
        if plan is None or plan.sequences != tuple(running):
            return None
        if any(len(one.reply) != length + 1 for one, length in zip(running, plan.lengths, strict=True)):
            return None
        if self._lookup is None or not plan.turns:
            return plan.turns
        return [
            turn if turn.asks or not turn.looks else Turn(False, not self._lookup.misses(one.slot or 0, one.reply[-1]))
            for one, turn in zip(running, plan.turns, strict=True)
        ]

    def _looks(self, copying: Many[bool]) -> list[bool]:
        """Of all sequences that decode, in an order that stays. `copying`: whether each one copies."""
        count = len(copying)
        if self._lookup is None:
            return [False] * count
        turns = [own or (place - self._begin) % count < _LOOKED_UP for place, own in enumerate(copying)]
        self._begin = (self._begin + _LOOKED_UP) % count if count else 0
        return turns
