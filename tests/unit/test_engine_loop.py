"""The engine with its thread, over the scripted backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.engine.loop import Engine, Ticket
from luce.engine.sequence import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    PromptLogits,
    PromptScores,
    SamplingParams,
    Started,
    Tokens,
)
from luce.errors import (
    BackendError,
    ContextError,
    DeviceError,
    LuceError,
    QueueFullError,
    RequestError,
    ShardLostError,
    UnavailableError,
)
from luce.runtime.step import Step
from tests.support.scripted_backend import ScriptedBackend, after

EOS, STOP = 1, 2
PATIENCE = 60.0


class Letters:
    """Text of a reply: id 10 is "a" and so on; what follows the last complete pair of letters is held back."""

    def __init__(self, stop: str | None = None, broken: bool = False) -> None:
        self.stopped: str | None = None
        self._stop = stop
        self._held = ""
        self._broken = broken

    def push(self, token: int) -> str:
        if self._broken:
            raise ValueError("no such letter")
        self._held += chr(ord("a") + (token - 10) % 26)
        if len(self._held) < 2:
            return ""
        text, self._held = self._held, ""
        if self._stop is not None and self._stop in text:
            self.stopped = self._stop
            return text[: text.index(self._stop)]
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


@dataclass
class Reply:
    """Collects events; `wait` returns the last one."""

    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    on: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self.over.set()
        if self.on is not None:
            self.on(event)

    def wait(self) -> Finished | Failed:
        assert self.over.wait(PATIENCE), "no last event"
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    def finished(self) -> Finished:
        last = self.wait()
        assert isinstance(last, Finished), last
        return last

    def failed(self) -> LuceError:
        last = self.wait()
        assert isinstance(last, Failed), last
        return last.error

    @property
    def ids(self) -> list[int]:
        return [token.id for event in self.events if isinstance(event, Tokens) for token in event.tokens]

    @property
    def text(self) -> str:
        return "".join(t.text for e in self.events if isinstance(e, Tokens) for t in e.tokens) + self.finished().text


class Gate:
    """A hook that holds every step until it is opened, or `let` through; `reached` says that a step waits."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self._allowed = threading.Semaphore(0)

    def __call__(self, step: Step) -> None:
        self.reached.set()
        while not self.open.is_set() and not self._allowed.acquire(timeout=0.01):
            pass

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE)

    def let(self) -> None:
        """Let one step pass."""
        self._allowed.release()


@contextmanager
def engine(backend: ScriptedBackend, **options: Any) -> Iterator[Engine]:
    made = Engine(backend, **({"eos": frozenset({EOS}), "max_queue": 64, "chunk": backend.chunk} | options))
    try:
        yield made
        assert made.wait_idle(PATIENCE)
        stats = made.stats()
        assert (stats.queued, stats.running, stats.pages_used, stats.stalled) == (0, 0, 0, 0)
    finally:
        if isinstance(backend.hook, Gate):
            backend.hook.open.set()
        made.close()
    assert backend.broken is None


def submit(
    made: Engine,
    prompt: Sequence[int] = (20, 21, 22),
    *,
    output: Any = None,
    on: Callable[[Event], None] | None = None,
    session: str = "",
    timeout: float = 0,
    **params: Any,
) -> tuple[Reply, Ticket]:
    reply = Reply(on=on)
    ticket = made.submit(
        prompt,
        SamplingParams(**({"max_tokens": 6} | params)),
        output=output or Letters(),
        on_event=reply,
        session=session,
        timeout=timeout,
    )
    return reply, ticket


def test_the_events_of_a_reply() -> None:
    backend = ScriptedBackend(chunk=4, script=after([22], [30, 31, 32, 33, 34]))
    with engine(backend) as made:
        reply, _ = submit(made, [20] * 9 + [22], max_tokens=3)
        last = reply.finished()
    kinds = [type(event).__name__ for event in reply.events]
    assert kinds == ["Started", "Progress", "Progress", "Progress", "Tokens", "Tokens", "Tokens", "Finished"]
    assert reply.events[1:4] == [Progress(4, 10), Progress(8, 10), Progress(10, 10)]
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


