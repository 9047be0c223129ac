"""Speculative decoding in the engine: whatever a drafter says, the reply is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.draft.drafter import Draftable, Proposal
from luce.draft.ngram import NgramDrafter
from luce.draft.no_drafter import NoDrafter
from luce.draft.prompt_lookup import Lookup
from luce.engine.draft_budget import fair_shares
from luce.engine.drafted import DraftLimits
from luce.engine.events import Finished, FinishReason, Tokens
from luce.engine.scheduler import Scheduler
from luce.engine.sequence import Constraint, DraftState, Sequence
from luce.engine.speculate import Speculator
from luce.kvcache.page_table import PageTables
from luce.runtime.step import Step
from tests.support.constraints import Few
from tests.support.drafters import ScriptedDrafter, always, never, oracle, sometimes
from tests.support.replies import EOS, PROMPT, Letters, draft_counts, engine, same, submit
from tests.support.scripted_backend import ScriptedBackend, after


@pytest.mark.parametrize("width", range(2, 17))
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("wrong", [never, always, sometimes(0.3, 1)], ids=["oracle", "adversary", "mixed"])
def test_the_reply_is_that_of_plain_decoding(wrong: Callable[[int], bool], recurrent: bool, width: int) -> None:
    backend = ScriptedBackend(recurrent=recurrent)
    with engine(backend, eos=frozenset(), drafter=oracle(backend, wrong), verify_width=width) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        assert reply.ids == backend.reply(PROMPT, 60) or reply.finished()
        timings = reply.finished().timings
        steps, proposed, accepted = draft_counts(made)
    assert reply.ids == backend.reply(PROMPT, 60)
    assert (timings.drafted, timings.accepted) == (proposed, accepted)
    if wrong is never:
        # The first token comes with the prompt, then every step gives `width` until the budget is used.
        assert accepted == proposed == 59 - steps - (59 % width == 1)
        assert steps == 59 // width + (59 % width > 1)
    elif wrong is always:
        assert accepted == 0 and steps >= 57


@pytest.mark.parametrize("width", [0, 5])
def test_a_step_is_staged_while_its_drafts_are_made(width: int) -> None:
    backend, calls = ScriptedBackend(), list[Any]()
    stage, backend.hook = backend.stage, calls.append

    def noted(step: Step) -> None:
        stage(step)
        calls.append("stage")

    backend.stage = noted  # type: ignore[method-assign]
    drafter = ScriptedDrafter(backend.reply, vocab=backend.capacity.vocab, hook=calls.append)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=width) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        reply.finished()
    assert reply.ids == backend.reply(PROMPT, 60)
    # It is the step that runs, unless its drafts have another number of tokens than was expected.
    order = [call for call in calls if isinstance(call, str) and call != "observe"]
    assert order == ["propose", "stage", "wait"] * drafter.asked
    ran = [call for call in calls if not isinstance(call, str)]
    found = [any(step is one for one in ran) for step in backend.staged]
    assert all(found) if width else any(found)


@pytest.mark.parametrize("wrong", [never, sometimes(0.3, 1)], ids=["oracle", "mixed"])
def test_each_verification_is_told(wrong: Callable[[int], bool]) -> None:
    backend, told = ScriptedBackend(), list[tuple[int, int]]()

    def on_verified(drafted: int, accepted: int) -> None:
        told.append((drafted, accepted))

    drafter = oracle(backend, wrong)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=5, on_verified=on_verified) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        reply.finished()
        counts = draft_counts(made)
    assert (len(told), *map(sum, zip(*told, strict=True))) == counts
    if wrong is never:
        assert set(told[:-1]) == {(4, 4)}


class Numberless(ScriptedDrafter):
    """Knows of every other token only how sure it is."""

    def propose_one(self, one: Draftable) -> Proposal:
        tokens = super().propose_one(one).tokens
        return Proposal(tokens, [0.9 if i % 2 else float("nan") for i in range(len(tokens))])


@pytest.mark.parametrize("width", [0, 8])
def test_a_chance_that_is_no_number_fails_no_reply(width: int) -> None:
    backend = ScriptedBackend()
    drafter = Numberless(backend.reply, vocab=backend.capacity.vocab)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=width) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        reply.finished()
    assert reply.ids == backend.reply(PROMPT, 60) and drafter.asked > 1
    assert list(Proposal([1, 2, 3], [0.5, float("nan"), 1.0]).probabilities) == [0.5, 0.0, 1.0]


def test_a_width_of_one_row_drafts_nothing() -> None:
    backend = ScriptedBackend(recurrent=True)
    drafter = oracle(backend)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=1) as made:
        reply, _ = submit(made, PROMPT, max_tokens=20)
        reply.finished()
    assert reply.ids == backend.reply(PROMPT, 20) and not drafter.asked


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_a_budget_ends_inside_a_block(max_tokens: int) -> None:
    backend = ScriptedBackend()
    with engine(backend, eos=frozenset(), drafter=oracle(backend, block=7), verify_width=8) as made:
        reply, _ = submit(made, PROMPT, max_tokens=max_tokens)
        assert reply.finished().reason is FinishReason.LENGTH
    assert reply.ids == backend.reply(PROMPT, max_tokens)


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("ending", ["eos", "id", "text"])
def test_an_end_inside_a_block(at: int, ending: str) -> None:
    text = [30 + i for i in range(20)]
    text[at] = EOS
    backend = ScriptedBackend(script=after(PROMPT, text), recurrent=True)
    options: dict[str, Any] = {"eos": {"max_tokens": 18}, "id": {"ignore_eos": True, "stop_token_ids": {EOS}}}.get(
        ending, {"ignore_eos": True}
    )
    replies = []
    for drafter in (None, oracle(backend, block=7)):
        with engine(backend, drafter=drafter, verify_width=8) as made:
            output = Letters(stop=chr(ord("a") + (EOS - 10) % 26)) if ending == "text" else None
            reply, _ = submit(made, PROMPT, **({"max_tokens": 18, "output": output} | options))
            reply.finished()
            replies.append(reply)
    same(*replies)


def test_the_context_ends_inside_a_block() -> None:
    backend = ScriptedBackend(context=64, slots=2)
    with engine(backend, eos=frozenset(), drafter=oracle(backend), verify_width=16) as made:
        reply, _ = submit(made, [20] * 40, max_tokens=None)
        assert reply.finished().reason is FinishReason.CONTEXT
    assert reply.ids == backend.reply([20] * 40, 24)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "min_p": 0.01, "logprobs": 3, "seed": 4},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "frequency_penalty": 0.8, "presence_penalty": 0.3, "seed": 5},
        {"logit_bias": {40: 2.0, 41: -100.0}, "min_tokens": 9},
    ],
    ids=["sampled", "candidates", "logprobs", "repetition", "counts", "bias"],
)
@pytest.mark.parametrize("width", [0, 5])
def test_sampled_replies_are_those_of_plain_decoding(params: dict[str, Any], width: int) -> None:
    """What is proposed is the plain reply, with mistakes, so that tokens are accepted whatever chose them."""
    backend = ScriptedBackend(recurrent=True)
    with engine(backend) as made:
        plain, _ = submit(made, PROMPT, **({"max_tokens": 50} | params))
        plain.finished()

    def known(text: Many[int], count: int) -> Many[int]:
        at = len(text) - len(PROMPT)
        return plain.ids[at : at + count]

    drafter = ScriptedDrafter(known, vocab=backend.capacity.vocab, wrong=sometimes(0.2, 2))
    with engine(backend, drafter=drafter, verify_width=width) as made:
        reply, _ = submit(made, PROMPT, **({"max_tokens": 50} | params))
        reply.finished()
        steps, _, accepted = draft_counts(made)
    same(reply, plain)
    # How many rows measured times make worthwhile is not known here.
    assert accepted > steps or not width


@settings(max_examples=25)
@given(st.data())
def test_sequences_share_the_rows(data: st.DataObject) -> None:
    backend = ScriptedBackend(slots=data.draw(st.integers(1, 5)), chunk=16, recurrent=data.draw(st.booleans()))
    prompts = data.draw(st.lists(st.lists(st.integers(20, 60), min_size=1, max_size=40), min_size=1, max_size=7))
    width, share = data.draw(st.sampled_from([0, 4, 16])), data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    drafter = oracle(backend, sometimes(share, 3), probabilities=data.draw(st.booleans()))
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=width) as made:
        replies = [submit(made, prompt, max_tokens=20 + i)[0] for i, prompt in enumerate(prompts)]
        for reply in replies:
            reply.finished()
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        assert reply.ids == backend.reply(prompt, 20 + i)
    assert len(drafter.forgotten) == len(prompts) and drafter.closed


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_later_turn_begins_behind_accepted_rows(recurrent: bool) -> None:
    backend = ScriptedBackend(recurrent=recurrent, resumes=not recurrent)
    with engine(backend, eos=frozenset(), drafter=oracle(backend), verify_width=16, cache_bytes=1 << 20) as made:
        first, _ = submit(made, [20] * 70, max_tokens=30)
        first.finished()
        prompt = [20] * 70 + first.ids + [33, 34]
        second, _ = submit(made, prompt, max_tokens=30)
        cached = second.finished().timings.cached_tokens
    assert cached >= (99 if recurrent else 64)
    assert second.ids == backend.reply(prompt, 30)


def test_prompt_lookup_repeats_what_was_said() -> None:
    backend = ScriptedBackend(script=after([22], [30, 31, 32, 33, 34, 35]))
    with engine(backend, eos=frozenset(), drafter=NgramDrafter(block=15), verify_width=16) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        reply.finished()
        steps, _, accepted = draft_counts(made)
    assert reply.ids == [30, 31, 32, 33, 34, 35] * 10
    assert accepted > 3 * steps


@pytest.mark.parametrize("wrong", [never, always, sometimes(0.3, 1)], ids=["oracle", "adversary", "mixed"])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("width", [0, 16])
def test_a_copied_text_goes_on_behind_the_draft_block(
    wrong: Callable[[int], bool], probabilities: bool, width: int
) -> None:
    text = [30 + i for i in range(40)]
    backend = ScriptedBackend(script=after([22], text * 3), recurrent=True)
    drafter = oracle(backend, wrong, block=7, probabilities=probabilities)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=width, lookup=True) as made:
        reply, _ = submit(made, PROMPT, max_tokens=120)
        reply.finished()
        stats = made.stats().draft
    assert reply.ids == text * 3 and stats is not None and 0 <= stats.copied <= stats.accepted
    if width:
        # 40 tokens of the drafter's eight a step, or of one; the others of sixteen.
        assert stats.copied > 60 and stats.steps < 20 + (wrong is not never) * 42


def test_a_recent_reply_of_the_session_is_copied() -> None:
    text = [30 + i for i in range(60)]
    backend = ScriptedBackend(script=after([22], text))
    steps = []
    drafter = oracle(backend, always, block=7)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=16, lookup=True) as made:
        for session in ("a", "b", "a"):
            reply, _ = submit(made, PROMPT, max_tokens=60, session=session)
            reply.finished()
            assert reply.ids == text
            steps.append(draft_counts(made)[0])
    first, other, again = np.diff([0, *steps]).tolist()
    assert first == other > 50 and again < 10


def test_a_sequence_that_rests_has_copied_drafts() -> None:
    text = [30 + i for i in range(40)]
    backend = ScriptedBackend(script=after([22], text * 8))
    now = [0.0]

    def dear(what: str) -> None:
        now[0] += 50.0 if what == "propose" else 0.0

    drafter = oracle(backend, always, block=7, hook=dear)
    speculator = Speculator(
        drafter, DraftLimits(97, step_rows=16, verify_rows=16), lookup=Lookup(), clock=lambda: now[0]
    )
    drive = Driven(speculator, backend.reply(PROMPT, 320))
    assert drive.most == 16 and drafter.asked < 12
    state = speculator.drafts(drive.sequence)
    assert state is not None and state.state is DraftState.RESTING and state.accepted > 200


def test_a_drafter_is_told_what_ran_and_when_nothing_does() -> None:
    backend = ScriptedBackend(chunk=4)
    drafter = oracle(backend)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=4) as made:
        reply, _ = submit(made, [20] * 6, max_tokens=9)
        reply.finished()
        made.wait_idle()
    spans = [(span.position, span.rows, span.speculative) for span in drafter.seen]
    assert spans == [(0, 4, False), (4, 2, False), (6, 4, True), (10, 4, True)]
    assert drafter.forgotten == [0] and drafter.idled == 1 and drafter.closed


class Driven:
    """A speculator that serves one reply, whose steps take made-up seconds: `rows` of each step that decodes."""

    def __init__(
        self,
        made: Speculator,
        expected: Many[int],
        seconds: Callable[[int], float] = lambda rows: 0.007 + 0.0001 * rows,
        constraint: Constraint | None = None,
    ) -> None:
        self.rows: list[int] = []
        count = len(expected)
        scheduler = Scheduler(
            PageTables([99], [None], slots=1, context=4096, chunk=16), slots=1, chunk=16, max_scored_rows=1
        )
        self.sequence = sequence = Sequence(
            prompt=np.array(PROMPT, np.int32), max_new_tokens=count, constraint=constraint
        )
        scheduler.add(sequence)
        list(scheduler.admit())
        while len(sequence.reply) < count:
            made.propose(scheduler.running)
            made.receive()
            plan = scheduler.schedule()
            assert plan is not None
            (part,) = plan.sequences
            scheduler.advance(plan)
            made.observe(plan)
            made.record_step(plan, seconds(plan.step.rows))
            right = 0
            for token in part.draft.tokens:
                if token != expected[len(sequence.reply) + right]:
                    break
                right += 1
            if part.position:
                self.rows.append(part.rows)
            at = len(sequence.reply)
            sequence.reply += expected[at : at + right + 1]
            if part.draft.tokens:
                scheduler.accept(part, range(right + 1))
                made.record_verification(sequence, part, range(1, right + 1), ended=False)

    @property
    def most(self) -> int:
        """The most rows of a step."""
        return max(self.rows)


class Timed:
    """A speculator over steps whose seconds are made up: `rows` of each step that decodes, once it knows them."""

    def __init__(
        self,
        wrong: Callable[[int], bool],
        *,
        probabilities: bool = False,
        drafting: float = 0.0,
        constraint: Constraint | None = None,
    ) -> None:
        self.now = 0.0
        backend = ScriptedBackend(vocab=97)
        drafter = oracle(backend, wrong, probabilities=probabilities, hook=lambda what: self.pass_time(what, drafting))
        self.drafter = drafter
        made = Speculator(drafter, DraftLimits(97, step_rows=16, verify_rows=16), clock=lambda: self.now)
        driven = Driven(made, backend.reply(PROMPT, 400), self.seconds, constraint)
        self.rows = driven.rows

    def pass_time(self, what: str, drafting: float) -> None:
        self.now += drafting if what == "propose" else 0.0

    @staticmethod
    def seconds(rows: int) -> float:
        """A GPU's: few rows cost little more than one, many nearly twice as much."""
        return 0.007 if rows == 1 else 0.009 if rows <= 8 else 0.013


