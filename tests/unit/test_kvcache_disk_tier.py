"""The engine with a prefix cache on the disk, over the scripted backend: what restarts find, and what is written."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Finished, Progress
from luce.kvcache import saver
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.store import Store
from luce.runtime.step import PAGE
from tests.support.cached_engine import EXACT, Silent, each_exact, each_kind, finish, ids
from tests.support.daemons import within
from tests.support.disk_tier import MODEL, files, rig, snapshots_left, tier, wait_for


@each_kind
def test_a_conversation_goes_on_after_restarts(kind: dict[str, Any], tmp_path: Path) -> None:
    history, known = ids(100), 0
    for turn in range(5):
        with rig(tmp_path, **kind) as r:
            expected = r.backend.reply(history, 10)
            assert r.ask(history, 10, [70]) == (expected, known)
            assert tier(r).stats.hits == (turn > 0)
        known = len(history) + 9
        history += [*expected, *ids(30, seed=turn + 1)]


@each_kind
def test_a_repeated_prompt_needs_no_step_after_a_restart(kind: dict[str, Any], tmp_path: Path) -> None:
    prompt = ids(150)
    with rig(tmp_path, **kind) as r:
        expected, _ = r.ask(prompt, 3)
    with rig(tmp_path, **kind) as r:
        assert r.ask(prompt, 1) == (expected[:1], 150)
        assert not r.backend.steps


@each_kind
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_repeated_chat_needs_no_step_for_its_first_token_after_a_restart(
    params: dict[str, Any], kind: dict[str, Any], tmp_path: Path
) -> None:
    # Of large states the disk has that at the start of the last message, and the logits behind it.
    prompt, known = ids(150), 145 if kind else 150
    with rig(tmp_path, **kind) as r:
        expected, _ = r.ask(prompt, 8, [70, 145], **params)
    with rig(tmp_path, **kind) as r:
        assert r.ask(prompt, 1, [70, 145], **params) == (expected[:1], known)
        assert not r.backend.steps
        assert r.ask(prompt, 8, [70, 145], **params)[0] == expected
    with rig(tmp_path, **kind) as r:
        assert r.ask(prompt, 8, [70, 145], **params) == (expected, known)
        # The rest of the prompt was read beside it, and is in memory now.
        assert r.ask(prompt, 8, [70, 145], **params) == (expected, 150)
        # Those of another end are not its own.
        other = [*prompt[:147], 1, 2, 3]
        assert r.ask(other, 4, [70, 145]) == (r.backend.reply(other, 4), 145 if kind else 128)
    with rig(tmp_path, **kind) as r:
        assert r.ask(other, 4, [70, 145])[0] == r.backend.reply(other, 4)


def test_a_cancelled_prompt_is_written_up_to_its_last_checkpoint(tmp_path: Path) -> None:
    over = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Progress) and event.done == 145:
            ticket.cancel()
        elif isinstance(event, Finished):
            over.set()

    with rig(tmp_path, recurrent=True) as r:
        params = SamplingParams(max_tokens=4)
        ticket = r.engine.submit(ids(150), params, output=Silent(), on_event=sink, boundaries=[145])
        assert over.wait(60)
    with rig(tmp_path, recurrent=True) as r:
        assert r.ask(ids(150), 4, [145]) == (r.backend.reply(ids(150), 4), 145)


def test_snapshots_are_written_behind_the_reply(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(200), 3)
        while tier(r).stats.saves < 2:
            pass
        assert r.engine.stats().cache.disk is not None
    with rig(tmp_path) as r:
        r.ask([*ids(200), 3, 4], 1)
        assert tier(r).stats.hits == 1


@each_kind
def test_clearing_discards_the_snapshot_in_progress(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = saver.Saver.pump
    counts: list[int] = []
    for step in range(1, 6):
        answered, pumped = threading.Event(), itertools.count(1)

        def watched(
            one: saver.Saver, *, idle: bool, step: int = step, answered: Any = answered, pumped: Any = pumped
        ) -> None:
            # What the reply left is written behind it, until this piece of it.
            if answered.is_set() and one.pending:
                pump(one, idle=idle)
                if next(pumped) == step:
                    assert r.engine.cache is not None
                    counts.append(len(r.engine.cache.clear()))

        monkeypatch.setattr(saver.Saver, "pump", watched)
        with rig(tmp_path, **kind) as r:
            assert within(60, lambda: tier(r).store is not None)
            r.ask(ids(200), 3)
            answered.set()
            tier(r).wake()
        # The later pieces are of what is written as the server ends, if there are so many.
        assert len(counts) < step or snapshots_left(tmp_path) == 0
    assert len(counts) > 2 and all(counts)


def test_pages_in_host_memory_are_written(tmp_path: Path) -> None:
    # The pool is too small for both; the first one's pages leave the devices before they are written.
    prompts = [ids(400, seed=i) for i in range(3)]
    with rig(tmp_path, pages=(8,)) as r:
        running = [r.start(prompt, 4) for prompt in prompts]
        for events in running:
            finish(events)
    with rig(tmp_path, pages=(8,)) as r:
        for prompt in prompts:
            assert r.ask(prompt, 4) == (r.backend.reply(prompt, 4), 400)


@pytest.mark.parametrize("pages", [(8,), (14,)])
def test_pages_do_not_change_while_they_are_copied(pages: tuple[int, ...], tmp_path: Path) -> None:
    # Others need the pages meanwhile: all of them, or those that are not being copied.
    prompts = [ids(400, seed=i) for i in range(4)]
    with rig(tmp_path, pages=pages, lag=20) as r:
        running = [r.start(prompt, 12) for prompt in prompts]
        for prompt, events in zip(prompts, running, strict=True):
            assert finish(events) == (r.backend.reply(prompt, 12), 0)
    assert not r.engine.stats().pages_used
    with rig(tmp_path, pages=pages) as r:
        for prompt in prompts:
            assert r.ask(prompt, 4) == (r.backend.reply(prompt, 4), 400)


@each_kind
def test_private_tokens_are_not_written(kind: dict[str, Any], tmp_path: Path) -> None:
    prompt = ids(200)
    with rig(tmp_path, **kind) as r:
        r.ask(prompt, 3, [70], shared=0)
    assert not [path for path in files(tmp_path) if path.suffix == ".part"]
    with rig(tmp_path, **kind) as r:
        r.ask(prompt, 3, [70], shared=100)
    with rig(tmp_path, **kind) as r:
        opened = tier(r).writable and tier(r).store
        assert opened and max(entry.manifest.length for entry in opened.snapshots) == 100
        assert r.ask(prompt, 3, [70], shared=0)[1] == 0
    with rig(tmp_path, **kind) as r:
        assert r.ask(prompt, 3, [70], shared=100) == (r.backend.reply(prompt, 3), 100)
    with rig(tmp_path, **kind) as r:
        r.ask(prompt, 3, [70])
    with rig(tmp_path, **kind) as r:
        assert r.ask(prompt, 3, [70], shared=100) == (r.backend.reply(prompt, 3), 100)


@each_exact
def test_the_logits_of_a_prompts_end_are_not_shared_where_its_end_is_not(kind: dict[str, Any], tmp_path: Path) -> None:
    prompt, ran = ids(130), list[list[int]]()
    with rig(tmp_path, **kind) as r:
        r.ask(prompt, 3, [120])
    for shared in (None, 120):
        with rig(tmp_path, **kind) as r:
            assert r.ask(prompt, 1, [120], shared) == (r.backend.reply(prompt, 1), 120)
            ran.append([rows for rows, _ in r.backend.steps])
    assert ran == [[], [10]]


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
    with rig(tmp_path, model=Fingerprint("fedcba9876543210", MODEL.settings)) as r:
        assert r.ask(ids(100), 3)[1] == 0
        assert not tier(r).current_stats().unused


def test_snapshots_of_the_same_weights_with_other_settings_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
    other = Fingerprint(MODEL.contents, {"--cache-type-k": "q8_0", "--kvflash": "9 pages"})
    with rig(tmp_path, model=other) as r:
        assert r.ask(ids(100), 3)[1] == 0
        (unused,) = tier(r).current_stats().unused
    reason = "--cache-type-k is q8_0 here and f16 there, --kvflash is 9 pages here and off there"
    assert (unused.model, unused.snapshots, unused.reason) == (MODEL.model, 2, reason) and unused.bytes > 0
    assert f"2 snapshots of this model are not used: {reason}" in caplog.text
    with rig(tmp_path) as r:
        assert r.ask(ids(100), 3)[1] == 100


def test_the_log_reports_writes_reuses_and_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "luce.kvcache")

    def events(name: str) -> list[dict[str, Any]]:
        found = [vars(record)["fields"] for record in caplog.records if record.getMessage() == name]
        caplog.clear()
        assert all(fields.pop("seconds", 0.0) >= 0 for fields in found)
        return found

    prompt = ids(150)
    with rig(tmp_path, recurrent=True) as r:
        r.ask(prompt, 3)
        nothing = {"prompt": 150, "matched": 0, "why": "nothing of it is cached"}
        assert events("prefix not reused") == [nothing]
        wait_for(r, 2)
        r.ask([*prompt[:70], *ids(20, seed=1)], 1)
        diverged = {"prompt": 90, "matched": 64, "why": "pages of it are cached, but no state behind them"}
        assert events("prefix not reused") == [diverged]
    with rig(tmp_path, recurrent=True) as r:
        caplog.clear()
        for tier_name in ("disk", "ram"):
            r.ask(prompt, 3)
            assert events("prefix reused") == [{"tier": tier_name, "tokens": 150, "prompt": 150}]
        r.ask([*prompt, *ids(80, seed=2)], 1)
    written = {fields["tokens"]: fields for fields in events("snapshot written")}
    assert written[230]["new"] == 230 - 2 * PAGE and written[230]["snapshot"].endswith("-230") and written[230]["bytes"]


def test_files_of_another_server_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "prefix.dkv").write_bytes(b"DKVC")
    with rig(tmp_path) as r:
        for _ in range(2):
            r.ask(ids(100), 3)
    assert caplog.text.count(".dkv") == 1
    assert (tmp_path / "layout" / "prefix.dkv").exists()


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path) -> None:
    with rig(tmp_path, recurrent=True) as r:
        for seed in range(4):
            r.ask(ids(200, seed), 3)
    budget = sum(path.stat().st_size for path in files(tmp_path)) // 2
    with rig(tmp_path, budget=budget, recurrent=True) as r:
        assert tier(r).writable
        assert 0 < tier(r).current_stats().bytes <= budget


def test_short_prompts_are_not_written(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert r.engine.cache is not None and r.engine.cache.saver is not None
        r.engine.cache.saver.min_tokens = 100
        r.ask(ids(90, seed=1), 3)
        r.ask(ids(110), 3)
    with rig(tmp_path) as r:
        assert [r.ask(ids(90, seed=1), 3)[1], r.ask(ids(110), 3)[1]] == [0, 110]


def test_a_small_budget_holds(tmp_path: Path) -> None:
    budget = 60_000
    with rig(tmp_path, budget=budget, recurrent=True) as r:
        for seed in range(10):
            prompt = ids(200, seed)
            r.ask(prompt, 3)
        stats = r.engine.stats().cache.disk
    total = sum(path.stat().st_size for path in files(tmp_path))
    assert stats is not None and total <= 1.1 * budget
    with rig(tmp_path, budget=budget, recurrent=True) as r:
        assert r.ask([*prompt, *r.backend.reply(prompt, 3), 5], 3)[1] == 202


def test_conversations_of_any_length_are_found_after_a_restart(tmp_path: Path) -> None:
    prompts = [ids(length, seed=length) for length in (440, 70, 3, 200)]
    with rig(tmp_path, recurrent=True, interval=100) as r:
        for prompt in prompts:
            r.ask(prompt, 5)
    with rig(tmp_path, recurrent=True, interval=100) as r:
        for prompt in prompts:
            reply = r.backend.reply(prompt, 5)
            assert r.ask([*prompt, *reply, 7], 5)[1] == len(prompt) + 4
        assert tier(r).stats.hits == 4


def test_diverging_prompts_resume_behind_whole_pages_after_a_restart(tmp_path: Path) -> None:
    first = ids(400)
    with rig(tmp_path) as r:
        r.ask(first, 5)
    # Where it parts, what is known, and pages that are not written again: not as few as a sixth of those that stay.
    for at, known, shared in ((390, 384, 6), (200, 192, 3), (70, 64, 0), (63, 0, 0)):
        prompt = [*first[:at], *ids(60, seed=at)]
        with rig(tmp_path) as r:
            assert r.ask(prompt, 5) == (r.backend.reply(prompt, 5), known)
            assert tier(r).stats.hits == (known > 0) and tier(r).stats.reused_tokens == known
            # And from memory then.
            assert r.ask([*prompt[:-1], 5], 5)[1] == (len(prompt) - 1) // PAGE * PAGE
        found = Store(tmp_path, MODEL.model, 0).exact(np.array(prompt, np.int32))
        assert found is not None and found.manifest.first_page == shared
    with rig(tmp_path) as r:
        assert r.ask(first, 5) == (r.backend.reply(first, 5), 400)


@pytest.mark.parametrize("kind", EXACT, ids=["recurrent", "windowed", "both"])
def test_models_with_states_resume_only_at_checkpoints(kind: dict[str, Any], tmp_path: Path) -> None:
    first = ids(400)
    with rig(tmp_path, **kind) as r:
        r.ask(first, 5)
    prompt = [*first[:300], *ids(60, seed=1)]
    with rig(tmp_path, **kind) as r:
        assert r.ask(prompt, 5) == (r.backend.reply(prompt, 5), 0)
    # Pages are shared all the same.
    entries = {entry.manifest.length: entry.manifest for entry in Store(tmp_path, MODEL.model, 0).snapshots}
    assert (entries[360].first_page, entries[360].parent) == (4, entries[400].id)


def test_a_resume_from_memory_counts_as_a_use_on_the_disk(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(200), 5)
        wait_for(r, 2)
        opened = tier(r).store
        assert opened is not None
        for entry in opened.snapshots:
            entry.last_used = 1e9
            os.utime(entry.path / "manifest.json", (1e9, 1e9))
        # All of it is there, so that nothing is written.
        assert r.ask(ids(200), 5)[1] == 200
        assert within(60, lambda: all(entry.last_used > 1e9 for entry in opened.snapshots))
        assert tier(r).stats.saves == 2
    assert all(entry.last_used > 1e9 for entry in Store(tmp_path, MODEL.model, 0).snapshots)


def test_bytes_written_grow_with_what_is_new(tmp_path: Path) -> None:
    history = ids(60)
    written = []
    for turn in range(6):
        with rig(tmp_path) as r:
            reply, _ = r.ask(history, 5)
        history = [*history, *reply, *ids(59, seed=turn)]
        written.append(sum(path.stat().st_size for path in files(tmp_path)))
    grown = np.diff(written)
    assert grown.max() < 1.5 * grown.min()