@pytest.mark.parametrize("stage", ["queued", "reading", "decoding"])
def test_cancellation(stage: str) -> None:
    reached = threading.Event()
    gate = Gate()
    backend = ScriptedBackend(slots=2, chunk=4, context=256)
    with engine(backend, eos=frozenset()) as made:
        neighbour, _ = submit(made, [50, 51], max_tokens=100)
        kind = {"queued": Finished, "reading": Progress, "decoding": Tokens}[stage]

        def watch(event: Event) -> None:
            if isinstance(event, kind) and not reached.is_set():
                reached.set()
                backend.hook = gate

        if stage == "queued":
            submit(made, [52, 53], max_tokens=100)
            reached.set()
        victim, ticket = submit(made, [60] * 20, max_tokens=None, on=watch)
        assert reached.wait(PATIENCE)
        seen = len(victim.events)
        ticket.cancel()
        ticket.cancel()
        gate.open.set()
        last = victim.finished()
        assert last.reason is FinishReason.CANCELLED
        # Held by the gate, the step that ran when it was cancelled is the last that it may still have had.
        assert stage == "queued" or len(victim.events) <= seen + 3
        neighbour.finished()
        assert made.wait_idle(PATIENCE)
        ticket.cancel()
        assert not made._inbox
        assert made.stats().cancelled == 1
    assert neighbour.ids == backend.reply([50, 51], 100)
    if stage == "queued":
        assert [type(e).__name__ for e in victim.events] == ["Finished"]


def test_a_sequence_cancels_itself_from_its_sink() -> None:
    box: list[Ticket] = []
    with engine(ScriptedBackend()) as made:
        held = threading.Event()

        def watch(event: Event) -> None:
            if isinstance(event, Started):
                held.wait(PATIENCE)
            if isinstance(event, Tokens):
                box[0].cancel()

        reply, ticket = submit(made, max_tokens=None, on=watch)
        box.append(ticket)
        held.set()
        assert reply.finished().reason is FinishReason.CANCELLED
    assert len(reply.ids) == 1


def test_a_sink_may_submit() -> None:
    with engine(ScriptedBackend(slots=1), max_queue=0) as made:
        second: list[Reply] = []
        again = threading.Event()

        def watch(event: Event) -> None:
            if isinstance(event, Finished):
                second.append(submit(made)[0])
                again.set()

        submit(made, on=watch)
        assert again.wait(PATIENCE)
        second[0].finished()


@pytest.mark.parametrize(
    "error", [BackendError("shard cuda:1 is gone"), DeviceError("cuda:0: launch failed"), RuntimeError("odd")], ids=repr
)
def test_a_failed_step_fails_its_sequences_only(error: Exception) -> None:
    gate = Gate()
    backend = ScriptedBackend(slots=2, hook=gate)
    with engine(backend, eos=frozenset()) as made:
        # The first step holds one or two of them; the third waits for a slot.
        lost = [submit(made)[0] for _ in range(2)]
        gate.wait()
        waits, _ = submit(made, [70, 71])

        def fail(step: Step) -> None:
            if len(step.spans) == 2:
                backend.hook = None
                raise error

        backend.hook = fail
        gate.open.set()
        for reply in lost:
            found = reply.failed()
            assert isinstance(found, BackendError)
            assert str(error) in str(found)
            assert found.status == 500
        waits.finished()
        later, _ = submit(made)
        later.finished()
    assert waits.ids == backend.reply([70, 71], 6)
    assert later.ids == backend.reply([20, 21, 22], 6)


def test_a_backend_that_lost_its_state_fails_what_has_begun() -> None:
    gate = Gate()
    backend = ScriptedBackend(slots=2, hook=gate)
    with engine(backend, eos=frozenset()) as made:
        begun = [submit(made)[0] for _ in range(2)]
        gate.wait()
        waits, _ = submit(made, [70, 71])

        def lose(step: Step) -> None:
            if len(step.spans) == 2:
                backend.hook, backend.gone = None, "shard 1 is gone"

        backend.hook = lose
        gate.open.set()
        for reply in begun:
            found = reply.failed()
            assert isinstance(found, ShardLostError) and str(found) == "shard 1 is gone"
        waits.finished()
    assert waits.ids == backend.reply([70, 71], 6)


@pytest.mark.parametrize("kind", [Started, Progress, Tokens, Finished])
def test_a_sink_that_raises_fails_its_own_sequence(kind: type[Event]) -> None:
    backend = ScriptedBackend()

    def watch(event: Event) -> None:
        if isinstance(event, kind):
            raise RuntimeError("the client is gone")

    with engine(backend, eos=frozenset()) as made:
        good, _ = submit(made, [40, 41])
        bad, _ = submit(made, on=watch)
        bad.wait()
        good.finished()
        assert made.wait_idle(PATIENCE)
        assert sum(isinstance(e, Finished | Failed) for e in bad.events) == 1
        assert isinstance(bad.events[-1], Finished if kind is Finished else Failed)
    assert good.ids == backend.reply([40, 41], 6)


