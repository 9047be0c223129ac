"""A drafter or a sink that fails or is slow while tokens are drafted: replies stay those of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from functools import partialmethod
from typing import Any

import pytest

from luce.draft.drafter import Draftable, DrafterUnavailableError, PendingProposals, Proposal
from luce.draft.ngram import NgramDrafter
from luce.engine.events import Event, Finished, Tokens
from luce.engine.scheduler import ScheduledStep, Scheduler
from luce.engine.speculate import Speculator
from luce.errors import BackendError, DeviceError
from tests.support.drafters import oracle, sometimes
from tests.support.replies import PROMPT, engine, submit
from tests.support.scripted_backend import ScriptedBackend


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
        assert last is not None and last.state.startswith("disabled") and last.steps == stats.steps
    assert [reply.ids for reply in (first, second, *replies)] == [backend.reply(PROMPT, 20)] * 11


@pytest.mark.parametrize("where", ["forget", "idle", "close"])
def test_a_drafter_that_fails_to_let_go_fails_nothing_else(where: str) -> None:
    backend = ScriptedBackend()
    drafter = oracle(backend)

    def broken(*_: object) -> None:
        raise DeviceError("lost")

    setattr(drafter, where, broken)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=8) as made:
        replies = [submit(made, PROMPT, max_tokens=20)[0] for _ in range(3)]
        for reply in replies:
            reply.finished()
    assert [reply.ids for reply in replies] == [backend.reply(PROMPT, 20)] * 3


@pytest.mark.parametrize("tokens", [[-1, 5], [5, 10**6], [3] * 40])
def test_ids_that_are_none_are_not_verified(tokens: list[int]) -> None:
    backend = ScriptedBackend()

    class Wild(NgramDrafter):
        def propose(self, asked: Many[Draftable]) -> PendingProposals:
            return lambda: [Proposal(tokens, [0.5]) for _ in asked]

    with engine(backend, eos=frozenset(), drafter=Wild(block=15), verify_width=8) as made:
        reply, _ = submit(made, PROMPT, max_tokens=20)
        reply.finished()
    assert reply.ids == backend.reply(PROMPT, 20)


def test_a_failed_verification_fails_the_reply_only() -> None:
    fail = [False]

    def hook(step: Any) -> None:
        if fail[0] and any(span.speculative for span in step.spans):
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


def test_tokens_are_told_of_while_the_next_ones_are_drafted() -> None:
    heard: list[str] = []
    backend = ScriptedBackend(recurrent=True)

    def on(event: Event) -> None:
        if isinstance(event, Tokens | Finished):
            heard.append(f"{len(event.tokens)} tokens" if isinstance(event, Tokens) else "end")

    with engine(backend, drafter=oracle(backend, hook=heard.append), verify_width=4) as made:
        submit(made, PROMPT, max_tokens=9, on=on)[0].finished()
    once = ["propose", "{} tokens", "wait", "observe"]
    expected = [what.format(count) for count in (1, 4) for what in once]
    # The step that was queued last ends the reply.
    assert heard == ["observe", *expected, "4 tokens", "end"]


@pytest.mark.parametrize("width", [0, 8])
def test_steps_are_planned_while_the_next_tokens_are_drafted(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    schedule, with_drafts = Scheduler.schedule, Scheduler.with_drafts

    def scheduled(self: Scheduler) -> ScheduledStep | None:
        heard.append("schedule")
        return schedule(self)

    def filled(self: Scheduler, early: ScheduledStep) -> ScheduledStep | None:
        found = with_drafts(self, early)
        heard.append("other number" if found is None else "filled")
        return found

    monkeypatch.setattr(Scheduler, "schedule", scheduled)
    monkeypatch.setattr(Scheduler, "with_drafts", filled)
    # Each look at the clock takes as long: on a busy machine, real times may say that drafts do not pay.
    clock = partialmethod(Speculator.__init__, clock=itertools.count(0.0, 1e-3).__next__)
    monkeypatch.setattr(Speculator, "__init__", clock)
    backend = ScriptedBackend(recurrent=True)
    drafter = oracle(backend, sometimes(0.2, 3), hook=heard.append)
    with engine(backend, eos=frozenset(), drafter=drafter, verify_width=width) as made:
        replies = [submit(made, PROMPT, max_tokens=n)[0] for n in (90, 60)]
        for reply, n in zip(replies, (90, 60), strict=True):
            reply.finished()
            assert reply.ids == backend.reply(PROMPT, n)
    drafts = " ".join(heard).split("propose ")[1:]
    good, again = (
        [d for d in drafts if d.startswith(f"schedule wait {what} obs")] for what in ("filled", "other number schedule")
    )
    # Prompts take turns, which each scheduled step counts: it is scheduled once.
    assert good and all(d.startswith("wait schedule obs") for d in drafts if d not in good and d not in again)
    if width:
        # Prompts come first, and where a reply ends there may be fewer rows than were asked for.
        assert len(good) > 0.8 * len(drafts)


@pytest.mark.parametrize("kind", [Tokens, Finished])
def test_a_sink_that_fails_while_tokens_are_drafted(kind: type) -> None:
    backend = ScriptedBackend(recurrent=True)

    def broken(event: Event) -> None:
        if isinstance(event, kind):
            raise ValueError("nobody listens")

    with engine(backend, drafter=oracle(backend), verify_width=4) as made:
        replies = [submit(made, PROMPT, max_tokens=20, on=on)[0] for on in (broken, None)]
        replies[1].finished()
        assert made.wait_idle(60)
    assert replies[1].ids == backend.reply(PROMPT, 20)
    if kind is Tokens:
        assert "nobody listens" in str(replies[0].failed())


@pytest.mark.parametrize("error", [DrafterUnavailableError("gone for now"), DeviceError("lost")])
def test_a_drafter_that_fails_while_it_is_waited_for(error: Exception) -> None:
    backend = ScriptedBackend(recurrent=True)
    waits: list[str] = []

    def hook(what: str) -> None:
        if what == "wait":
            waits.append(what)
            if len(waits) == 2:
                raise error

    with engine(backend, drafter=oracle(backend, hook=hook), verify_width=4) as made:
        first, _ = submit(made, PROMPT, max_tokens=30)
        first.finished()
        away, asked = len(waits), isinstance(error, DrafterUnavailableError)
        again, _ = submit(made, PROMPT, max_tokens=30)
        again.finished()
        stats = made.stats().draft
    assert [reply.ids for reply in (first, again)] == [backend.reply(PROMPT, 30)] * 2
    # Whoever was away is asked again in the next step, whoever failed for the next reply.
    assert stats is not None and stats.state == "on" and (away > 2) == asked and len(waits) > away
