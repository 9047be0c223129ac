"""The engine with a prefix cache on the disk, over the scripted backend: restarts, damage, disks that fail."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luce.config.sampling import SamplingParams
from luce.engine.events import Event, Finished, Progress
from luce.errors import BackendError
from luce.kvcache import saver
from luce.kvcache.disk import part, store
from luce.kvcache.disk.deadline import Deadline
from luce.kvcache.disk.directory import LAYOUT, Directory
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.manifest import ReplyTokens
from luce.kvcache.disk.part import DamagedError, PartReader
from luce.kvcache.disk.reader import Reader
from luce.kvcache.disk.store import Store
from luce.kvcache.disk.tier import DiskTier
from luce.runtime.step import PAGE
from tests.support import snapshots
from tests.support.cached_engine import EXACT, FREE, Rig, Silent, each_kind, finish, ids
from tests.support.daemons import within
from tests.support.replies import make_engine
from tests.support.scripted_backend import ScriptedBackend

MODEL = Fingerprint("0123456789abcdef", {"--cache-type-k": "f16"})


@contextmanager
def rig(
    directory: Path,
    *,
    budget: int = 0,
    known: bool = True,
    model: Fingerprint = MODEL,
    identify: Callable[[], Fingerprint] | None = None,
    interval: int = 8192,
    flush: float = 30,
    **backend: Any,
) -> Iterator[Rig]:
    """An engine that starts anew over a directory; all is written when it ends."""
    scripted = ScriptedBackend(context=512, chunk=32, slots=2, **backend)
    scripted.resumes = not scripted.capacity.recurrent
    identify = identify or (lambda: model)
    disk = DiskTier(directory, budget=budget, identify=identify, known=known, layers=scripted.capacity.layers)
    engine = make_engine(
        scripted,
        cache_bytes=1 << 22,
        checkpoint_interval=interval,
        disk=disk,
        min_disk_tokens=1,
        flush_seconds=flush,
    )
    try:
        yield Rig(engine, scripted)
    finally:
        engine.close()
    assert scripted.broken is None, scripted.broken


def tier(r: Rig) -> DiskTier:
    assert r.engine.cache is not None and r.engine.cache.disk is not None
    return r.engine.cache.disk


def wait_for(r: Rig, snapshots: int) -> None:
    """Until so many are written, or are not going to be."""
    stats = tier(r).stats
    assert within(60, lambda: stats.saves + stats.skipped + stats.failures >= snapshots)


def writing_threads() -> list[threading.Thread]:
    """The writing threads of all disk tiers."""
    return [thread for thread in threading.enumerate() if thread.name == "luce-cache-write"]


def descriptors(directory: Path) -> list[str]:
    """Files below a directory that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(str(directory))]


def snapshots_left(directory: Path) -> int:
    """Snapshots that a start would find; nothing else is left below the directory then."""
    found = Store(directory, MODEL.model, 0)
    assert not found.quarantines and not list((found.root / "tmp").iterdir())
    return len(found.snapshots)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and "trash" not in path.parts)


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


def test_a_sequence_that_ends_before_the_model_is_identified_is_written(tmp_path: Path) -> None:
    gate = threading.Event()

    def identify() -> Fingerprint:
        assert gate.wait(60)
        return MODEL

    with rig(tmp_path, known=False, identify=identify) as r:
        expected, _ = r.ask(ids(100), 3)
        threading.Timer(0.05, gate.set).start()
    with rig(tmp_path) as r:
        assert r.ask(ids(100), 3) == (expected, 100)


def test_closing_does_not_wait_for_identification_without_work(tmp_path: Path) -> None:
    gate = threading.Event()

    def identify() -> Fingerprint:
        gate.wait(60)
        return MODEL

    with rig(tmp_path, known=False, identify=identify, flush=120):
        pass
    assert writing_threads() and not gate.is_set()
    gate.set()
    assert within(60, lambda: not writing_threads())


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


def test_no_page_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The writer is slower than the engine: each checkpoint of a long prompt continues the previous one all the same.
    sync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(0.01)
        sync(fd)

    with rig(tmp_path, recurrent=True, interval=100) as r:
        while tier(r).store is None:
            pass
        monkeypatch.setattr(part.os, "fsync", slow)
        r.ask(ids(400), 5)
    opened = store.Store(tmp_path, MODEL.model, 0)
    entries = sorted(opened.snapshots, key=lambda entry: entry.manifest.length)
    assert [entry.manifest.length for entry in entries] == [100, 200, 300, 400, 404]
    for before, entry in pairwise(entries):
        assert entry.manifest.parent == before.manifest.id
        assert entry.manifest.first_page == before.manifest.length // PAGE


