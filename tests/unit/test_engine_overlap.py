"""Steps that are queued before the tokens of the step ahead of them are known (luce.engine.overlap).

The scripted backend computes such a step at once behind the other one, whatever the engine does with that one's output.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.engine.draft_times import FIRST_STEPS
from luce.engine.events import Event, Failed, FinishReason, Tokens
from luce.engine.reasoning_limit import ReasoningLimit
from luce.engine.sampling import Sampler
from luce.engine.speculate import Speculator
from luce.errors import BackendError
from luce.kvcache.paging import KVFlash
from luce.runtime.step import PAGE, PendingMasks, Step
from tests.support.cached_engine import Rig
from tests.support.constraints import Few, Runs, Turns
from tests.support.drafters import always, oracle
from tests.support.paging import Hashed
from tests.support.replies import EOS, Letters, engine, make_engine, submit
from tests.support.scripted_backend import ScriptedBackend, after

PROMPT = [20, 21, 22]


def ending_in(tokens: int, *end: int) -> Any:
    """A script that says `end` behind so many tokens of the reply to PROMPT."""

    def script(history: Any) -> int | None:
        place = len(history) - 3 - tokens
        return end[place] if list(history[:3]) == PROMPT and 0 <= place < len(end) else None

    return script


def test_all_steps_but_the_first_two_and_the_last_are_queued_ahead() -> None:
    # None is queued behind the prompt's step, nor behind the last one, nor behind those whose times are measured first.
    backend = ScriptedBackend(slots=2, recurrent=True)
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, PROMPT, max_tokens=30)
        assert reply.finished().reason is FinishReason.LENGTH
    assert reply.ids == backend.reply(PROMPT, 30)
    assert len(backend.steps) == 30 and backend.followed == 28 - FIRST_STEPS - 1


def drawn(backend: ScriptedBackend, params: SamplingParams, tokens: int) -> list[int]:
    """A reply to PROMPT by hand."""
    assert params.seed is not None
    hand, ids = Sampler(params, np.array(PROMPT, np.int32), seed=params.seed, ends=frozenset()), list(PROMPT)
    for _ in range(tokens):
        ids.append(hand.choose(backend.logits(ids)))
        hand.push(ids[-1])
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("cuts", [{"top_k": 40}, {"top_k": 5, "top_p": 0.9}, {"top_k": 64, "min_p": 0.02}])
def test_so_are_those_whose_tokens_the_devices_draw(cuts: dict[str, Any]) -> None:
    backend = ScriptedBackend(slots=2, recurrent=True)
    other = backend.reply([60, 61], 30)
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, PROMPT, max_tokens=30, temperature=0.8, seed=2**40 + 5, **cuts)
        # One that takes the likeliest tokens runs beside it.
        greedy, _ = submit(made, [60, 61], max_tokens=30)
        assert reply.finished().reason is greedy.finished().reason is FinishReason.LENGTH
    params = SamplingParams(temperature=0.8, seed=2**40 + 5, **cuts)
    assert reply.ids == drawn(backend, params, 30) != backend.reply(PROMPT, 30) and greedy.ids == other
    assert backend.followed >= 28 - FIRST_STEPS - 3


class Broken(ScriptedBackend):
    """Its logits are no numbers from the tenth token on."""

    def logits(self, history: Sequence[int], missing: Sequence[int] = ()) -> NDArray[np.float32]:
        row = super().logits(history, missing)
        return row if len(history) < 10 else np.full_like(row, np.nan)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("top_k", [0, 40])
def test_a_draw_from_no_numbers_ends_its_reply(top_k: int, asynchronous: bool) -> None:
    with engine(Broken(slots=2, asynchronous=asynchronous), eos=frozenset()) as made:
        reply, _ = submit(made, PROMPT, max_tokens=30, temperature=1.0, top_k=top_k, seed=3)
        end = reply.wait()
        assert isinstance(end, Failed) and isinstance(end.error, BackendError)
        assert str(end.error) == "position 10: the logits are not finite" and len(reply.ids) == 7


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_reply_that_ends_leaves_the_others_as_they_are(recurrent: bool, asynchronous: bool) -> None:
    others = [[50, 51, n] for n in range(3)]
    backend = ScriptedBackend(slots=3, recurrent=recurrent, script=ending_in(7, EOS), asynchronous=asynchronous)
    with engine(backend) as made:
        first = [submit(made, other, max_tokens=40, ignore_eos=True)[0] for other in others[:2]]
        ends, _ = submit(made, PROMPT, max_tokens=40)
        # It waits for the slot of the one that ends.
        last, _ = submit(made, others[2], max_tokens=40, ignore_eos=True)
        assert ends.finished().reason is FinishReason.EOS and len(ends.ids) == 8
        for reply in (*first, last):
            assert reply.finished().reason is FinishReason.LENGTH
    assert [reply.ids for reply in (*first, last)] == [backend.reply(other, 40) for other in others]
    assert (backend.followed > 30) == asynchronous


@pytest.mark.parametrize("end", ["eos", "stop token", "stop string"])
def test_the_next_turn_goes_on_behind_the_row_that_was_computed_too_much(end: str) -> None:
    """Its token is the reply's last one, so the checkpoint holds it."""
    last = EOS if end == "eos" else 31
    backend = ScriptedBackend(slots=1, recurrent=True, context=200, script=ending_in(12, 30, last))
    made = make_engine(backend, eos=frozenset({EOS} if end == "eos" else ()), cache_bytes=1 << 20)
    try:
        rig = Rig(made, backend)
        if end == "stop string":
            reply, _ = submit(made, PROMPT, output=Letters(stop="uv"), max_tokens=50)
            reply.finished()
            ids = reply.ids
        else:
            stops = frozenset({last} if end == "stop token" else ())
            ids, _ = rig.ask(PROMPT, 50, stop_token_ids=stops)
        assert ids[12:] == [30, last]
        turn = [*PROMPT, *ids, 40, 41]
        found, cached = rig.ask(turn, 5)
        assert cached == len(PROMPT) + len(ids)
        assert found == backend.reply(turn, 5)
    finally:
        made.close()
    assert backend.broken is None and backend.followed


