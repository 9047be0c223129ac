"""The engine with its prefix cache, over the scripted backend, whose replies depend on every row that is read back."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Finished, Progress
from luce.errors import DeviceError
from luce.runtime.step import PAGE
from tests.support.cached_engine import EXACT, FREE, Rig, Silent, each_exact, each_kind, finish, ids
from tests.support.replies import make_engine
from tests.support.scripted_backend import ScriptedBackend

CONTEXT, CHUNK = 512, 32


@contextmanager
def rig(cache: int = 1 << 20, interval: int = 8192, **backend: Any) -> Iterator[Rig]:
    scripted = ScriptedBackend(context=CONTEXT, chunk=CHUNK, **{"slots": 1, **backend})
    scripted.resumes = not scripted.capacity.recurrent
    engine = make_engine(scripted, cache_bytes=cache, checkpoint_interval=interval)
    try:
        yield Rig(engine, scripted)
    finally:
        engine.close()
    assert scripted.broken is None, scripted.broken
    if engine.cache is not None:
        memory = engine.cache.memory
        alone = sum(node.page is not None and node.host is None for node in memory.tree.nodes)
        hosts = [node.host for node in memory.tree.nodes if node.host is not None]
        copies = sum(saved.nbytes // saved.pages for saved, _ in hosts)
        states = sum(checkpoint.nbytes for checkpoint in memory.tree.checkpoints)
        assert (memory.device_only, memory.bytes) == (alone, copies + states)


@each_kind
def test_a_conversation_computes_only_what_is_new(kind: dict[str, Any]) -> None:
    with rig(**kind) as r:
        history, known = ids(100), 0
        for turn in range(4):
            expected = r.backend.reply(history, 10)
            assert r.ask(history, 10) == (expected, known)
            # The last token of a reply is not in the cache.
            known = len(history) + 9
            history += [*expected, *ids(30, seed=turn + 1)]


@each_kind
def test_a_repeated_prompt_needs_no_step_for_its_first_token(kind: dict[str, Any]) -> None:
    with rig(**kind) as r:
        prompt = ids(150)
        expected = r.backend.reply(prompt, 3)
        assert r.ask(prompt, 3) == (expected, 0)
        steps = len(r.backend.steps)
        assert r.ask(prompt, 1) == (expected[:1], 150)
        assert len(r.backend.steps) == steps
        assert r.ask(prompt, 3) == (expected, 150)
        assert len(r.backend.steps) == steps + 2


@each_kind
def test_a_prompt_that_equals_the_end_of_a_reply_is_not_resumed_at_its_end(kind: dict[str, Any]) -> None:
    with rig(**kind) as r:
        reply, _ = r.ask(ids(150), 20)
        # The checkpoint behind the reply has no logits that the next token could be chosen from.
        turn = [*ids(150), *reply[:-1]]
        expected = r.backend.reply(turn, 6)
        first, cached = r.ask(turn, 6)
        assert first == expected and 0 < cached < len(turn)
        assert r.ask(turn, 6) == (expected, len(turn))


def test_seconds_saved() -> None:
    with rig() as r:
        r.ask(ids(100), 1)
        cache = r.engine.cache
        assert cache is not None and cache.stats().seconds_saved == 0
        cache.record_computed(10, 4000.0)
        cache.record_computed(30, 4000.0)
        r.ask(ids(100), 1)
        assert cache.stats().seconds_saved == pytest.approx(100 * 8000 / (100 + 40), abs=100)


@each_kind
def test_sampling_after_a_full_hit_draws_what_it_would_have_drawn(kind: dict[str, Any]) -> None:
    with rig(**kind) as r, rig(cache=0, **kind) as plain:
        prompt = ids(70)
        expected, _ = plain.ask(prompt, 8, temperature=1.5, seed=7, repetition_penalty=1.2)
        for cached in (0, 70):
            assert r.ask(prompt, 8, temperature=1.5, seed=7, repetition_penalty=1.2) == (expected, cached)


def test_without_states_prompts_share_whole_pages() -> None:
    with rig() as r:
        prompt = ids(200)
        r.ask(prompt, 2)
        other = [*prompt[:150], *ids(20, seed=9)]
        assert r.ask(other, 5) == (r.backend.reply(other, 5), 150 // PAGE * PAGE)


@each_exact
def test_prompts_share_what_lies_before_a_boundary(kind: dict[str, Any]) -> None:
    with rig(**kind) as r:
        system = ids(77)
        first, second = [*system, *ids(50, seed=1)], [*system, *ids(60, seed=2)]
        r.ask(first, 2, [77, 120])
        assert r.ask(second, 5, [77, 130]) == (r.backend.reply(second, 5), 77)


@each_exact
def test_the_last_boundary_serves_a_turn_whose_reply_was_rewritten(kind: dict[str, Any]) -> None:
    with rig(**kind) as r:
        prompt = ids(120)
        r.ask(prompt, 5, [40, 117])
        turn = [*prompt[:117], *ids(30, seed=3)]
        assert r.ask(turn, 5, [40, 117, 140]) == (r.backend.reply(turn, 5), 117)


@each_exact
def test_the_third_prompt_resumes_where_two_diverged(kind: dict[str, Any]) -> None:
    with rig(**kind) as r:
        shared = ids(200)
        cached = [r.ask([*shared, *ids(30, seed=i)], 1)[1] for i in range(3)]
        assert cached == [0, 0, 200 // PAGE * PAGE]


@each_exact
def test_long_prompts_have_checkpoints_at_intervals(kind: dict[str, Any]) -> None:
    with rig(interval=100, **kind) as r:
        prompt = ids(350)
        r.ask(prompt, 1)
        other = [*prompt[:320], *ids(20, seed=4)]
        assert r.ask(other, 5) == (r.backend.reply(other, 5), 300)


@each_kind
def test_pages_move_to_the_host_when_the_pool_runs_dry_and_come_back(kind: dict[str, Any]) -> None:
    with rig(**kind) as r:
        prompts = [ids(400, seed=i) for i in range(3)]
        for prompt in prompts:
            assert r.ask(prompt, 4) == (r.backend.reply(prompt, 4), 0)
        assert r.engine.stats().cache.evictions == 0
        for prompt in prompts:
            assert r.ask(prompt, 4) == (r.backend.reply(prompt, 4), 400)


def test_host_memory_is_reserved_for_pages_that_may_leave_the_devices() -> None:
    page = PAGE * 16
    # Memory for two contexts of eight pages; a budget of six and a half.
    with rig(slots=2, cache=13 * page // 2) as r:
        said = r.backend.state.reserved
        assert said == [6]
        r.ask(ids(400, 1), 1)
        assert said[-1] == 0
        # Ten pages are the cache's, and one the sequence's that ends: five are free for one of eight.
        r.ask(ids(300, 2), 1)
        assert (r.engine.stats().cache.pages, said[-1]) == (10, 3)
        # Fourteen are: it would push out seven, but there is room for two.
        r.ask(ids(300, 3), 1)
        stats = r.engine.stats().cache
        assert (stats.pages, (stats.budget - stats.bytes) // page, said[-1]) == (14, 2, 2)


def test_the_budget_holds_and_the_newest_conversation_stays() -> None:
    budget = 40_000
    with rig(cache=budget, recurrent=True) as r:
        for i in range(8):
            prompt = ids(300, seed=i)
            r.ask(prompt, 4)
            assert r.engine.stats().cache.bytes <= budget
        assert r.engine.stats().cache.evictions > 0
        for seed, cached in ((7, 303), (0, 0)):
            turn = [*ids(300, seed=seed), *r.backend.reply(ids(300, seed=seed), 4), 5]
            assert r.ask(turn, 4) == (r.backend.reply(turn, 4), cached)


def test_a_budget_smaller_than_one_checkpoint_holds_nothing() -> None:
    with rig(cache=100) as r:
        for _ in range(2):
            assert r.ask(ids(300), 2) == (r.backend.reply(ids(300), 2), 0)
        assert r.engine.stats().cache.bytes == 0


def test_prompt_scores_are_computed_for_every_position() -> None:
    with rig() as r:
        prompt = ids(130)
        r.ask(prompt, 2)
        assert r.ask(prompt, 2, prompt_logprobs=1) == (r.backend.reply(prompt, 2), 0)


@each_kind
def test_private_tokens_are_neither_saved_nor_restored(kind: dict[str, Any]) -> None:
    prompt = ids(200)
    with rig(**kind) as r:
        expected = r.backend.reply(prompt, 5)
        for _ in range(2):
            assert r.ask(prompt, 5, [70, 150], shared=0) == (expected, 0)
            assert not r.engine.cached_prefixes() and not r.engine.stats().pages_used
        # What others keep is not for it.
        assert [r.ask(prompt, 5, [70, 150], shared=shared)[1] for shared in (None, 0, None)] == [0, 0, 200]


@each_kind
def test_a_first_part_is_shared_alone(kind: dict[str, Any]) -> None:
    prompt, other = ids(200), [*ids(100), *ids(100, seed=1)]
    with rig(**kind) as r:
        assert r.ask(prompt, 5, [70, 150], shared=90) == (r.backend.reply(prompt, 5), 0)
        assert max(entry.tokens for entry in r.engine.cached_prefixes()) == 90
        # To the token, also for others, and not a token more of what others keep.
        fewer = 70 if kind else PAGE
        for asked, shared, known in ((prompt, 90, 90), (other, None, 90), (prompt, 70, fewer), (other, 90, 90)):
            assert r.ask(asked, 5, [70, 150], shared=shared) == (r.backend.reply(asked, 5), known)
        assert r.ask(prompt, 5, [70, 150], shared=1000)[1] == 90
        assert r.ask(prompt, 5, [70, 150])[1] == 200


def test_a_cancelled_prompt_is_not_lost() -> None:
    with rig(slots=2) as r:
        prompt, gate = ids(400), queue.SimpleQueue[None]()
        done: list[int] = []

        def sink(event: Event) -> None:
            if isinstance(event, Progress) and event.done >= 5 * PAGE:
                ticket.cancel()
            elif isinstance(event, Finished):
                done.append(event.timings.prompt_tokens)
                gate.put(None)

        r.backend.delay = 0.01
        ticket = r.engine.submit(prompt, SamplingParams(max_tokens=4), output=Silent(), on_event=sink)
        gate.get(timeout=60)
        r.backend.delay = 0
        assert r.ask(prompt, 4) == (r.backend.reply(prompt, 4), done[0] // PAGE * PAGE)


@pytest.mark.parametrize("verb", ["save", "restore"])
def test_a_copy_that_fails_costs_the_cache_only(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(recurrent=True) as r:
        prompt = ids(200)
        r.ask(prompt, 2)

        def fail(*given: object) -> None:
            raise DeviceError("no more")

        with monkeypatch.context() as patch:
            patch.setattr(r.backend.state, verb, fail)
            for i in range(3):
                other = [*prompt, *ids(250, seed=i)]
                assert r.ask(other, 3)[0] == r.backend.reply(other, 3)
        assert r.ask(prompt, 2)[0] == r.backend.reply(prompt, 2)
        assert r.engine.stats().pages_used == 0


def test_a_state_that_is_lost_before_its_size_is_known_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        @property
        def nbytes(self) -> int:
            raise DeviceError("the daemon is lost")

    with rig(recurrent=True) as r:
        with monkeypatch.context() as patch:
            patch.setattr(r.backend.state, "save", lambda *given: Lost())
            assert r.ask(ids(200), 2)[0] == r.backend.reply(ids(200), 2)
        assert r.engine.cache is not None
        # As the engine does behind a loss.
        r.engine.cache.memory.clear()
        assert r.engine.cache.memory.bytes == 0


@settings(max_examples=30)
@given(data=st.data())
def test_any_traffic_gives_the_replies_of_an_engine_without_a_cache(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([FREE, *EXACT]))
    budget = data.draw(st.sampled_from([2_000, 60_000, 1 << 20]))
    with rig(
        cache=budget, slots=2, pages=None if data.draw(st.booleans()) else (9,) * len(kind.get("windows", (0,))), **kind
    ) as r:
        asked: list[tuple[list[int], int]] = []
        prompts = [ids(data.draw(st.integers(1, 300)), seed=i) for i in range(2)]
        for _ in range(data.draw(st.integers(2, 10))):
            running = []
            for _ in range(data.draw(st.integers(1, 3))):
                base = data.draw(st.sampled_from(prompts))
                prompt = [
                    *base[: data.draw(st.integers(1, len(base)))],
                    *ids(data.draw(st.integers(0, 80)), seed=len(asked)),
                ]
                n = data.draw(st.integers(1, 70))
                cuts = sorted(data.draw(st.sets(st.integers(1, len(prompt)), max_size=3)))
                running.append((prompt, n, r.start(prompt, n, cuts)))
            for prompt, n, events in running:
                reply, _ = finish(events)
                assert reply == r.backend.reply(prompt, n)
                prompts.append([*prompt, *reply])
            assert r.engine.stats().pages_used == 0
            assert r.engine.stats().cache.bytes <= budget