def test_while_sequences_run_the_disk_gets_a_small_share_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
        assert r.engine.cache is not None and r.engine.cache.saver is not None
        saving = r.engine.cache.saver
        while saving.busy:
            pass
        now, worked = [time.monotonic() + 1000], list[float]()

        def export(checkpoint: object) -> Iterator[None]:
            for _ in range(5):
                now[0] += 0.002
                worked.append(now[0])
                yield None

        monkeypatch.setattr(saver.time, "monotonic", lambda: now[0])
        saving.export = export(None)
        for _ in range(1000):
            now[0] += 0.001
            saving.pump(idle=False)
        assert len(worked) == 5 and min(np.diff(worked)) > 40 * 0.002
        saving.export = export(None)
        for _ in range(5):
            saving.pump(idle=True)
        assert len(worked) == 10


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


def test_a_snapshot_of_another_shape_is_a_miss_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rig(tmp_path, recurrent=True) as r:
        expected, _ = r.ask(ids(100), 3)
    before = files(tmp_path)
    with rig(tmp_path, recurrent=True) as r:

        def refuse(*given: object) -> None:
            raise BackendError("tensor blk.0.k has another shape")

        r.backend.state.load = refuse  # type: ignore[method-assign]
        assert r.ask(ids(100), 3) == (expected, 0)
        assert "blk.0.k" in caplog.text
        assert tier(r).stats.refused == 1 and not tier(r).stats.damaged
        assert "blk.0.k" in next(entry.unusable for entry in r.engine.cached_prefixes() if entry.unusable)
    assert set(files(tmp_path)) >= set(before)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_a_miss(data: st.DataObject, tmp_path: Path) -> None:
    """Any file, any byte: never a wrong token, never an error, and the next start is clean."""
    kind: dict[str, Any] = data.draw(st.sampled_from([FREE, *EXACT]))
    shutil.rmtree(tmp_path)
    history = ids(150)
    with rig(tmp_path, **kind) as r:
        reply, _ = r.ask(history, 5, [70, 145])
        turn = [*history, *reply, *ids(90, seed=1)]
        r.ask(turn, 5, [70, 145, 240])
    paths = [path for path in files(tmp_path) if path.name != "lock"]
    # Shares, not numbers: how many files there are, and their sizes, may differ from run to run.
    share = st.floats(0, 1, exclude_max=True)
    path = paths[int(data.draw(share) * len(paths))]
    content = bytearray(path.read_bytes())
    place = int(data.draw(share) * len(content))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    path.write_bytes(content)
    for _ in range(2):
        with rig(tmp_path, **kind) as r:
            for prompt in (turn, history, [*turn, 1, 2]):
                assert r.ask(prompt, 5, [70, 145])[0] == r.backend.reply(prompt, 5)
            assert r.engine.stats().pages_used == 0


def failing(error: int) -> Any:
    def fail(*given: object, **more: object) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename", "open"])
def test_a_disk_that_fails_costs_nothing_but_the_snapshot(
    call: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(80), 2)
        while tier(r).stats.saves < 2:
            pass
        with monkeypatch.context() as patch:
            if call == "mkdir":
                patch.setattr(Path, "mkdir", failing(error))
            else:
                patch.setattr(store.os, call, failing(error))
            for seed in range(1, 6):
                prompt = ids(100, seed)
                assert r.ask(prompt, 3) == (r.backend.reply(prompt, 3), 0)
                assert r.ask(prompt, 3) == (r.backend.reply(prompt, 3), 100)
            while not tier(r).stats.failures:
                pass
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "--kv-cache-dir" in warnings[0].getMessage()
    with rig(tmp_path) as r:
        assert r.ask(ids(80), 2) == (r.backend.reply(ids(80), 2), 80)
        # Where no file can be opened, none can be removed either.
        assert call == "open" or not list((tmp_path / LAYOUT / "tmp").iterdir())


def test_writing_pauses_after_repeated_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(80), 2)
        while tier(r).stats.saves < 2:
            pass
        monkeypatch.setattr(part.os, "fsync", failing(errno.EIO))
        for seed in range(1, 9):
            r.ask(ids(100, seed), 3)
        while tier(r).stats.failures < 3:
            pass
        assert not tier(r).accepts
        assert r.ask(ids(100, 9), 3)[0] == r.backend.reply(ids(100, 9), 3)
    assert tier(r).stats.failures == 3