def test_a_reply_of_its_limit_has_no_row_too_much() -> None:
    backend = ScriptedBackend(slots=1, recurrent=True, context=200)
    made = make_engine(backend, cache_bytes=1 << 20)
    try:
        rig = Rig(made, backend)
        ids, _ = rig.ask(PROMPT, 12)
        turn = [*PROMPT, *ids, 40]
        assert rig.ask(turn, 5) == (backend.reply(turn, 5), len(PROMPT) + 11)
    finally:
        made.close()
    assert sum(rows for rows, _ in backend.steps) == 3 + 11 + 2 + 4


def test_a_reply_may_fill_the_context() -> None:
    backend = ScriptedBackend(slots=2, context=PAGE)
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, PROMPT, max_tokens=None)
        assert reply.finished().reason is FinishReason.CONTEXT
    assert reply.ids == backend.reply(PROMPT, PAGE - 3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "seed": 9}])
@pytest.mark.parametrize("verify", [0, 16])
def test_masks_are_made_when_the_token_ahead_of_them_is_known(verify: int, sampling: dict[str, Any]) -> None:
    replies = []
    for asynchronous in (False, True):
        backend = ScriptedBackend(slots=3, recurrent=True, verify=verify, asynchronous=asynchronous)
        with engine(backend, eos=frozenset(), grammar_threads=2) as made:
            # One ends while the others go on, and one has no mask.
            own = [
                submit(made, [50, n], max_tokens=12 * n, constraint=Turns(97, *range(10, 90)), **sampling)
                for n in (1, 3)
            ]
            free, _ = submit(made, PROMPT, max_tokens=30)
            for reply in (free, *(reply for reply, _ in own)):
                assert reply.finished().reason is FinishReason.LENGTH
        replies.append([reply.ids for reply, _ in own])
        assert free.ids == backend.reply(PROMPT, 30) and (backend.followed >= 15) == asynchronous
    assert replies[0] == replies[1]


