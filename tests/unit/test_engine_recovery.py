"""Replies over a backend that loses its state: they go on behind it, with the tokens of an undisturbed run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.config.sampling import SamplingParams
from luce.draft.ngram import NgramDrafter
from luce.engine import recovery
from luce.engine.events import FinishReason, PromptScores
from luce.engine.reasoning_limit import ReasoningLimit
from luce.errors import ShardLostError
from luce.kvcache.paging import KVFlash
from luce.kvcache.prefix_cache import PrefixCache
from luce.runtime.step import PAGE, Step
from tests.support.constraints import Few
from tests.support.daemons import within
from tests.support.disk_tier import rig, tier
from tests.support.drafters import BranchingDrafter, oracle, sometimes
from tests.support.paging import Hashed
from tests.support.replies import TIMEOUT, Letters, Reply, engine, same, submit
from tests.support.scripted_backend import ScriptedBackend

PROMPT = [20, 21, 22, 20, 21, 22, 20, 21]
TOKENS = 40
#: a prompt of several chunks and pages
LONG = [20 + n % 37 for n in range(150)]


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
    scripted = ScriptedBackend(slots=2, context=256, asynchronous=False, **(backend or {}))
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


def test_the_logits_of_a_longer_prompts_end_are_not_those_of_the_next_token(tmp_path: Path) -> None:
    expected = ScriptedBackend().reply(PROMPT, TOKENS)
    with rig(tmp_path, recurrent=True) as first:
        # The snapshot of PROMPT gets the logits of this prompt's end, which is what the reply has when it is lost.
        first.ask(PROMPT + expected[:19], 1, boundaries=[len(PROMPT)])
    with rig(tmp_path, resume_seconds=30, recurrent=True) as second:
        second.backend.hook = Losing(second.backend, 20)
        again, _ = submit(second.engine, PROMPT, max_tokens=TOKENS)
        again.finished()
        assert second.engine.stats().resumed == 1
    assert again.ids == expected


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_a_prompt_that_another_reply_has_put_on_the_disk_begins_with_its_logits(
    tmp_path: Path, tokens: int, recurrent: bool
) -> None:
    with rig(tmp_path, recurrent=recurrent) as first:
        submit(first.engine, LONG, max_tokens=1)[0].finished()
    with rig(tmp_path, resume_seconds=30, recurrent=recurrent) as second:
        disk, hook = tier(second), Losing(second.backend, 2)
        find, second.backend.hook = disk.find, hook
        # It comes there while this prompt is read.
        disk.find = lambda *args, **kw: find(*args, **kw) if hook.lost.is_set() else []  # type: ignore[method-assign]
        begun, _ = submit(second.engine, LONG, max_tokens=tokens)
        begun.finished()
        assert second.engine.stats().resumed == 1 and hook.count == max(2, 1 + tokens)
    assert begun.ids == ScriptedBackend().reply(LONG, tokens)


def test_a_prompt_that_is_read_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    monkeypatch.setattr(PrefixCache, "record_computed", lambda self, tokens, seconds: computed.append(tokens))
    backend = ScriptedBackend(slots=1, context=256, resumes=True)
    with engine(backend, eos=frozenset(), resume_seconds=30, cache_bytes=1 << 20) as made:
        submit(made, LONG[:128], max_tokens=1)[0].finished()
        backend.hook = Losing(backend, 1, 3)
        begun, _ = submit(made, LONG, max_tokens=4)
        timings = begun.finished().timings
        assert (timings.prompt_tokens, timings.cached_tokens) == (150, 128)
        losing = Losing(backend, 3, 5)

        def lose(step: Step) -> None:
            # Half of the prompt has been read again.
            losing.away = losing.count == 4
            losing(step)

        backend.hook = lose
        waiting, ticket = submit(made, LONG, max_tokens=TOKENS)
        assert within(TIMEOUT, lambda: backend.away)
        ticket.cancel()
        timings = waiting.finished().timings
        assert (timings.prompt_tokens, timings.cached_tokens) == (150, 150)
        backend.away = False
    # The wait for a shard would make computing look slow.
    assert computed == [128]


def test_one_thread_at_a_time_uses_a_constraint() -> None:
    # Its step is under way before the masks are there.
    backend = ScriptedBackend(slots=2, context=256, asynchronous=False)
    submitted, begun, lost, clashes = threading.Event(), threading.Event(), threading.Event(), list[str]()

    class Slow(Few):
        """Its masks of the 8th step take until the reply has gone on, if it does."""

        busy = False

        def fill(self, *args: Any) -> Any:
            if self.busy:
                clashes.append(threading.current_thread().name)
                return super().fill(*args)
            self.busy = True
            if len(self.pushed) == 7 and not begun.is_set():
                begun.set()
                assert lost.wait(TIMEOUT)
                within(0.3, lambda: bool(clashes))
            found = super().fill(*args)
            self.busy = False
            return found

    def lose(step: Step) -> None:
        # Otherwise one reply could come to its 8th step before there is another.
        assert submitted.wait(TIMEOUT)
        if not lost.is_set() and any(len(each.pushed) == 7 for each in constraints):
            assert begun.wait(TIMEOUT)
            backend.gone = "shard 1 is gone"
            lost.set()
            raise ShardLostError("shard 1 is gone")

    constraints = [Slow(backend.capacity.vocab, 30, 31, 32, 33) for _ in range(2)]
    backend.hook = lose
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        replies = [submit(made, PROMPT, max_tokens=TOKENS, constraint=each)[0] for each in constraints]
        submitted.set()
        for reply in replies:
            reply.finished()
        assert made.stats().resumed == 2
    assert lost.is_set() and not clashes


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
        hook = backend.hook = Losing(backend, 10, away=True)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        error = begun.failed()
        assert isinstance(error, ShardLostError)
        assert str(error) == "shard 1 is gone; it was not back within 0.2 s (--cluster-resume)"
        # A step would wait for the shard, and could not be cancelled.
        tickets = [submit(made, [70, 71], max_tokens=4) for _ in range(4)]
        for late, ticket in reversed(tickets):
            ticket.cancel()
            assert late.finished().reason is FinishReason.CANCELLED
        assert hook.count == 10
        # A request that comes later is answered by what the backend says.
        backend.hook, backend.lasting = None, True
        later, _ = submit(made, [70, 71], max_tokens=4)
        later.finished()
    assert begun.ids == backend.reply(PROMPT, TOKENS)[: len(begun.ids)]


def test_replies_that_wait_for_a_shard_can_be_ended() -> None:
    backend = ScriptedBackend(slots=1, context=256)
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        hook = backend.hook = Losing(backend, 10, away=True)
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        queued, _ = submit(made, [70, 71], max_tokens=4)
        assert hook.lost.wait(TIMEOUT)
        made.end_replies("the model moves")
        for reply in (begun, queued):
            error = reply.failed()
            assert isinstance(error, ShardLostError) and str(error) == "shard 1 is gone; the model moves"
        assert made.wait_idle(TIMEOUT)
    assert begun.ids == backend.reply(PROMPT, TOKENS)[: len(begun.ids)] and not queued.ids


def test_replies_behind_a_loss_that_is_over_are_ended_as_others() -> None:
    backend, go = ScriptedBackend(slots=1, context=256), threading.Event()
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        backend.hook = Losing(backend, 5)
        submit(made, PROMPT, max_tokens=TOKENS)[0].finished()
        assert made.stats().resumed == 1
        backend.hook = lambda step: go.wait(TIMEOUT)
        late, _ = submit(made, [70, 71], max_tokens=TOKENS)
        made.end_replies("the model moves")
        go.set()
        assert str(late.failed()) == "the model moves"


def test_replies_wait_for_a_shard_that_seems_gone_for_good() -> None:
    # The server may place the model anew.
    backend = ScriptedBackend(slots=2, context=256)
    with engine(backend, eos=frozenset(), resume_seconds=30) as made:
        hook = backend.hook = Losing(backend, 10, away=True)
        backend.lasting = True
        begun, _ = submit(made, PROMPT, max_tokens=TOKENS)
        assert hook.lost.wait(TIMEOUT)
        assert not within(0.2, begun.over.is_set)
        backend.away = backend.lasting = False
        begun.finished()
    assert begun.ids == backend.reply(PROMPT, TOKENS)


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


@pytest.mark.parametrize("raises", [True, False], ids=["in the step", "between steps"])
@pytest.mark.parametrize("at", [(4,), (3, 4)], ids=str)
def test_branches_of_draft_trees_are_forgotten(at: tuple[int, ...], raises: bool) -> None:
    backend = ScriptedBackend(slots=2, context=256, recurrent=True, windows=(None, 40), branch_pages=30)
    drafter = BranchingDrafter(backend.reply, vocab=backend.capacity.vocab, wrong=sometimes(0.2, 3))
    options: dict[str, Any] = {"eos": frozenset(), "drafter": drafter, "verify_width": 16, "tree_tokens": 15}
    with engine(backend, resume_seconds=30, **options) as made:
        hook = backend.hook = Losing(backend, *at, raises=raises)
        replies = [submit(made, [*PROMPT, last], max_tokens=100)[0] for last in (30, 31)]
        for reply in replies:
            reply.finished()
        assert hook.count < 90 and backend.moved
    for last, reply in zip((30, 31), replies, strict=True):
        assert reply.ids == backend.reply([*PROMPT, last], 100)


@pytest.mark.parametrize("at", [(2,), (9,), (10,), (9, 10)], ids=str)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "min_p": 0.01, "logprobs": 3, "seed": 4},
        {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.8, "seed": 5},
        {"logit_bias": {40: 2.0, 41: -100.0}, "min_tokens": 9, "prompt_logprobs": 2, "logprobs": 1},
    ],
    ids=["candidates", "logprobs", "penalties", "bias"],
)
def test_draws_scores_and_stop_strings_are_those_of_an_undisturbed_run(
    at: tuple[int, ...], params: dict[str, Any]
) -> None:
    def run(*losses: int, stop: str | None = None) -> Reply:
        backend = ScriptedBackend(slots=1, context=256)
        with engine(backend, eos=frozenset(), resume_seconds=30) as made:
            backend.hook = Losing(backend, *losses)
            reply, _ = submit(made, PROMPT, max_tokens=TOKENS, output=Letters(stop), **params)
            reply.finished()
        return reply

    # The stop string ends with the 10th token, and begins with the one before it.
    stop = "".join(chr(ord("a") + (token - 10) % 26) for token in run().ids[8:10])
    disturbed, plain = run(*at, stop=stop), run(stop=stop)
    same(disturbed, plain)
    assert disturbed.text == plain.text and plain.finished().stop == stop
    scores = [[event for event in one.events if isinstance(event, PromptScores)] for one in (disturbed, plain)]
    assert scores[0] == scores[1]


def test_usage_counts_what_was_computed_before_a_reply_was_stretched() -> None:
    backend = ScriptedBackend(slots=1, context=256, chunk=4)
    submitted = threading.Event()
    with engine(backend, eos=frozenset(), original_context=40) as made:

        def cancel(step: Step) -> None:
            assert submitted.wait(TIMEOUT)
            # The first step behind the last row of the original context.
            if step.positions[0] == 0 and begun.ids:
                ticket.cancel()

        backend.hook = cancel
        begun, ticket = submit(made, LONG[:30], max_tokens=60)
        submitted.set()
        last = begun.finished()
    assert last.reason is FinishReason.CANCELLED
    assert (last.timings.prompt_tokens, last.timings.predicted_tokens) == (30, len(begun.ids))


def test_a_reply_whose_pages_are_swapped_is_not_read_again() -> None:
    # Which of its pages are on the devices depends on all steps so far.
    backend = ScriptedBackend(context=48 * PAGE, slots=1, chunk=4 * PAGE, bound=9, recurrent=True)
    with engine(backend, eos=frozenset(), resume_seconds=30, kvflash=KVFlash(Hashed(), 4, 16, 1 << 30)) as made:
        backend.hook = Losing(backend, 12)
        begun, _ = submit(made, LONG * 6, max_tokens=TOKENS)
        assert str(begun.failed()) == "shard 1 is gone" and begun.ids
        backend.hook = None
        later, _ = submit(made, PROMPT, max_tokens=4)
        later.finished()
    assert later.ids == backend.reply(PROMPT, 4)


@pytest.mark.parametrize("at", [(2,), (6,), (7,), (6, 8)], ids=str)
def test_the_reasoning_ends_where_it_would_have(at: tuple[int, ...]) -> None:
    limit = ReasoningLimit((90,), frozenset({91}), (91, 92, 93), inside=True, budget=5)

    def run(*losses: int) -> Reply:
        backend = ScriptedBackend(slots=1, context=256, recurrent=True)
        with engine(backend, eos=frozenset(), resume_seconds=30, drafter=NgramDrafter(block=7)) as made:
            backend.hook = Losing(backend, *losses)
            reply, _ = submit(made, PROMPT, max_tokens=TOKENS, reasoning=limit)
            assert reply.finished().close_kind == "hard"
        return reply

    disturbed, plain = run(*at), run()
    same(disturbed, plain)
    assert plain.ids[5:8] == [91, 92, 93]


def test_the_positions_of_a_compressed_prompt_are_those_that_it_had() -> None:
    backend = ScriptedBackend(slots=1, context=256)
    seen: dict[int, set[int]] = {}

    def note(step: Step) -> None:
        assert step.position_ids is not None
        for position, id in zip(step.positions.tolist(), step.position_ids.tolist(), strict=True):
            seen.setdefault(position, set()).add(id)
        losing(step)

    losing = Losing(backend, 10, 15)
    with engine(backend, eos=frozenset(), resume_seconds=30, positions=512) as made:
        backend.hook, reply = note, Reply()
        ids = np.arange(len(PROMPT), dtype=np.int32) * 3
        params = SamplingParams(max_tokens=TOKENS)
        made.submit(PROMPT, params, output=Letters(), on_event=reply, position_ids=ids)
        reply.finished()
        assert made.stats().resumed == 2
    assert reply.ids == backend.reply(PROMPT, TOKENS)
    behind = len(PROMPT)
    expected = [*range(0, 3 * behind, 3), *range(3 * behind - 2, 3 * behind - 2 + TOKENS - 1)]
    assert [seen[position] for position in sorted(seen)] == [{id} for id in expected]
