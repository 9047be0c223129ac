"""The backend moves behind running replies: they have the tokens of an undisturbed run, and nothing is read twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from luce.draft.ngram import NgramDrafter
from luce.engine import admission, relocation
from luce.engine.admission import Admission
from luce.engine.loop import Engine
from luce.errors import BackendError, QueueFullError, ShardLostError, UnavailableError
from luce.runtime.device import Memory
from luce.runtime.step import Step
from tests.support.drafters import oracle, sometimes
from tests.support.replies import TIMEOUT, engine, submit
from tests.support.scripted_backend import ScriptedBackend

PROMPT = list(range(20, 32))
TOKENS = 40


def wipe(backend: ScriptedBackend) -> None:
    """Nothing is left on the devices."""
    for rows in backend.state.rows:
        rows[:] = -1
    # Without recurrent states it only knows by these what the pages have to hold.
    for slot in range(backend.capacity.slots if backend.capacity.recurrent else 0):
        backend.state.seen[slot], backend.state.proposed[slot] = [], []


class Held:
    """A hook that stops the engine in the step of a number until `go`, so that a command comes right behind it."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, step: Step) -> None:
        self.count += 1
        if self.count == self.at:
            self.reached.set()
            assert self.go.wait(TIMEOUT)


def move_at(made: Engine, hook: Held, replace: Any, drain: float = 0.0) -> list[BaseException | None]:
    """Move behind the step at which the hook stops; returns, once that has been, with what it raised."""
    found: list[BaseException | None] = []

    def move() -> None:
        try:
            made.relocate(replace, drain)
            found.append(None)
        except Exception as error:
            found.append(error)

    assert hook.reached.wait(TIMEOUT)
    thread, posted, post = threading.Thread(target=move), threading.Event(), Admission.post

    def watched(self: Admission, command: Callable[[], None]) -> bool:
        done = post(self, command)
        posted.set()
        return done

    with mock.patch.object(Admission, "post", watched):
        thread.start()
        assert posted.wait(TIMEOUT)
    hook.go.set()
    thread.join(TIMEOUT)
    return found


BACKENDS: dict[str, dict[str, Any]] = {
    "pages": {},
    "windows": {"windows": (None, 64)},
    "recurrent": {"recurrent": True},
    "small chunks": {"chunk": 4},
    "late copies": {"lag": 2, "recurrent": True},
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("at", [1, 2, 3, 20])
@pytest.mark.parametrize("cache", [0, 1 << 22], ids=["", "cache"])
def test_tokens_are_those_of_an_undisturbed_run(backend: dict[str, Any], at: int, cache: int) -> None:
    resumes = bool(cache) and not backend.get("recurrent")
    scripted = ScriptedBackend(slots=2, context=512, resumes=resumes, **backend)
    with engine(scripted, eos=frozenset(), cache_bytes=cache) as made:
        hook = scripted.hook = Held(at)
        first, _ = submit(made, PROMPT * 20, max_tokens=TOKENS)
        other, _ = submit(made, [70, 71], max_tokens=TOKENS)
        assert move_at(made, hook, lambda: wipe(scripted)) == [None]
        first.finished()
        other.finished()
        rows = sum(rows for rows, _ in scripted.steps)
        # Requests that come later find nothing of what the devices had.
        later, _ = submit(made, PROMPT * 20, max_tokens=4)
        later.finished()
    assert first.ids == scripted.reply(PROMPT * 20, TOKENS) and other.ids == scripted.reply([70, 71], TOKENS)
    assert later.ids == first.ids[:4]
    # Nothing was computed twice.
    assert rows == len(PROMPT) * 20 + 2 + 2 * (TOKENS - 1)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("at", [3, 4, 5, 9])
def test_accepted_drafts_are_kept(at: int, recurrent: bool) -> None:
    backend = ScriptedBackend(slots=2, context=256, recurrent=recurrent)
    drafter = oracle(backend, sometimes(0.3, 1), block=4)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=5) as made:
        hook = backend.hook = Held(at)
        drafted, _ = submit(made, PROMPT, max_tokens=TOKENS)
        assert move_at(made, hook, lambda: wipe(backend)) == [None]
        drafted.finished()
        assert hook.count < TOKENS
    assert drafted.ids == backend.reply(PROMPT, TOKENS)


def test_steps_have_as_many_rows_as_the_new_devices_take() -> None:
    backend = ScriptedBackend(slots=6, context=256, invariant_rows=64)

    def move() -> None:
        wipe(backend)
        backend.capacity = replace(backend.capacity, invariant_rows=16)

    with engine(backend, eos=frozenset(), drafter=oracle(backend, sometimes(0.3, 1), block=4), verify_width=5) as made:
        hook, begun = Held(16), threading.Event()

        def wait(step: Step) -> None:
            assert begun.wait(TIMEOUT)
            hook(step)

        backend.hook = wait
        drafted = [submit(made, PROMPT[n:], max_tokens=120)[0] for n in range(6)]
        begun.set()
        assert move_at(made, hook, move) == [None]
        for reply in drafted:
            reply.finished()
    # Behind the prompts.
    assert max(rows for rows, _ in backend.steps[8:16]) > 16 >= max(rows for rows, _ in backend.steps[16:])
    assert [reply.ids for reply in drafted] == [backend.reply(PROMPT[n:], 120) for n in range(6)]