@pytest.mark.parametrize("probabilities", [False, True])
def test_a_drafter_that_is_right_is_followed_as_far_as_it_goes(probabilities: bool) -> None:
    timed = Timed(never, probabilities=probabilities, drafting=0.002)
    assert timed.rows[:3] == [1, 1, 1] and timed.rows.count(16) > 20
    assert len(timed.rows) < 45


@pytest.mark.parametrize("forced", [(), (5, 6, 7)])
def test_only_what_is_forced_is_proposed_without_a_drafter(forced: tuple[int, ...]) -> None:
    class Forcing(Few):
        def forced(self, most: int, ends: frozenset[int]) -> list[int]:
            return list(forced[:most])

    made = Speculator(NoDrafter(), DraftLimits(97, step_rows=16, verify_rows=3, width=3))
    sequence = Sequence(prompt=np.array(PROMPT, np.int32), max_new_tokens=40, constraint=Forcing(97, *range(97)))
    sequence.reply.append(4)
    sequence.schedule.computed = len(PROMPT)
    assert not made.propose([sequence]) and made.pending == bool(forced)
    assert not made.receive() and sequence.draft.tokens == forced[:2]
    assert (sequence.draft.forced, sequence.draft.ends_reasoning) == (len(forced[:2]), False)


def test_what_is_forced_says_nothing_of_a_drafter() -> None:
    text, told = [30 + i for i in range(30)], list[tuple[int, int]]()

    class Forcing(Few):
        def forced(self, most: int, ends: frozenset[int]) -> list[int]:
            return text[len(reply_so_far()) :][: min(most, 2)]

    def reply_so_far() -> list[int]:
        return list(sequences[0].reply) if sequences else []

    sequences: list[Sequence] = []
    made = Speculator(
        NoDrafter(),
        DraftLimits(97, step_rows=16, verify_rows=3, width=3),
        on_verified=lambda drafted, accepted: told.append((drafted, accepted)),
    )
    own = made.propose

    def propose(running: Many[Sequence]) -> bool:
        sequences[:] = running
        return own(running)

    made.propose = propose  # type: ignore[method-assign]
    Driven(made, text, constraint=Forcing(97, *range(97)))
    assert made.forced()[0] > 10 and not told


