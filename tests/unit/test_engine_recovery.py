"""Replies over a backend that loses its state: they go on behind it, with the tokens of an undisturbed run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from luce.draft.ngram import NgramDrafter
from luce.engine import recovery
from luce.engine.events import FinishReason
from luce.errors import ShardLostError
from luce.runtime.step import Step
from tests.support.constraints import Few
from tests.support.daemons import within
from tests.support.disk_tier import rig
from tests.support.drafters import oracle, sometimes
from tests.support.replies import TIMEOUT, engine, submit
from tests.support.scripted_backend import ScriptedBackend

PROMPT = [20, 21, 22, 20, 21, 22, 20, 21]
TOKENS = 40


class Losing:
    """A hook that lets the backend lose its state at the steps of these numbers, before or in the step."""

    def __init__(self, backend: ScriptedBackend, *at: int, raises: bool = True, away: bool = False) -> None:
        self.backend, self.at, self.raises, self.away = backend, at, raises, away
        self.count = 0
        self.lost = threading.Event()

    def __call__(self, step: Step) -> None:
        self.count += 1
        if self.count in self.at:
            self.backend.gone = "shard 1 is gone"
            self.backend.away = self.away
            self.lost.set()
            if self.raises:
                raise ShardLostError("shard 1 is gone")


def disturbed(*at: int, raises: bool = True, backend: dict[str, Any] | None = None, **options: Any) -> list[int]:
    """The tokens of a reply whose state is lost at these steps."""
    scripted = ScriptedBackend(slots=2, context=256, **(backend or {}))
    params = {name: options.pop(name) for name in ("temperature", "seed") if name in options}
    with engine(scripted, eos=frozenset(), resume_seconds=30, **options) as made:
        hook = scripted.hook = Losing(scripted, *at, raises=raises)
        first, _ = submit(made, PROMPT, max_tokens=TOKENS, **params)
        other, _ = submit(made, [70, 71], max_tokens=TOKENS)
        assert first.finished().reason is FinishReason.LENGTH
        other.finished()
        assert hook.count > max(at, default=0) and other.ids == scripted.reply([70, 71], TOKENS)
        # Nothing is lost before the first step has ended.
        assert made.stats().resumed >= len([step for step in at if step > 1])
    return first.ids


BACKENDS = {
    "pages": {},
    "windows": {"windows": (None, 64)},
    "recurrent": {"recurrent": True},
    "small chunks": {"chunk": 4},
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("raises", [True, False], ids=["in the step", "between steps"])
@pytest.mark.parametrize("at", [(1,), (3,), (5,), (20,), (38,), (6, 30), (10, 11)], ids=str)
def test_greedy_tokens_are_those_of_an_undisturbed_run(at: tuple[int, ...], raises: bool, backend: Any) -> None:
    assert disturbed(*at, raises=raises, backend=backend) == ScriptedBackend(context=256).reply(PROMPT, TOKENS)


@pytest.mark.parametrize("at", [(5,), (25,), (6, 30)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"cache_bytes": 1 << 22}, {"drafter": True}, {"temperature": 1.0, "seed": 7}],
    ids=["cache", "drafts", "draws"],
)
def test_the_cache_drafts_and_draws_go_on(at: tuple[int, ...], options: dict[str, Any]) -> None:
    def run(*losses: int) -> list[int]:
        own = dict(options)
        if own.pop("drafter", False):
            own["drafter"] = NgramDrafter(block=7)
        return disturbed(*losses, backend={"recurrent": True}, **own)

    assert run(*at) == run()


@pytest.mark.parametrize("raises", [True, False], ids=["in the step", "between steps"])
@pytest.mark.parametrize("at", [(4,), (6,), (3, 7)], ids=str)
def test_accepted_drafts_and_what_the_drafter_saw_are_forgotten(at: tuple[int, ...], raises: bool) -> None:
    backend = ScriptedBackend(slots=2, context=256, recurrent=True)
    drafter = oracle(backend, sometimes(0.3, 1), block=4)
    with engine(backend, eos=frozenset(), resume_seconds=30, drafter=drafter, verify_width=5) as made:
        hook = backend.hook = Losing(backend, *at, raises=raises)
        drafted, _ = submit(made, PROMPT, max_tokens=TOKENS)
        drafted.finished()
        assert hook.count < TOKENS and len(drafter.forgotten) >= len(at)
    assert drafted.ids == backend.reply(PROMPT, TOKENS)


@pytest.mark.parametrize("at", [(6,), (25,), (20, 26)], ids=str)
def test_a_constraint_goes_on_where_it_was(at: tuple[int, ...]) -> None:
    def run(*losses: int) -> list[int]:
        backend = ScriptedBackend(slots=2, context=256)
        constraint = Few(backend.capacity.vocab, 30, 31, 32, 33)
        with engine(backend, eos=frozenset(), resume_seconds=30) as made:
            backend.hook = Losing(backend, *losses)
            reply, _ = submit(made, PROMPT, max_tokens=TOKENS, constraint=constraint)
            reply.finished()
        assert constraint.pushed == reply.ids
        return reply.ids

    assert run(*at) == run()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_prompt_of_the_disk_with_its_logits_does_not_skip_a_token(tmp_path: Path, recurrent: bool) -> None:
    expected = ScriptedBackend().reply(PROMPT, TOKENS)
    with rig(tmp_path, recurrent=recurrent) as first:
        # One of them is what the reply has when the state is lost.
        for read in range(16, 24):
            submit(first.engine, PROMPT + expected[:read], max_tokens=1)[0].finished()
    with rig(tmp_path, resume_seconds=30, recurrent=recurrent) as second:
        second.backend.hook = Losing(second.backend, 20)
        again, _ = submit(second.engine, PROMPT, max_tokens=TOKENS)
        again.finished()
        assert second.engine.stats().resumed == 1
    assert again.ids == expected


def test_no_step_runs_while_the_shard_is_away() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        hook = backend.hook = Losing(backend, 10, away=True)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        assert hook.lost.wait(TIMEOUT)
        late, _ = submit(made, [70, 71], max_tokens=4)
        cancelled, ticket = submit(made, [72, 73], max_tokens=4)
        ticket.cancel()
        assert cancelled.finished().reason is FinishReason.CANCELLED
        assert hook.count == 10 and not late.events
        backend.away = False
        begun.finished()
        late.finished()
        assert made.stats().resumed == 1
    assert begun.ids == backend.reply(PROMPT, TOKENS) and late.ids == backend.reply([70, 71], 4)


def test_a_shard_that_is_not_back_in_time_fails_its_replies() -> None:
    backend = ScriptedBackend(slots=2, context=256)
    with engine(backend, eos=frozenset(), resume_seconds=0.2) as made:
        backend.hook = Losing(backend, 10, away=True)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        error = begun.failed()
        assert isinstance(error, ShardLostError)
        assert str(error) == "shard 1 is gone; it was not back within 0.2 s (--cluster-resume)"
        # A request that comes later is answered by what the backend says.
        backend.hook, backend.lasting = None, True
        later, _ = submit(made, [70, 71], max_tokens=4)
        later.finished()
    assert begun.ids == backend.reply(PROMPT, TOKENS)[: len(begun.ids)]


def test_a_reply_goes_on_behind_two_losses() -> None:
    backend = ScriptedBackend(slots=1, context=256)
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        backend.hook = Losing(backend, 5, 15, 25)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        assert str(begun.failed()) == "shard 1 is gone"
        assert made.stats().resumed == recovery.MOST_LOSSES == 2
        backend.hook = None
        assert within(TIMEOUT, lambda: made.stats().running == 0)
        later, _ = submit(made, [70, 71], max_tokens=4)
        later.finished()
    assert later.ids == backend.reply([70, 71], 4)


def test_scores_that_were_reported_are_not_reported_again() -> None:
    backend = ScriptedBackend(slots=1, context=256, chunk=4)
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        backend.hook = Losing(backend, 2)
        half, _ = submit(made, PROMPT, max_tokens=4, prompt_logprobs=1)
        assert isinstance(half.failed(), ShardLostError)
        backend.hook = Losing(backend, 6)
        whole, _ = submit(made, PROMPT, max_tokens=8, prompt_logprobs=1)
        whole.finished()
    assert whole.ids == backend.reply(PROMPT, 8)
    assert sum(type(event).__name__ == "PromptScores" for event in whole.events) == 1