def test_an_output_that_raises_fails_its_own_sequence() -> None:
    backend = ScriptedBackend()
    with engine(backend, eos=frozenset()) as made:
        good, _ = submit(made, [40, 41])
        bad, _ = submit(made, output=Letters(broken=True))
        assert "no such letter" in str(bad.failed())
        good.finished()
    assert good.ids == backend.reply([40, 41], 6)


def test_banning_everything_fails_as_a_request_error() -> None:
    with engine(ScriptedBackend(vocab=30)) as made:
        reply, _ = submit(made, logit_bias=dict.fromkeys(range(30), -100.0))
        assert isinstance(reply.failed(), RequestError)


def test_deadlines() -> None:
    gate = Gate()
    with engine(ScriptedBackend(slots=1, hook=gate, context=4096)) as made:
        runs, _ = submit(made, max_tokens=None, ignore_eos=True, timeout=0.01)
        waits, _ = submit(made, timeout=0.01)
        patient, _ = submit(made, timeout=1000)
        gate.wait()
        time.sleep(0.02)
        gate.open.set()
        assert runs.finished().reason is FinishReason.DEADLINE
        assert waits.finished().reason is FinishReason.DEADLINE
        assert waits.ids == []
        patient.finished()


def test_the_engines_own_deadline() -> None:
    gate = Gate()
    with engine(ScriptedBackend(hook=gate), timeout=0.01) as made:
        reply, _ = submit(made, max_tokens=None, ignore_eos=True, timeout=1000)
        time.sleep(0.02)
        gate.open.set()
        assert reply.finished().reason is FinishReason.DEADLINE
        assert len(reply.ids) <= 1


def test_the_longest_wait() -> None:
    gate = Gate()
    with engine(ScriptedBackend(slots=1, hook=gate), max_queue_seconds=0.01) as made:
        runs, _ = submit(made)
        gate.wait()
        waits, _ = submit(made)
        time.sleep(0.02)
        gate.open.set()
        error = waits.failed()
        assert isinstance(error, QueueFullError)
        assert "--max-queue-seconds" in str(error)
        runs.wait()


def test_drain_and_stop() -> None:
    gate = Gate()
    with engine(ScriptedBackend(slots=1, hook=gate)) as made:
        runs, _ = submit(made, max_tokens=None, ignore_eos=True)
        waits, _ = submit(made)
        gate.wait()
        made.drain()
        made.drain()
        with pytest.raises(UnavailableError) as caught:
            submit(made)
        assert caught.value.code == "draining"
        assert not made.wait_idle(0.01)
        gate.let()
        error = waits.failed()
        assert isinstance(error, UnavailableError)
        assert error.code == "draining"
        # What runs goes on until it is told to stop, and then to the end of its step.
        gate.let()
        made.stop_running()
        gate.let()
        assert runs.finished().reason is FinishReason.SHUTDOWN
        assert 1 <= len(runs.ids) <= 3
        assert made.wait_idle(PATIENCE)


def test_close_ends_what_runs_and_what_waits() -> None:
    gate = Gate()
    backend = ScriptedBackend(slots=1, hook=gate)
    made = Engine(backend, eos=frozenset(), max_queue=4, chunk=64)
    runs, ticket = submit(made, max_tokens=None)
    gate.wait()
    waits, _ = submit(made)
    closing = threading.Thread(target=made.close)
    closing.start()
    while not made._closing:
        time.sleep(0.001)
    gate.let()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert runs.finished().reason is FinishReason.SHUTDOWN
    assert len(runs.ids) == 1
    error = waits.failed()
    assert isinstance(error, UnavailableError)
    assert error.code == "draining"
    made.close()
    ticket.cancel()
    assert not [t for t in threading.enumerate() if t.name == "luce-engine"]
    with pytest.raises(UnavailableError):
        submit(made)
    assert not backend.closed


def test_a_sink_may_close_the_engine() -> None:
    made = Engine(ScriptedBackend(), eos=frozenset(), max_queue=4, chunk=64)
    reply, _ = submit(made, max_tokens=None, on=lambda event: made.close() if isinstance(event, Tokens) else None)
    assert reply.finished().reason is FinishReason.SHUTDOWN
    assert len(reply.ids) == 1
    made.close()


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
        assert (stats.slots, stats.queued + stats.running) == (2, 3)
        assert stats.pages_total == sum(backend.pages)
        assert stats.pages_used > 0
        gate.open.set()
        for reply in replies:
            reply.finished()
        assert made.wait_idle(PATIENCE)
        stats = made.stats()
    assert (stats.prompt_tokens, stats.predicted_tokens, stats.cancelled) == (210, 15, 0)
    assert stats.steps == len(backend.steps)


