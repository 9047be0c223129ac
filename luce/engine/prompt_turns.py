"""Which prompts the next step reads, and how many rows of each. Pure.

A prompt gets the rows that it would get alone, or none: products of other numbers of rows round otherwise. A step has
up to `chunk` rows of one prompt, or up to SHARED_ROWS rows of several prompts of at most MANY_ROWS rows each, if these
may share a step; and up to FEW_ROWS rows of prompts of few rows.

Sessions take turns, and within a session its prompts do: with k sessions that read prompts, each gets every k-th chunk,
however many prompts the others have. While other sessions wait for a slot, a session's prompt with the fewest rows left
goes first, so that one ends soon. Prompts of few rows have turns of their own and pass between chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from math import inf

from luce.engine.failures import Failures
from luce.engine.sequence import Sequence
from luce.ops.matmul import FEW_ROWS, MANY_ROWS

#: most rows of short prompts in a step. More would end sooner all together, but the first of them later: by the times
#: of its kernels on an H200, a 27B model would read eight prompts of 100 tokens in 155 ms in one step, in 166 in two,
#: and in the mean in 155 and 125
SHARED_ROWS = 3 * MANY_ROWS


@dataclass
class Turn:
    """When a session took rows of one kind of prompts: of few rows, or of many."""

    #: numbers as in ScheduleState
    last: int = -1
    skipped: float = inf


@dataclass
class SessionTurns:
    """The turns of a session."""

    few: Turn = field(default_factory=Turn)
    many: Turn = field(default_factory=Turn)


@dataclass
class _Room:
    """Rows that a step still has."""

    few: int
    many: int
    #: of prompts whose rows all need whole logits, among the others
    scored: int
    #: whether only short prompts may have the many rows
    shared: bool = False

    def take(self, rows: int, *, scored: bool, shares: bool) -> bool:
        """Whether there is room for a prompt, which then has it.

        `scored`: whether all of its rows need whole logits. `shares`: whether it may share a step if it is short.
        """
        short = shares and rows <= MANY_ROWS
        many = self.many if short or not self.shared else 0
        room = self.few if rows <= FEW_ROWS else many
        if rows > (min(room, self.scored) if scored else room):
            return False
        if rows <= FEW_ROWS:
            self.few -= rows
        else:
            left = self.many if self.shared else min(self.many, SHARED_ROWS)
            self.shared, self.many = short, left - rows if short else 0
        self.scored -= rows * scored
        return True


class PromptTurns:
    """Chooses the prompts of each step. Parameters as those of luce.engine.scheduler.Scheduler."""

    def __init__(self, *, chunk: int, max_scored_rows: int, shares_prompts: bool) -> None:
        #: may change between steps
        self.shares_prompts = shares_prompts
        self._chunk = chunk
        self._max_scored_rows = min(max_scored_rows, chunk)
        # Turns so far.
        self._count = 0

    def choose(
        self, prompts: Many[Sequence], sessions: Mapping[str, SessionTurns], waiting: set[str], failures: Failures
    ) -> list[tuple[Sequence, int]]:
        """The prompts that the next step reads, and the rows of each; prompts of few rows come first.

        `sessions`: the turns of each session with a prompt. `waiting`: sessions that wait for a slot.
        """
        wanted: list[tuple[Turn, tuple[float, int], int, Sequence]] = []
        for sequence in prompts:
            with failures.of(sequence):
                rows = min(sequence.rows_to_read, self._max_scored_rows if sequence.scores_prompt else self._chunk)
                own = (sequence.schedule.skipped_turn, sequence.schedule.last_turn)
                if waiting - {sequence.session}:
                    # Others wait for a slot: the prompt that ends first gives one back.
                    own = (sequence.prompt_remaining, sequence.schedule.number)
                turns = sessions[sequence.session]
                wanted.append((turns.few if rows <= FEW_ROWS else turns.many, own, rows, sequence))
        chosen: list[tuple[Sequence, int]] = []
        room = _Room(min(FEW_ROWS, self._chunk), self._chunk, self._max_scored_rows)
        begin = self._count
        while wanted:
            # A session's turn changes with each of its shares.
            order = [(turn.skipped, turn.last, own) for turn, own, _, _ in wanted]
            turn, _, rows, sequence = wanted.pop(order.index(min(order)))
            state = sequence.schedule
            scored = sequence.scores_prompt
            if not room.take(rows, scored=scored, shares=self.shares_prompts and not scored):
                state.skipped_turn = min(state.skipped_turn, self._count)
                if turn.last < begin:
                    turn.skipped = min(turn.skipped, self._count)
                continue
            chosen.append((sequence, rows))
            turn.last, turn.skipped = self._count, inf
            state.last_turn, state.skipped_turn = self._count, inf
            self._count += 1
        return sorted(chosen, key=lambda one: one[1] > FEW_ROWS)
