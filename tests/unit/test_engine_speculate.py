"""Speculative decoding in the engine: whatever a drafter says, the reply is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.draft.drafter import Draftable, Proposal
from luce.draft.ngram import NgramDrafter
from luce.engine.loop import Engine
from luce.engine.sequence import Finished, FinishReason, Tokens
from luce.engine.speculate import StepSeconds, choose_rows
from luce.errors import BackendError, DeviceError
from tests.support.drafters import ScriptedDrafter, sometimes
from tests.support.scripted_backend import ScriptedBackend, after
from tests.unit.test_engine_loop import EOS, Letters, Reply, engine, submit

PROMPT = (20, 21, 22)


def always(position: int) -> bool:
    return True


def never(position: int) -> bool:
    return False


def oracle(backend: ScriptedBackend, wrong: Callable[[int], bool] = never, **options: Any) -> ScriptedDrafter:
    return ScriptedDrafter(backend.reply, vocab=backend.vocab, wrong=wrong, **options)


def same(reply: Reply, plain: Reply) -> None:
    """Tokens, texts, log probabilities and end."""
    tokens, expected = (
        [token for event in one.events if isinstance(event, Tokens) for token in event.tokens] for one in (reply, plain)
    )
    assert tokens == expected
    ends = reply.finished(), plain.finished()
    assert len({(end.reason, end.text, end.stop) for end in ends}) == 1


def drafted(made: Engine) -> tuple[int, int, int]:
    stats = made.stats().draft
    assert stats is not None
    return stats.steps, stats.proposed, stats.accepted


@pytest.mark.parametrize("width", [2, 3, 8, 16])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("wrong", [never, always, sometimes(0.3, 1)], ids=["oracle", "adversary", "mixed"])
def test_the_reply_is_that_of_plain_decoding(wrong: Callable[[int], bool], recurrent: bool, width: int) -> None:
    backend = ScriptedBackend(recurrent=recurrent)
    with engine(backend, eos=frozenset(), drafter=oracle(backend, wrong), verify_width=width) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        assert reply.ids == backend.reply(PROMPT, 60) or reply.finished()
        timings = reply.finished().timings
        steps, proposed, accepted = drafted(made)
    assert reply.ids == backend.reply(PROMPT, 60)
    assert (timings.drafted, timings.accepted) == (proposed, accepted)
    if wrong is never:
        # The first token comes with the prompt, then every step gives `width` until the budget is used.
        assert accepted == proposed == 59 - steps - (59 % width == 1)
        assert steps == 59 // width + (59 % width > 1)
    elif wrong is always:
        assert accepted == 0 and steps >= 57


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

    def known(text: Sequence[int], count: int) -> Sequence[int]:
        at = len(text) - len(PROMPT)
        return plain.ids[at : at + count]

    drafter = ScriptedDrafter(known, vocab=backend.vocab, wrong=sometimes(0.2, 2))
    with engine(backend, drafter=drafter, verify_width=width) as made:
        reply, _ = submit(made, PROMPT, **({"max_tokens": 50} | params))
        reply.finished()
        steps, _, accepted = drafted(made)
    same(reply, plain)
    assert accepted > steps


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sequences_share_the_rows(data: st.DataObject) -> None:
    backend = ScriptedBackend(slots=data.draw(st.integers(1, 5)), chunk=16, recurrent=data.draw(st.booleans()))
    prompts = data.draw(st.lists(st.lists(st.integers(20, 60), min_size=1, max_size=40), min_size=1, max_size=7))
    width, share = data.draw(st.sampled_from([0, 4, 16])), data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    drafter = oracle(backend, sometimes(share, 3), chances=data.draw(st.booleans()))
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
    with engine(backend, eos=frozenset(), drafter=NgramDrafter(block=15)) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        reply.finished()
        steps, _, accepted = drafted(made)
    assert reply.ids == [30, 31, 32, 33, 34, 35] * 10
    assert accepted > 3 * steps


@pytest.mark.parametrize("error", [DeviceError("no memory"), ValueError("a bug")])
@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_fails_ends_drafting_only(where: str, error: Exception) -> None:
    backend, broken = ScriptedBackend(), [True]

    def hook(what: str) -> None:
        if what == where and broken[0]:
            raise error

    drafter = oracle(backend, hook=hook)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=8) as made:
        first, _ = submit(made, PROMPT, max_tokens=20)
        first.finished()
        stats = made.stats().draft
        assert stats is not None and stats.state.startswith("failed") and str(error) in stats.state
        assert not stats.steps
        broken[0] = False
        second, _ = submit(made, PROMPT, max_tokens=20)
        second.finished()
        stats = made.stats().draft
        assert stats is not None and stats.state == "on" and stats.accepted
        broken[0] = True
        replies = [submit(made, PROMPT, max_tokens=20)[0] for _ in range(9)]
        for reply in replies:
            reply.finished()
        last = made.stats().draft
        assert last is not None and last.state.startswith("given up") and last.steps == stats.steps
    assert [reply.ids for reply in (first, second, *replies)] == [backend.reply(PROMPT, 20)] * 11


@pytest.mark.parametrize("tokens", [[-1, 5], [5, 10**6], [3] * 40])
def test_ids_that_are_none_are_not_verified(tokens: list[int]) -> None:
    backend = ScriptedBackend()

    class Wild(NgramDrafter):
        def propose(self, asked: Sequence[Draftable]) -> list[Proposal]:
            return [Proposal(tokens, [0.5]) for _ in asked]

    with engine(backend, eos=frozenset(), drafter=Wild(block=15), verify_width=8) as made:
        reply, _ = submit(made, PROMPT, max_tokens=20)
        reply.finished()
    assert reply.ids == backend.reply(PROMPT, 20)


def test_a_failed_verification_fails_the_reply_only() -> None:
    fail = [False]

    def hook(step: Any) -> None:
        if fail[0] and any(span.tentative for span in step.spans):
            fail[0] = False
            raise DeviceError("lost")

    backend = ScriptedBackend(recurrent=True, hook=hook)
    with engine(backend, eos=frozenset(), drafter=oracle(backend), verify_width=8) as made:
        fail[0] = True
        reply, _ = submit(made, PROMPT, max_tokens=20)
        assert isinstance(reply.failed(), BackendError)
        again, _ = submit(made, PROMPT, max_tokens=20)
        again.finished()
    assert again.ids == backend.reply(PROMPT, 20)


def test_a_drafter_is_told_what_ran_and_when_nothing_does() -> None:
    backend = ScriptedBackend(chunk=4)
    drafter = oracle(backend)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=4) as made:
        reply, _ = submit(made, [20] * 6, max_tokens=9)
        reply.finished()
        made.wait_idle()
    spans = [(span.position, span.rows, span.tentative) for span in drafter.seen]
    assert spans == [(0, 4, False), (4, 2, False), (6, 4, True), (10, 4, True)]
    assert drafter.forgotten == [0] and drafter.idled == 1 and drafter.closed


def test_a_slow_drafter_that_is_never_right_is_asked_ever_more_rarely() -> None:
    backend = ScriptedBackend(delay=0.0005)

    def slow(what: str) -> None:
        if what == "propose":
            import time

            time.sleep(0.002)

    drafter = oracle(backend, always, hook=slow)
    with engine(backend, eos=frozenset(), drafter=drafter) as made:
        reply, _ = submit(made, PROMPT, max_tokens=300)
        reply.finished()
    assert reply.ids == backend.reply(PROMPT, 300)
    assert drafter.asked < 60


def test_rows_are_chosen_by_what_they_gain() -> None:
    flat: Callable[[int], float] = lambda rows: 1.0  # noqa: E731
    linear: Callable[[int], float] = lambda rows: float(rows)  # noqa: E731
    # Rows that cost nothing are all worth it, rows that cost a step each never are.
    assert choose_rows([[0.9, 0.5, 0.1]], 9, 1, flat, 0.0) == ([3], 2.5)
    assert choose_rows([[0.9, 0.5, 0.1]], 9, 1, linear, 0.0) == ([0], 1.0)
    # The likeliest rows of all sequences, as many as there is room for.
    assert choose_rows([[0.9, 0.5, 0.1], [0.7, 0.6]], 3, 2, flat, 0.0)[0] == [1, 2]
    # Drafting is paid whatever is verified: here it makes up for what it cost, here not.
    assert choose_rows([[0.9, 0.8]], 2, 1, flat, 0.5) == ([2], pytest.approx(1.8))
    counts, gain = choose_rows([[0.1]], 1, 1, flat, 0.5)
    assert counts == [1] and gain < 1
    # A step that becomes dear after three rows.
    assert choose_rows([[0.9] * 5], 5, 1, lambda rows: 1.0 if rows <= 3 else 2.5, 0.0)[0] == [2]


@given(st.lists(st.lists(st.floats(0, 1), max_size=5).map(lambda r: sorted(r, reverse=True)), min_size=1, max_size=4))
def test_the_choice_is_the_best_of_all(reaches: list[list[float]]) -> None:
    def seconds(rows: int) -> float:
        return 1 + 0.07 * rows + 0.5 * (rows > 6)

    room, plain = 7, len(reaches)
    counts, _ = choose_rows(reaches, room, plain, seconds, 0.3)

    def rate(chosen: Sequence[int]) -> float:
        expected = plain + sum(sum(reach[:n]) for reach, n in zip(reaches, chosen, strict=True))
        return expected / (0.3 + seconds(plain + sum(chosen)))

    every = np.ndindex(*[len(reach) + 1 for reach in reaches])
    assert rate(counts) == pytest.approx(max(rate(chosen) for chosen in every if sum(chosen) <= room))


def test_times_of_rows_that_were_not_tried_lie_between_those_that_were() -> None:
    seconds = StepSeconds()
    assert seconds(3) == 1.0
    seconds.add(1, 0.010)
    assert seconds(16) == 0.010
    seconds.add(9, 0.018)
    assert seconds(5) == pytest.approx(0.014) and seconds(16) == 0.018
    # A step that builds kernels does not count for long, nor does one that is held up once.
    seconds.add(4, 1.0)
    for _ in range(12):
        seconds.add(4, 0.012)
    assert seconds(4) < 0.013
    seconds.add(4, 5.0)
    assert seconds(4) < 0.014


def test_every_token_is_an_event_s() -> None:
    backend = ScriptedBackend()
    with engine(backend, eos=frozenset(), drafter=oracle(backend), verify_width=4) as made:
        reply, _ = submit(made, PROMPT, max_tokens=9)
        assert isinstance(reply.wait(), Finished)
    assert [len(event.tokens) for event in reply.events if isinstance(event, Tokens)] == [1, 4, 4]