def test_short_prompts_share_steps_where_the_new_devices_say_so() -> None:
    backend = ScriptedBackend(slots=6, context=256, chunk=256)

    def move() -> None:
        wipe(backend)
        backend.capacity = replace(backend.capacity, shares_prompts=True)

    def most_prompts(made: Engine) -> int:
        begin, begun = len(backend.steps), threading.Event()
        backend.hook = lambda step: None if begun.wait(TIMEOUT) else pytest.fail("no prompts came")
        replies = [submit(made, [*range(40 + n)], max_tokens=1)[0] for n in range(4)]
        begun.set()
        for reply in replies:
            reply.finished()
        return max(rows for rows, _ in backend.steps[begin:])

    with engine(backend, eos=frozenset()) as made:
        assert most_prompts(made) < 80
        hook = backend.hook = Held(3)
        reply, _ = submit(made, PROMPT, max_tokens=TOKENS)
        assert move_at(made, hook, move) == [None]
        reply.finished()
        assert most_prompts(made) > 80


@pytest.mark.parametrize("options", [{"drafter": True}, {"temperature": 1.0, "seed": 7}], ids=["ngram", "draws"])
def test_drafts_and_draws_go_on(options: dict[str, Any]) -> None:
    def run(moves: bool) -> list[int]:
        own = dict(options)
        if own.pop("drafter", False):
            own["drafter"] = NgramDrafter(block=7)
        params = {name: own.pop(name) for name in ("temperature", "seed") if name in own}
        backend = ScriptedBackend(slots=1, context=256, recurrent=True)
        with engine(backend, eos=frozenset(), **own) as made:
            hook = backend.hook = Held(6)
            reply, _ = submit(made, PROMPT, max_tokens=TOKENS, **params)
            if moves:
                assert move_at(made, hook, lambda: wipe(backend)) == [None]
            hook.go.set()
            reply.finished()
        return list(reply.ids)

    assert run(True) == run(False)


def fails(backend: ScriptedBackend, message: str) -> None:
    wipe(backend)
    backend.away = True
    raise BackendError(message)


def test_replies_wait_where_no_placement_can_be_had() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        hook = backend.hook = Held(10)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        (error,) = move_at(made, hook, lambda: fails(backend, "it does not fit"))
        assert str(error) == "it does not fit"
        assert len(begun.ids) < TOKENS and made.stats().running == 1
        # The next placement is one: they are read again there.
        backend.away = False
        begun.finished()
        assert made.stats().resumed == 1
    assert begun.ids == backend.reply(PROMPT, TOKENS)


def test_without_a_wait_they_fail_with_the_reason() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    with engine(backend, eos=frozenset()) as made:
        hook = backend.hook = Held(10)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        move_at(made, hook, lambda: fails(backend, "it does not fit"))
        error = begun.failed()
        assert isinstance(error, ShardLostError) and str(error) == "it does not fit"


def test_a_state_that_was_lost_before_it_is_put_aside_is_read_again() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    save = backend.state.save

    def lost(slot: Any, pages: Any, *, held: bool = False) -> Any:
        backend.gone = "shard 1 is gone"
        backend.state.save = save  # type: ignore[method-assign]
        raise ShardLostError("shard 1 is gone")

    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        hook = backend.hook = Held(10)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        assert hook.reached.wait(TIMEOUT)
        backend.state.save = lost  # type: ignore[method-assign]
        assert move_at(made, hook, lambda: wipe(backend)) == [None]
        begun.finished()
        assert made.stats().resumed == 1
    assert begun.ids == backend.reply(PROMPT, TOKENS)


@pytest.mark.parametrize("what", ["memory", "load"])
def test_what_cannot_be_kept_is_read_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(slots=2, context=256)

    def refuse(pieces: Any) -> None:
        raise BackendError("no")

    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        hook = backend.hook = Held(10)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        if what == "memory":
            monkeypatch.setattr(relocation, "host_memory", lambda: Memory(0, 0))
        else:
            backend.state.load = refuse  # type: ignore[method-assign]
        assert move_at(made, hook, lambda: wipe(backend)) == [None]
        begun.finished()
        assert made.stats().resumed == 1
    assert begun.ids == backend.reply(PROMPT, TOKENS)


