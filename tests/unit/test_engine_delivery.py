"""The engine with its thread, over the scripted backend: every request gets one last event, whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.engine.admission import SequenceHandle
from luce.engine.events import Event, Failed, Finished, FinishReason, Progress, Started, Tokens
from luce.errors import BackendError, DeviceError, QueueFullError, RequestError, ShardLostError, UnavailableError
from luce.runtime.step import Output, Step
from tests.support.replies import TIMEOUT, Gate, Letters, Reply, engine, make_engine, submit
from tests.support.scripted_backend import ScriptedBackend


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
        assert reached.wait(TIMEOUT)
        seen = len(victim.events)
        ticket.cancel()
        ticket.cancel()
        gate.open.set()
        last = victim.finished()
        assert last.reason is FinishReason.CANCELLED
        # Held by the gate, the step that ran when it was cancelled is the last that it may still have had.
        assert stage == "queued" or len(victim.events) <= seen + 3
        neighbour.finished()
        assert made.wait_idle(TIMEOUT)
        ticket.cancel()
        assert not made.parts.admission.commands
        assert made.stats().cancelled == 1
    assert neighbour.ids == backend.reply([50, 51], 100)
    if stage == "queued":
        assert [type(e).__name__ for e in victim.events] == ["Finished"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_sequence_cancels_itself_from_its_sink(asynchronous: bool) -> None:
    box: list[SequenceHandle] = []
    with engine(ScriptedBackend(asynchronous=asynchronous)) as made:
        held = threading.Event()

        def watch(event: Event) -> None:
            if isinstance(event, Started):
                held.wait(TIMEOUT)
            if isinstance(event, Tokens):
                box[0].cancel()

        reply, ticket = submit(made, max_tokens=None, on=watch)
        box.append(ticket)
        held.set()
        assert reply.finished().reason is FinishReason.CANCELLED
    # Devices that work beside the host compute the next token by then.
    assert len(reply.ids) == 1 + asynchronous


def watch_steps(backend: ScriptedBackend) -> list[bool]:
    """Its one element says whether a step of the backend runs."""
    runs, forward = [False], backend.forward

    def watched(step: Step, queued: Callable[[], None]) -> Output:
        runs[0] = True
        try:
            return forward(step, queued)
        finally:
            runs[0] = False

    backend.forward = watched  # type: ignore[assignment,method-assign]
    return runs


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_are_delivered_while_devices_work_that_work_beside_the_host(asynchronous: bool) -> None:
    backend = ScriptedBackend(asynchronous=asynchronous)
    runs, delivered = watch_steps(backend), list[bool]()

    def note(event: Event) -> None:
        if isinstance(event, Tokens):
            delivered.append(runs[0])

    with engine(backend, eos=frozenset()) as made:
        submit(made, max_tokens=6, on=note)[0].finished()
    # Behind the last token there is no step.
    assert delivered == [asynchronous] * 5 + [False]


def test_a_sink_that_fails_while_a_step_runs_ends_its_reply_behind_the_step() -> None:
    backend = ScriptedBackend(slots=2)
    runs, ended_in = watch_steps(backend), list[bool]()

    def fail(event: Event) -> None:
        if isinstance(event, Failed):
            ended_in.append(runs[0])
        if isinstance(event, Tokens):
            raise RuntimeError("the client is gone")

    with engine(backend, eos=frozenset()) as made:
        good, _ = submit(made, [50, 51], max_tokens=30)
        bad, _ = submit(made, [40, 41], max_tokens=30, on=fail)
        assert "the client is gone" in str(bad.failed()) and len(bad.ids) == 1
        good.finished()
    assert ended_in == [False] and good.ids == backend.reply([50, 51], 30)


def test_a_sink_may_submit() -> None:
    with engine(ScriptedBackend(slots=1), max_queue=0) as made:
        second: list[Reply] = []
        again = threading.Event()

        def watch(event: Event) -> None:
            if isinstance(event, Finished):
                second.append(submit(made)[0])
                again.set()

        submit(made, on=watch)
        assert again.wait(TIMEOUT)
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
        assert made.wait_idle(TIMEOUT)
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
        assert made.wait_idle(TIMEOUT)


def test_close_ends_what_runs_and_what_waits() -> None:
    gate = Gate()
    backend = ScriptedBackend(slots=1, hook=gate)
    made = make_engine(backend, chunk=64)
    runs, ticket = submit(made, max_tokens=None)
    gate.wait()
    waits, _ = submit(made)
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    while not made.parts.admission.closing:
        time.sleep(0.001)
    gate.let()
    closing.join(TIMEOUT)
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_sink_may_close_the_engine(asynchronous: bool) -> None:
    made = make_engine(ScriptedBackend(asynchronous=asynchronous), chunk=64)
    reply, _ = submit(made, max_tokens=None, on=lambda event: made.close() if isinstance(event, Tokens) else None)
    assert reply.finished().reason is FinishReason.SHUTDOWN
    assert len(reply.ids) == 1 + asynchronous
    made.close()


def test_a_defect_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    made = make_engine(ScriptedBackend(slots=1, hook=gate))
    runs, _ = submit(made)
    waits, _ = submit(made)
    gate.wait()
    monkeypatch.setattr(made.parts.scheduler, "schedule", lambda: 1 / 0)
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
        with made.parts.admission.lock:
            ticket.cancel()
        assert reply.finished().reason in (FinishReason.CANCELLED, FinishReason.CONTEXT)


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
@settings(max_examples=60)
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
            tickets: list[SequenceHandle] = []
            count = 0

            def watch(event: Event, client: Client = client, tickets: list[SequenceHandle] = tickets) -> None:
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
        assert made.wait_idle(TIMEOUT)
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
        assert made.wait_idle(TIMEOUT)
    assert len(replies) + refused == 90
    for reply in replies:
        assert sum(isinstance(e, Finished | Failed) for e in reply.events) == 1
        assert isinstance(reply.events[-1], Finished)