def test_a_drafter_that_loses_is_asked_as_rarely_where_a_grammar_holds() -> None:
    plain = Timed(always, drafting=0.01)
    constrained = Timed(always, drafting=0.01, constraint=Few(97, *range(97)))
    assert 0 < constrained.drafter.asked == plain.drafter.asked < 40


def test_a_drafter_that_is_often_wrong_gets_fewer_rows() -> None:
    timed = Timed(sometimes(0.35, 6))
    late = timed.rows[len(timed.rows) // 2 :]
    assert sum(2 <= rows <= 8 for rows in late) > 0.7 * len(late)


def test_a_drafter_that_is_never_right_costs_little() -> None:
    free = Timed(always)
    assert sum(map(Timed.seconds, free.rows)) < 1.1 * Timed.seconds(1) * len(free.rows)
    slow = Timed(always, drafting=0.004)
    assert slow.drafter.asked < 40


def test_every_token_is_an_event_s() -> None:
    backend = ScriptedBackend()
    with engine(backend, eos=frozenset(), drafter=oracle(backend), verify_width=4) as made:
        reply, _ = submit(made, PROMPT, max_tokens=9)
        assert isinstance(reply.wait(), Finished)
    assert [len(event.tokens) for event in reply.events if isinstance(event, Tokens)] == [1, 4, 4]


@given(budget=st.integers(1, 60), demands=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_fair_shares_equal_dealing_row_by_row(budget: int, demands: list[int]) -> None:
    dealt = [0] * len(demands)
    for _ in range(min(budget, sum(demands))):
        hungry = [i for i in range(len(demands)) if dealt[i] < demands[i]]
        dealt[min(hungry, key=lambda i: dealt[i])] += 1
    # Which of several takes a last odd row is free; how large the shares are is not.
    assert sorted(fair_shares(budget, demands)) == sorted(dealt)
    assert all(s <= d for s, d in zip(fair_shares(budget, demands), demands, strict=True))