def test_an_idle_engine_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0
    turn = Engine._turn

    def counted(self: Engine) -> bool:
        nonlocal rounds
        rounds += 1
        return turn(self)

    monkeypatch.setattr(Engine, "_turn", counted)
    with engine(ScriptedBackend()) as made:
        submit(made)[0].finished()
        assert made.wait_idle(PATIENCE)
        time.sleep(0.02)
        before = rounds
        time.sleep(0.05)
        assert rounds == before


def test_a_defect_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    made = Engine(ScriptedBackend(slots=1, hook=gate), eos=frozenset(), max_queue=4, chunk=64)
    runs, _ = submit(made)
    waits, _ = submit(made)
    gate.wait()
    monkeypatch.setattr(made._scheduler, "plan", lambda: 1 / 0)
    gate.open.set()
    for reply in (runs, waits):
        assert isinstance(reply.failed(), BackendError)
    made.close()
    with pytest.raises(UnavailableError):
        submit(made)
    # So that a watchdog sees it.
    assert made.stats().stalled > 0


def test_a_cancel_from_a_destructor_inside_the_lock() -> None:
    with engine(ScriptedBackend()) as made:
        reply, ticket = submit(made, max_tokens=None, ignore_eos=True)
        with made._lock:
            ticket.cancel()
        assert reply.finished().reason in (FinishReason.CANCELLED, FinishReason.CONTEXT)


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


@dataclass(frozen=True)
class Client:
    """What one client sends, and after how many events it cancels."""

    prompt: tuple[int, ...]
    max_tokens: int | None
    temperature: float
    session: str
    patience: int | None
    breaks: bool


clients = st.lists(
    st.builds(
        Client,
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=120).map(tuple),
        max_tokens=st.none() | st.integers(0, 10),
        temperature=st.sampled_from([0.0, 1.0]),
        session=st.sampled_from(["", "a", "b"]),
        patience=st.none() | st.integers(0, 8),
        breaks=st.booleans(),
    ),
    max_size=9,
)


@given(clients=clients, failures=st.sets(st.integers(1, 30), max_size=2), slots=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_any_clients_get_one_last_event_each(clients: list[Client], failures: set[int], slots: int) -> None:
    number = 0

    def hook(step: Step) -> None:
        nonlocal number
        number += 1
        if number in failures:
            raise BackendError("a shard is gone")

    backend = ScriptedBackend(slots=slots, chunk=16, context=160, windows=(None, 30), hook=hook)
    replies: list[Reply] = []
    with engine(backend, eos=frozenset()) as made:
        for client in clients:
            tickets: list[Ticket] = []
            count = 0

            def watch(event: Event, client: Client = client, tickets: list[Ticket] = tickets) -> None:
                nonlocal count
                count += 1
                if client.patience is not None and count % 9 == client.patience:
                    if client.breaks:
                        raise RuntimeError("gone")
                    for ticket in tickets:
                        ticket.cancel()

            reply, ticket = submit(
                made,
                client.prompt,
                max_tokens=client.max_tokens,
                temperature=client.temperature,
                seed=7,
                session=client.session,
                on=watch,
            )
            tickets.append(ticket)
            replies.append(reply)
        assert made.wait_idle(PATIENCE)
    assert backend.broken is None
    for client, reply in zip(clients, replies, strict=True):
        assert [isinstance(e, Finished | Failed) for e in reply.events] == [False] * (len(reply.events) - 1) + [True]
        if client.temperature == 0:
            assert reply.ids == backend.reply(client.prompt, len(reply.ids))
        last = reply.events[-1]
        if isinstance(last, Finished) and last.reason is not FinishReason.CANCELLED:
            room = 160 - len(client.prompt)
            assert len(reply.ids) == (room if client.max_tokens is None else min(room, client.max_tokens))


def test_many_threads_submit_and_cancel() -> None:
    backend = ScriptedBackend(slots=3, chunk=16)
    replies: list[Reply] = []
    refused = 0
    with engine(backend, max_queue=5) as made:

        def client(seed: int) -> None:
            nonlocal refused
            random = np.random.default_rng(seed)
            for _ in range(15):
                try:
                    reply, ticket = submit(made, random.integers(0, 97, int(random.integers(1, 60))).tolist())
                except QueueFullError:
                    refused += 1
                    continue
                replies.append(reply)
                if random.random() < 0.5:
                    ticket.cancel()
                elif random.random() < 0.5:
                    reply.wait()

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made.wait_idle(PATIENCE)
    assert len(replies) + refused == 90
    for reply in replies:
        assert sum(isinstance(e, Finished | Failed) for e in reply.events) == 1
        assert isinstance(reply.events[-1], Finished)