def test_requests_wait_while_it_moves_and_nothing_stalls() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    seen: list[Any] = []
    with engine(backend, eos=frozenset(), max_queue=0) as made:
        hook = backend.hook = Held(5)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)

        def replace() -> None:
            wipe(backend)
            seen.append(submit(made, [70, 71], max_tokens=4)[0])
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6)
            with mock.patch.object(admission, "time", later):
                seen.append(made.stats())
            # Beyond the queue's limit they are told when to try again.
            with pytest.raises(QueueFullError) as refused:
                submit(made, [72, 73], max_tokens=4)
            seen.append(refused.value.retry_after)

        assert move_at(made, hook, replace) == [None]
        late, stats, retry_after = seen
        assert retry_after >= 1
        assert stats.stalled == 0 and stats.running == 1 and stats.waiting == 1
        assert made.stats().stalled < 1e5
        begun.finished()
        late.finished()
    assert late.ids == backend.reply([70, 71], 4)


def test_replies_that_end_in_time_are_not_put_aside() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    saves, late = list[int](), list[Any]()
    with engine(backend, eos=frozenset()) as made:
        hook = backend.hook = Held(5)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)

        def replace() -> None:
            # The first has ended, and the one that came meanwhile has not begun, although a slot was free.
            assert begun.ids == backend.reply(PROMPT, TOKENS)
            stats = made.stats()
            saves.append(stats.running)
            assert (stats.running, stats.waiting, late[0].ids) == (0, 1, [])
            wipe(backend)

        real = hook.go.set

        def go() -> None:
            late.append(submit(made, [70, 71], max_tokens=4)[0])
            real()

        with mock.patch.object(hook.go, "set", go):
            assert move_at(made, hook, replace, drain=TIMEOUT) == [None]
        late[0].finished()
    assert saves == [0] and late[0].ids == backend.reply([70, 71], 4)


def test_replies_that_run_on_are_put_aside() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    with engine(backend, eos=frozenset()) as made:
        asked, over, post = threading.Semaphore(0), threading.Event(), Admission.post

        class Stepping(Held):
            """A step behind each question of who moves the model, so that no reply ends before the move."""

            def __call__(self, step: Step) -> None:
                super().__call__(step)
                if self.count > self.at and not over.is_set():
                    assert asked.acquire(timeout=TIMEOUT)

        def counted(self: Admission, command: Callable[[], None]) -> bool:
            done = post(self, command)
            asked.release()
            return done

        hook = backend.hook = Stepping(5)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        seen = list[int]()

        def replace() -> None:
            seen.append(len(begun.ids))
            wipe(backend)
            over.set()

        with mock.patch.object(Admission, "post", counted):
            assert move_at(made, hook, replace, drain=0.01) == [None]
        begun.finished()
    assert begun.ids == backend.reply(PROMPT, TOKENS) and seen[0] < TOKENS


def test_a_move_does_not_wait_for_replies_that_wait_for_a_shard() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        hook = backend.hook = Held(5)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        assert hook.reached.wait(TIMEOUT)
        backend.gone, backend.away = "shard 1 is gone", True

        def replace() -> None:
            wipe(backend)
            backend.away = False

        # It would have ended behind this wait.
        assert move_at(made, hook, replace, drain=100 * TIMEOUT) == [None]
        begun.finished()
    assert begun.ids == backend.reply(PROMPT, TOKENS)


def test_replies_that_cannot_move_can_be_ended() -> None:
    backend = ScriptedBackend(slots=1, context=256)
    with engine(backend, eos=frozenset()) as made:
        hook = backend.hook = Held(5)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        queued, _ = submit(made, [70, 71], max_tokens=4)
        assert hook.reached.wait(TIMEOUT)
        made.end_replies("the model moves")
        hook.go.set()
        for reply in (begun, queued):
            error = reply.failed()
            assert isinstance(error, UnavailableError) and (str(error), error.code) == ("the model moves", "moving")
        assert made.wait_idle(TIMEOUT) and made.stats().running == 0
        # It ends those alone that there were.
        late, _ = submit(made, [70, 71], max_tokens=4)
        late.finished()
    assert begun.ids == backend.reply(PROMPT, TOKENS)[: len(begun.ids)] and len(begun.ids) < TOKENS
    assert not queued.ids and late.ids == backend.reply([70, 71], 4)


def test_an_engine_that_has_ended_does_not_move() -> None:
    backend = ScriptedBackend()
    with engine(backend) as made:
        made.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            made.relocate(lambda: wipe(backend))


@pytest.mark.parametrize("recurrent", [False, True])
def test_prefixes_of_replies_that_have_ended_are_not_resumed(recurrent: bool) -> None:
    backend = ScriptedBackend(slots=2, context=512, recurrent=recurrent, resumes=not recurrent)
    with engine(backend, eos=frozenset(), cache_bytes=1 << 22) as made:
        submit(made, PROMPT * 20, max_tokens=4)[0].finished()
        made.relocate(lambda: wipe(backend))
        assert made.cached_prefixes() == []
        later, _ = submit(made, PROMPT * 20, max_tokens=4)
        later.finished()
    assert later.ids == backend.reply(PROMPT * 20, 4)