@pytest.mark.parametrize("how", ["file", "readonly"])
def test_a_directory_that_cannot_be_used_is_one_warning(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "cache"
    if how == "file":
        directory.write_text("no directory")
    else:
        monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
    with rig(directory) as r:
        for _ in range(2):
            assert r.ask(ids(100), 3)[0] == r.backend.reply(ids(100), 3)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "--kv-cache-dir" in warning.getMessage()


def test_a_snapshot_that_another_server_rewrote_is_not_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text, other = np.arange(100, dtype=np.int32), Store(tmp_path, MODEL.model, 0)
    snapshots.write(other, text)
    with rig(tmp_path) as r:
        disk = tier(r)
        assert within(60, lambda: disk.store is not None)
        (entry,) = disk.store.snapshots
        other.clear()
        # The same tokens, of other bytes: those of a prompt that was read in other pieces, say.
        monkeypatch.setattr(snapshots, "state", lambda ids: {"blk.2.memory": ids.astype(np.float32)})
        snapshots.write(other, text)
        with pytest.raises(DamagedError) as found:
            disk.open(entry, Deadline())
        disk.record_failure(entry, found.value)
        assert within(60, lambda: not disk.waiting)
        assert not disk.current_stats().quarantines
        (entry,) = disk.store.find(text)
        snapshots.check(disk.store, entry, text)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        # What is wrong with all of its files as they were written is said.
        disk.record_failure(entry, DamagedError("its tokens are others"))
        assert within(60, lambda: not disk.waiting)
        assert "though all of it is readable: its tokens are others" in caplog.text


@pytest.mark.parametrize("all_of_it", [True, False])
def test_an_evicted_snapshot_causes_no_warning_and_a_missing_file_does(
    all_of_it: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(tmp_path, recurrent=True) as r:
        r.ask(ids(100), 3)
    with rig(tmp_path, recurrent=True) as r:
        assert within(60, lambda: tier(r).store is not None)
        if all_of_it:
            Store(tmp_path, MODEL.model, 0).clear()
        for path in tmp_path.rglob("state-000*"):
            path.unlink()
        assert r.ask(ids(100), 3) == (r.backend.reply(ids(100), 3), 0)
        assert within(60, lambda: not tier(r).waiting)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all("moved to trash" in warning for warning in warnings) and bool(warnings) != all_of_it


def test_snapshots_that_cannot_be_removed_are_unused_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
        wait_for(r, 2)
        assert r.engine.cache is not None
        with monkeypatch.context() as patched:
            patched.setattr(store.os, "rename", failing(errno.EROFS))
            r.engine.clear_cache()
            assert within(60, lambda: not tier(r).waiting)
            assert all(entry.unusable for entry in r.engine.cached_prefixes())
            assert r.ask(ids(100), 3)[1] == 0
    assert "could not be removed and stay unused until the next start: [Errno 30]" in caplog.text


def test_a_directory_that_cannot_be_written_is_read_though_it_exceeds_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
    monkeypatch.setattr(Directory, "lock", failing(errno.EROFS))
    with rig(tmp_path, budget=1000) as r:
        assert r.ask(ids(100), 3) == (r.backend.reply(ids(100), 3), 100)


def test_a_directory_that_vanishes_is_no_harm(tmp_path: Path) -> None:
    with rig(tmp_path / "cache") as r:
        r.ask(ids(100), 3)
    with rig(tmp_path / "cache") as r:
        while tier(r).store is None:
            pass
        shutil.rmtree(tmp_path / "cache")
        for prompt in (ids(100), ids(120, seed=1)):
            assert r.ask(prompt, 3) == (r.backend.reply(prompt, 3), 0)
        assert r.ask(ids(100), 3) == (r.backend.reply(ids(100), 3), 100)


def test_a_parent_removed_during_a_write_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
        wait_for(r, 2)
        shutil.rmtree(tmp_path / LAYOUT)
        r.ask(ids(200), 3)
        wait_for(r, 4)
        assert tier(r).stats.failures == 0
        r.ask(ids(300), 3)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with rig(tmp_path) as r:
        assert r.ask(ids(300), 3)[1] == 300


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


def test_unfinished_writes_are_dropped_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, sync = threading.Event(), os.fsync

    def slow(fd: int) -> None:
        gate.wait(120)
        sync(fd)

    with rig(tmp_path, flush=0.1) as r:
        assert within(60, lambda: tier(r).store is not None)
        monkeypatch.setattr(part.os, "fsync", slow)
        for seed in range(3):
            r.ask(ids(200, seed), 3)
        disk = tier(r)
    # It has ended, and the disk hangs still.
    assert disk.stats.saves == 0 and not gate.is_set()
    gate.set()
    assert within(60, lambda: not writing_threads())
    assert snapshots_left(tmp_path) == disk.stats.saves <= 1


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


@each_kind
def test_behind_a_damaged_snapshot_the_next_shorter_one_is_resumed(kind: dict[str, Any], tmp_path: Path) -> None:
    first, second = ids(150), ids(400)
    with rig(tmp_path, **kind) as r:
        for prompt in (first, second):
            r.ask(prompt, 1)
    found = Store(tmp_path, MODEL.model, 0).exact(np.array(second, np.int32))
    assert found is not None and found.manifest.first_page == 2
    damaged = found.path / (found.manifest.pages or found.manifest.state)[0].name
    data = bytearray(damaged.read_bytes())
    data[40] ^= 1
    damaged.write_bytes(data)
    with rig(tmp_path, **kind) as r:
        assert r.ask([*second, 7], 4) == (r.backend.reply([*second, 7], 4), 150)
        assert (tier(r).stats.damaged, tier(r).stats.hits) == (1, 1)


def test_a_damaged_page_is_not_resumed_in_part(tmp_path: Path) -> None:
    first = ids(400)
    with rig(tmp_path) as r:
        r.ask(first, 5)
    for path in tmp_path.rglob("pages-*.part"):
        data = bytearray(path.read_bytes())
        data[40] ^= 1
        path.write_bytes(data)
    prompt = [*first[:300], *ids(60, seed=1)]
    with rig(tmp_path) as r:
        assert r.ask(prompt, 5) == (r.backend.reply(prompt, 5), 0)
        assert tier(r).stats.damaged == 1


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


def test_a_slow_disk_delays_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    sync = os.fsync

    def slow(fd: int) -> None:
        gate.wait(30)
        sync(fd)

    with rig(tmp_path) as r:
        while tier(r).store is None:
            pass
        monkeypatch.setattr(part.os, "fsync", slow)
        for seed in range(12):
            prompt = ids(100, seed)
            assert r.ask(prompt, 3)[0] == r.backend.reply(prompt, 3)
        assert tier(r).stats.saves == 0
        # Little waits in memory; what was too much is skipped.
        assert tier(r).waiting <= 4 and tier(r).stats.skipped > 0
        assert r.engine.cache is not None and r.engine.cache.stats().disk is tier(r).stats
        assert 1 < tier(r).stats.queued <= saver.MAX_QUEUED + 2
        gate.set()
        assert within(60, lambda: not r.engine.cache.stats().disk.queued)


@pytest.mark.parametrize(
    ("owner", "call", "at"),
    [(Store, "open", 0), (Reader, "tokens", 0), (PartReader, "read", 1), (PartReader, "read", 2)],
)
def test_a_disk_that_hangs_is_left_alone(
    owner: Any, call: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [ids(200, seed) for seed in range(3)]
    with rig(tmp_path) as r:
        for prompt in prompts:
            r.ask(prompt, 3)
    gate, real, calls = threading.Event(), getattr(owner, call), itertools.count()

    def hangs(*arguments: Any) -> Any:
        if next(calls) >= at:
            assert gate.wait(60)
        return real(*arguments)

    with rig(tmp_path) as r:
        disk = tier(r)
        disk.wait_opened(60)
        with monkeypatch.context() as patched:
            patched.setattr(Deadline, "seconds", 0.05)
            patched.setattr(owner, call, hangs)
            for prompt in prompts[:2]:
                assert r.ask(prompt, 3) == (r.backend.reply(prompt, 3), 0)
            assert disk.stats.slow == 1, "the second one did not try"
            gate.set()
        (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert "the disk takes too long; nothing is read from it for a minute" in warning.getMessage()
        # It is asked again when that is over; what hung was not damaged.
        disk.reads_paused_until = 0.0
        assert r.ask(prompts[2], 3) == (r.backend.reply(prompts[2], 3), 200)
        assert disk.stats.hits == 1 and not [entry for entry in disk.contents() if entry.unusable]
    assert within(60, lambda: not descriptors(tmp_path))


def test_a_reply_that_a_slow_disk_holds_is_tokenized_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), Store.reply_tokens

    def hangs(*arguments: Any) -> Any:
        assert gate.wait(60)
        return real(*arguments)

    text = np.arange(100, dtype=np.int32)
    snapshots.write(Store(tmp_path, MODEL.model, 0), text, reply=ReplyTokens((("digest", 90, 101),), (7,)))
    with rig(tmp_path) as r:
        disk = tier(r)
        disk.wait_opened(60)
        with monkeypatch.context() as patched:
            patched.setattr(Deadline, "seconds", 0.05)
            patched.setattr(Store, "reply_tokens", hangs)
            assert disk.reply_tokens("digest") is None
            gate.set()
        assert disk.reply_tokens("digest") is None
        disk.reads_paused_until = 0.0
        assert disk.reply_tokens("digest") == [*range(90, 100), 7] and disk.reply_tokens("another") is None


def test_text_that_is_unknown_at_the_start_is_found_when_the_directory_is_read(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
    with rig(tmp_path, known=False) as r:
        while tier(r).store is None:
            pass
        assert r.ask(ids(100), 3)[1] == 100


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