def test_nothing_is_queued_behind_masks_that_are_still_made() -> None:
    """Threads that make masks use the grammars."""

    class Early(ScriptedBackend):
        def wait_for_masks(self, masks: PendingMasks) -> None:
            """The engine hears that the step is queued while threads make its masks."""

    backend = Early(slots=1)
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, PROMPT, max_tokens=20, constraint=Few(97, 10, 11, 12))
        reply.finished()
    assert len(reply.ids) == 20 and not backend.followed


def test_what_a_grammar_forces_is_verified_rather_than_queued_ahead() -> None:
    """Where forced tokens are verified at all: of two of them the second makes the next step wait."""
    found = []
    for verify in (0, 16):
        backend = ScriptedBackend(slots=1, verify=verify)
        with engine(backend, eos=frozenset()) as made:
            reply, _ = submit(made, PROMPT, max_tokens=40, constraint=Runs(97, *range(10, 90)))
            reply.finished()
            found.append((reply.ids, made.stats().forced[1], backend.followed))
    (plain, none, all_ahead), (ids, forced, some) = found
    assert ids == plain and none == 0 and all_ahead >= 36
    # Of a run of four the step that was queued chooses the first one.
    assert forced >= 9 and some >= 5


def test_a_grammar_that_fails_ends_its_own_reply() -> None:
    class Fails(Few):
        def forced(self, most: int, ends: frozenset[int]) -> list[int]:
            if len(self.pushed) > 8:
                raise ValueError("a bug in the library")
            return []

    backend = ScriptedBackend(slots=2)
    with engine(backend, eos=frozenset()) as made:
        fails, _ = submit(made, [60, 61], max_tokens=30, constraint=Fails(97, 10, 11, 12))
        greedy, _ = submit(made, PROMPT, max_tokens=30)
        greedy.finished()
        assert "a bug in the library" in str(fails.failed())
    assert greedy.ids == backend.reply(PROMPT, 30) and backend.followed


@pytest.mark.parametrize("why", ["whole logits", "penalty", "masks on the host", "paging", "drafts"])
def test_what_needs_the_token_waits_for_it(why: str) -> None:
    each: dict[str, dict[str, Any]] = {
        "whole logits": {"temperature": 1.0, "top_k": 0, "seed": 3},
        "penalty": {"presence_penalty": 1.0},
        "masks on the host": {"constraint": Few(97, 10, 11, 12), "logprobs": 0},
    }
    params = each.get(why, {})
    sizes: dict[str, Any] = {"bound": 9, "context": 20 * PAGE, "chunk": 2 * PAGE} if why == "paging" else {}
    backend = ScriptedBackend(slots=2, **sizes)
    options: dict[str, Any] = {"kvflash": KVFlash(Hashed(), 4, 16, 1 << 30)} if why == "paging" else {}
    if why == "drafts":
        options = {"drafter": oracle(backend, block=3), "verify_width": 4}
    with engine(backend, eos=frozenset(), **options) as made:
        submit(made, PROMPT, max_tokens=20, **params)[0].finished()
    assert not backend.followed


def test_one_that_needs_its_token_holds_up_all() -> None:
    backend = ScriptedBackend(slots=2)
    with engine(backend, eos=frozenset()) as made:
        sampled, _ = submit(made, [60, 61], max_tokens=10, temperature=1.0, top_k=0, seed=3)
        greedy, _ = submit(made, PROMPT, max_tokens=60)
        sampled.finished()
        greedy.finished()
    assert greedy.ids == backend.reply(PROMPT, 60) and 30 < backend.followed < 59


@pytest.mark.parametrize("budget", [3, 10])
def test_reasoning_ends_at_its_budget(budget: int) -> None:
    """The tokens that end it are appended whatever the device chose: no step goes on with the device's."""
    limit = ReasoningLimit((), frozenset({90}), (89, 90), inside=True, budget=budget)
    replies = []
    for asynchronous in (False, True):
        backend = ScriptedBackend(slots=1, recurrent=True, asynchronous=asynchronous)
        with engine(backend, eos=frozenset()) as made:
            reply, _ = submit(made, PROMPT, max_tokens=40, reasoning=limit)
            reply.finished()
        replies.append(reply.ids)
    assert replies[0] == replies[1] and replies[0][budget : budget + 2] == [89, 90]
    assert backend.followed > 20


