"""Who is drafted for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from luce.engine.draft_account import SHARE
from luce.engine.draft_budget import AcceptanceRates
from luce.engine.draft_pace import Pace
from luce.engine.drafted import DraftedSequence

SIZES = (2, 4, 8, 16)


def sequence() -> DraftedSequence:
    return DraftedSequence(AcceptanceRates(), np.empty(0, np.int32))


class Run:
    """Sequences that run together; `gains[i]`: how many rows of a proposal of sequence i are accepted."""

    def __init__(self, gains: Sequence[int], *, drafting: Callable[[int], float], pace: Pace | None = None) -> None:
        self.pace = Pace(SIZES) if pace is None else pace
        self.known = [sequence() for _ in gains]
        self.gains = list(gains)
        self.drafting = drafting
        self.asked = [0] * len(gains)
        self.seconds = self.tokens = 0.0

    def plain(self, steps: int = 3) -> None:
        """Steps before there are drafts."""
        for _ in range(steps):
            self.pace.record_step(len(self.known), len(self.known), 1, self.step(len(self.known)), None, pending=False)

    @staticmethod
    def step(rows: int) -> float:
        """Seconds of a step."""
        return 1.0 + 0.03 * rows

    def steps(self, count: int) -> None:
        """Steps with drafts; all rows of a proposal of 7 are verified where more than half are accepted."""
        plain = len(self.known)
        for _ in range(count):
            asks = self.pace.ask(self.known, 16 - plain)
            rows, longest, accepted, asked = plain, 1, 0, sum(asks)
            seconds = self.drafting(asked) if asked else None
            booked = self.pace.record_drafting(asked, 0, seconds)[1] if seconds is not None else None
            for index, one in enumerate(self.known):
                if asks[index]:
                    self.asked[index] += 1
                    gain = self.gains[index]
                    self.pace.learn(one, [1.0] * gain + [0.0] * (7 - gain))
                    rows, longest, accepted = rows + gain, max(longest, 1 + gain), accepted + gain
            self.pace.record_step(rows, plain, longest, self.step(rows), booked, pending=rows > plain)
            self.pace.record_accepted(accepted)
            self.seconds += self.step(rows) + (seconds or 0.0)
            self.tokens += plain + accepted

    @property
    def speed(self) -> float:
        """Tokens a second, of plain steps'."""
        plain = len(self.known)
        return self.tokens / self.seconds / (plain / self.step(plain))


def test_one_that_copies_is_drafted_for_while_the_others_rest() -> None:
    run = Run([0, 7, 0, 0], drafting=lambda count: 0.1 * count)
    run.plain()
    run.steps(200)
    assert run.asked[1] == 200
    # 4 + 8 + 16 + 32 + 64 ... steps of rest.
    assert max(run.asked[:1] + run.asked[2:]) < 12
    assert run.speed > 1.8


@pytest.mark.parametrize("drafting", [0.05, 0.3, 4.0])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_drafter_that_is_never_right_costs_less_than_2_percent(drafting: float, count: int) -> None:
    run = Run([0] * count, drafting=lambda asked: drafting * (0.5 + 0.5 * asked))
    run.plain()
    run.steps(20)
    run.seconds = run.tokens = 0.0
    run.steps(1000)
    assert 0.98 < run.speed <= 1
    assert all(run.asked)


@pytest.mark.parametrize("drafting", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_first_reply_loses_no_more_than_what_is_lent(drafting: float, count: int) -> None:
    """Of 256 tokens, the first of them drafted: three steps, the last proposal, and 0.5 %."""
    run = Run([0] * count, drafting=lambda asked: drafting * (0.5 + 0.5 * asked))
    for _ in range(5):
        run.pace.record_time(count, count, 1, run.step(count), pending=False)
    run.steps(255)
    assert 0.965 < run.speed <= 1
    assert all(run.asked)


def test_new_sequences_rest_at_once_where_drafts_do_not_pay() -> None:
    first = Run([0, 0], drafting=lambda count: 0.5 * count)
    first.plain()
    first.steps(400)
    later = Run([0, 0], drafting=first.drafting, pace=first.pace)
    later.steps(4)
    assert later.asked == [0, 0]
    # And where they pay, they are drafted for at once.
    good = Run([5, 5], drafting=lambda count: 0.1 * count)
    good.plain()
    good.steps(40)
    later = Run([5, 5], drafting=good.drafting, pace=good.pace)
    later.steps(4)
    assert later.asked == [4, 4]


def test_one_that_begins_to_copy_is_noticed() -> None:
    run = Run([0, 0], drafting=lambda count: 0.1 * count)
    run.plain()
    run.steps(300)
    before = run.asked[0]
    run.gains[0] = 7
    run.steps(300)
    assert run.asked[0] - before > 100 and run.asked[1] < 30


def test_drafts_that_cost_more_than_they_seem_to_gain_stop() -> None:
    """Forecasts promise what never comes."""
    run = Run([3], drafting=lambda count: 0.5)
    run.plain()
    run.pace.record_accepted = lambda count: None  # type: ignore[method-assign]
    run.steps(1000)
    assert run.asked[0] < 60


def test_a_sequence_whose_drafter_failed_is_not_asked_for() -> None:
    run = Run([7, 7], drafting=lambda count: 0.1)
    run.plain()
    run.known[0].off = True
    run.steps(5)
    assert run.asked == [0, 5]
    run.known[1].off = True
    run.steps(5)
    assert run.asked == [0, 5]


def test_drafts_beside_prompts_are_booked() -> None:
    """Their cost, and their gains with the step that had them: not with the one before it."""
    pace = Pace(SIZES)
    for _ in range(5):
        pace.record_step(2, 2, 1, 1.0, None, pending=False)
        pace.record_time(8, 2, 4, 1.5, pending=True)
    pace.record_step(2, 2, 1, 1.0, None, pending=False)
    begun = 3.0 + SHARE * 3
    assert pace.account.affords(begun - 1e-6) and not pace.account.affords(begun + 0.05)
    # Drafts of a step without prompts gain nothing, those of the next step, which reads a prompt, two tokens.
    pace.record_step(8, 2, 4, 1.5, 0.5, pending=True)
    pace.record_beside_prompts(8, 2, 0.5)
    pace.record_accepted(2)
    assert pace.account.affords(begun - 1.0 - 1e-6) and not pace.account.affords(begun - 1.0 + 0.05)
    pace.record_beside_prompts(2, 2, None)
    assert pace.account.affords(begun - 1.0 - 1e-6) and not pace.account.affords(begun - 1.0 + 0.05)
    pace.record_beside_prompts(8, 2, 0.5)
    pace.record_beside_prompts(0, 0, None)
    assert pace.account.affords(begun - 2.0 - 1e-6) and not pace.account.affords(begun - 2.0 + 0.05)
    # Without the time of a plain step nobody knows what it gains.
    pace.record_beside_prompts(8, 5, 0.5)
    pace.record_beside_prompts(0, 0, None)
    assert not pace.account.affords(begun - 2.0 + 0.05)
