"""The engine with its thread, over the scripted backend: what replies are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from luce.engine.admission import Admission
from luce.engine.events import FinishReason, Progress, PromptLogits, PromptScores, Tokens
from luce.errors import ContextError, QueueFullError, RequestError
from luce.runtime.step import Step
from tests.support.daemons import within
from tests.support.replies import EOS, STOP, TIMEOUT, Gate, Letters, engine, submit
from tests.support.scripted_backend import ScriptedBackend, after


def test_the_events_of_a_reply() -> None:
    backend = ScriptedBackend(chunk=4, script=after([22], [30, 31, 32, 33, 34]))
    with engine(backend) as made:
        reply, _ = submit(made, [20] * 9 + [22], max_tokens=3)
        last = reply.finished()
    kinds = [type(event).__name__ for event in reply.events]
    assert kinds == ["Started", *["Progress"] * 4, *["Tokens"] * 3, "Finished"]
    assert reply.events[1:5] == [Progress(0, 10), Progress(4, 10), Progress(8, 10), Progress(10, 10)]
    assert reply.ids == [30, 31, 32]
    assert [t.text for e in reply.events if isinstance(e, Tokens) for t in e.tokens] == ["", "uv", ""]
    assert (last.reason, last.text, last.stop) == (FinishReason.LENGTH, "w", None)
    timings = last.timings
    assert (timings.prompt_tokens, timings.predicted_tokens, timings.cached_tokens) == (10, 3, 0)
    assert min(timings.queued, timings.prompt, timings.predicted) >= 0


def test_timings_say_where_the_time_went() -> None:
    gate = Gate()
    with engine(ScriptedBackend(chunk=4, slots=1, delay=0.02, hook=gate), eos=frozenset()) as made:
        first, _ = submit(made, [20] * 8, max_tokens=4)
        second, _ = submit(made, max_tokens=1)
        gate.open.set()
        one, two = first.finished().timings, second.finished().timings
    # Steps of 20 ms: 2 of prompt, 3 more of reply, and the second waits for all of them.
    assert one.prompt >= 0.04
    assert one.predicted >= 0.06
    assert two.queued >= 0.06


@pytest.mark.parametrize(
    ("options", "script", "reason", "ids", "text", "stop"),
    [
        ({}, [30, EOS], FinishReason.EOS, [30, EOS], "u", None),
        ({"ignore_eos": True, "max_tokens": 3}, [30, EOS], FinishReason.LENGTH, [30, EOS, 30], "uru", None),
        ({"stop_token_ids": frozenset({STOP})}, [30, 31, STOP], FinishReason.STOP, [30, 31, STOP], "uv", STOP),
        ({"min_tokens": 3}, [EOS], FinishReason.EOS, None, None, None),
        ({"output": "v"}, [30, 31, 32, 33], FinishReason.STOP, [30, 31], "u", "v"),
        ({"max_tokens": None}, [30, 31], FinishReason.CONTEXT, [30, 31] * 14, "uv" * 14, None),
        ({"max_tokens": 28}, [30, 31], FinishReason.LENGTH, [30, 31] * 14, "uv" * 14, None),
        ({"max_tokens": 29}, [30, 31], FinishReason.CONTEXT, [30, 31] * 14, "uv" * 14, None),
    ],
)
def test_why_a_reply_ends(
    options: dict[str, Any],
    script: list[int],
    reason: FinishReason,
    ids: list[int] | None,
    text: str | None,
    stop: str | int | None,
) -> None:
    options = dict(options)
    output = Letters(options.pop("output", None))
    backend = ScriptedBackend(context=32, script=after([25], script))
    with engine(backend) as made:
        reply, _ = submit(made, [20, 21, 22, 25], output=output, **({"max_tokens": 20} | options))
        last = reply.finished()
    assert (last.reason, last.stop) == (reason, stop)
    if ids is not None:
        assert (reply.ids, reply.text) == (ids, text)
    else:
        assert reply.ids.index(EOS) == 3


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 31])
def test_greedy_replies_are_the_backends(length: int) -> None:
    prompt = [(7 * i) % 90 + 5 for i in range(length)]
    backend = ScriptedBackend(chunk=4, context=64)
    with engine(backend, eos=frozenset()) as made:
        plain, _ = submit(made, prompt, max_tokens=20)
        # The same by whole logits.
        full, _ = submit(made, prompt, max_tokens=20, logprobs=0)
        plain.wait(), full.wait()
    assert plain.ids == full.ids == backend.reply(prompt, 20)


def test_log_probabilities_of_a_reply() -> None:
    backend = ScriptedBackend()
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, logprobs=3, temperature=1.0, seed=5, logit_bias={9: -100})
        reply.wait()
    history = [20, 21, 22]
    for token in (token for event in reply.events if isinstance(event, Tokens) for token in event.tokens):
        logits = backend.logits(history).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert token.logprob == pytest.approx(expected[token.id], abs=1e-5)
        assert [i for i, _ in token.top] == np.argsort(-logits, kind="stable")[:3].tolist()
        history.append(token.id)


def test_prompt_scores_and_logits() -> None:
    backend = ScriptedBackend(chunk=4)
    prompt = list(range(40, 50))
    with engine(backend) as made:
        reply, _ = submit(made, prompt, max_tokens=0, prompt_logprobs=2, prompt_logits=True)
        assert reply.finished().reason is FinishReason.LENGTH
    assert [type(e).__name__ for e in reply.events] == [
        "Started",
        "Progress",
        *["Progress", "PromptLogits"] * 3,
        "PromptScores",
        "Finished",
    ]
    exact = np.stack([backend.logits(prompt[: i + 1]) for i in range(10)])
    pieces = [e for e in reply.events if isinstance(e, PromptLogits)]
    assert [e.first for e in pieces] == [0, 4, 8]
    assert (np.concatenate([e.logits for e in pieces]) == exact).all()
    (scores,) = [e for e in reply.events if isinstance(e, PromptScores)]
    assert [t.id for t in scores.tokens] == prompt[1:]
    wide = exact.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    for index, token in enumerate(scores.tokens):
        assert token.logprob == pytest.approx(expected[index, prompt[index + 1]], abs=1e-5)
        assert [i for i, _ in token.top] == np.argsort(-wide[index], kind="stable")[:2].tolist()


def test_a_prompt_that_does_not_fit() -> None:
    with engine(ScriptedBackend(context=32)) as made:
        with pytest.raises(ContextError) as caught:
            submit(made, [5] * 32)
        assert str(caught.value) == (
            "This model's maximum context length is 32 tokens. However, your messages resulted in 32 tokens. "
            "Please reduce the length of the messages."
        )
        one, _ = submit(made, [5] * 31, max_tokens=None, ignore_eos=True)
        assert one.finished().reason is FinishReason.CONTEXT
        assert len(one.ids) == 1
        # Reading alone needs no room for a reply.
        none, _ = submit(made, [5] * 32, max_tokens=0)
        assert none.finished().reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", [[], [5, 97], [-1], [2**70]], ids=str)
def test_a_prompt_that_cannot_be_read(prompt: list[int]) -> None:
    with engine(ScriptedBackend()) as made, pytest.raises(RequestError) as caught:
        submit(made, prompt)
    assert caught.value.param == "prompt"


def test_a_bias_of_an_unknown_token_is_refused_and_an_unknown_stop_token_never_comes() -> None:
    with engine(ScriptedBackend()) as made:
        with pytest.raises(RequestError) as caught:
            submit(made, logit_bias={97: 1.0})
        assert caught.value.param == "logit_bias"
        reply, _ = submit(made, stop_token_ids=frozenset({97, -3}), min_tokens=2)
        reply.finished()


def test_the_next_step_is_prepared_while_one_runs() -> None:
    steps: list[Step] = []
    backend = ScriptedBackend(slots=2, hook=steps.append)
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, [50, 51], max_tokens=20)
        reply.finished()
    _, first, *others = steps
    assert len(others) == 18 and all(step.output_rows is first.output_rows for step in others)
    assert reply.ids == backend.reply([50, 51], 20)


def test_the_queue_is_bounded() -> None:
    gate = Gate()
    with engine(ScriptedBackend(slots=2, hook=gate), max_queue=3) as made:
        accepted = [submit(made)[0] for _ in range(5)]
        gate.wait()
        with pytest.raises(QueueFullError) as caught:
            submit(made)
        assert 1 <= caught.value.retry_after <= 60
        gate.open.set()
        # Whoever sees a last event may come again at once.
        accepted[0].finished()
        accepted.append(submit(made)[0])
        for reply in accepted:
            reply.finished()


def test_no_queue_at_all() -> None:
    gate = Gate()
    with engine(ScriptedBackend(slots=1, hook=gate), max_queue=0) as made:
        first, _ = submit(made)
        with pytest.raises(QueueFullError):
            submit(made)
        gate.open.set()
        for _ in range(5):
            first.finished()
            first, _ = submit(made)
        first.finished()


def test_statistics() -> None:
    gate = Gate()
    backend = ScriptedBackend(slots=2, chunk=4, hook=gate)
    with engine(backend, eos=frozenset()) as made:
        assert made.stats().stalled == 0
        replies = [submit(made, [20 + i] * 70, max_tokens=5)[0] for i in range(3)]
        gate.wait()
        time.sleep(0.01)
        stats = made.stats()
        assert stats.stalled > 0
        assert (stats.slots, stats.waiting + stats.running) == (2, 3)
        assert stats.pages_total == sum(backend.capacity.pages)
        assert stats.pages_used > 0
        gate.open.set()
        for reply in replies:
            reply.finished()
        assert made.wait_idle(TIMEOUT)
        stats = made.stats()
    assert (stats.prompt_tokens, stats.predicted_tokens, stats.cancelled) == (210, 15, 0)
    assert stats.steps == len(backend.steps)


def test_an_idle_engine_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0
    wait = Admission.wait_for_work

    def counted(self: Admission, more: Callable[[], bool]) -> None:
        nonlocal rounds
        rounds += 1
        wait(self, more)

    monkeypatch.setattr(Admission, "wait_for_work", counted)
    with engine(ScriptedBackend()) as made:
        submit(made)[0].finished()
        # Once before the reply, and once behind it.
        assert within(TIMEOUT, lambda: rounds == 2)
        time.sleep(0.05)
        assert rounds == 2


def test_equal_seeds_give_equal_replies_whatever_runs_beside() -> None:
    backend = ScriptedBackend(slots=4, chunk=8)
    sampled: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "max_tokens": 40, "repetition_penalty": 1.1}
    with engine(backend, eos=frozenset()) as made:
        alone, _ = submit(made, [33, 44], seed=9, **sampled)
        alone.finished()
        others = [submit(made, [50 + i] * (5 + 9 * i), seed=i, **sampled)[0] for i in range(3)]
        beside, _ = submit(made, [33, 44], seed=9, **sampled)
        random, _ = submit(made, [33, 44], **sampled)
        assert beside.finished().seed == 9
        for reply in others:
            reply.finished()
        again, _ = submit(made, [33, 44], seed=random.finished().seed, **sampled)
        again.finished()
    assert beside.ids == alone.ids
    assert random.ids == again.ids != alone.ids