def test_a_new_reply_and_a_cancelled_one_wait_for_one_step_at_most() -> None:
    backend = ScriptedBackend(slots=2, context=2000, recurrent=True)
    order: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Tokens):
            order.append("long")

    with engine(backend, eos=frozenset()) as made:
        long, handle = submit(made, PROMPT, max_tokens=1500, on=note)
        while len(order) < 20:
            time.sleep(0.001)
        short, _ = submit(made, [60, 61], max_tokens=1)
        short.finished()
        assert short.ids == backend.reply([60, 61], 1) and not long.over.is_set()
        handle.cancel()
        assert long.finished().reason is FinishReason.CANCELLED
        # Its slot and pages are free for another one, whose states begin anew.
        again, _ = submit(made, [70, 71, 72], max_tokens=20)
        again.finished()
    assert long.ids == backend.reply(PROMPT, len(long.ids)) and again.ids == backend.reply([70, 71, 72], 20)


def test_a_deadline_ends_a_reply_between_steps() -> None:
    backend = ScriptedBackend(slots=1, context=4000, delay=0.002)
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, PROMPT, max_tokens=None, timeout=0.2)
        assert reply.finished().reason is FinishReason.DEADLINE
    assert len(reply.ids) < 150 and backend.followed > 3


@pytest.mark.parametrize("at", [5, 6])
def test_a_step_that_fails_takes_the_one_behind_it_along(at: int) -> None:
    backend, count = ScriptedBackend(slots=2), [0]

    def hook(step: Step) -> None:
        count[0] += 1
        if count[0] == at:
            raise BackendError("the device is gone")

    backend.hook = hook
    with engine(backend, eos=frozenset()) as made:
        reply, _ = submit(made, PROMPT, max_tokens=20)
        assert "the device is gone" in str(reply.failed())
        again, _ = submit(made, PROMPT, max_tokens=20)
        again.finished()
    assert again.ids == backend.reply(PROMPT, 20) and reply.ids == again.ids[: at - 1]


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes as long: on a busy machine, real times may say that drafts pay."""
    clock = partialmethod(Speculator.__init__, clock=itertools.count(0.0, 1.0).__next__)
    monkeypatch.setattr(Speculator, "__init__", clock)


@pytest.mark.usefixtures("steady_clock")
def test_steps_are_queued_ahead_while_a_drafter_rests() -> None:
    """A drafter that rests leaves its steps as they are without one."""
    backend = ScriptedBackend(slots=1, script=after(PROMPT, [30, 31, 32]), context=1000)
    with engine(backend, eos=frozenset(), drafter=oracle(backend, always, block=3)) as made:
        reply, _ = submit(made, PROMPT, max_tokens=300)
        reply.finished()
    assert reply.ids == backend.reply(PROMPT, 300) and backend.followed > 100


def test_no_row_beyond_the_original_context_is_queued_before_its_sequence_is_stretched() -> None:
    backend, plain = ScriptedBackend(slots=1, context=200), list[int]()

    def hook(step: Step) -> None:
        if step.position_ids is None:
            plain.extend(step.positions.tolist())

    backend.hook = hook
    with engine(backend, eos=frozenset(), original_context=40, positions=200) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        reply.finished()
    assert max(plain) == 39 and reply.ids == backend.reply(PROMPT, 60) and backend.followed > 40


@pytest.mark.usefixtures("steady_clock")
def test_a_drafter_observes_each_row_once_before_its_sequence_ends() -> None:
    """Its features are saved with the checkpoint behind the reply, which has the row that was queued ahead."""
    backend = ScriptedBackend(slots=1, context=1000, script=ending_in(200, EOS))
    drafter = oracle(backend, always, block=3)
    with engine(backend, drafter=drafter) as made:
        reply, _ = submit(made, PROMPT, max_tokens=300)
        assert reply.finished().reason is FinishReason.EOS
    # Rows of drafts are seen again, as their tokens were wrong.
    seen = {span.position + row for span in drafter.seen for row in range(span.rows)}
    assert seen == set(range(3 + 201)) and backend.followed > 100
