"""The engine with a prefix cache on the disk: damage, disks that fail, directories that change or vanish."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luce.errors import BackendError
from luce.kvcache.disk.deadline import Deadline
from luce.kvcache.disk.directory import Directory
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.store import Store
from tests.support import snapshots
from tests.support.cached_engine import EXACT, FREE, each_kind, ids
from tests.support.daemons import within
from tests.support.disk_tier import MODEL, files, rig, tier, wait_for


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
            patch.setattr(os, call, failing(error))
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
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
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
        monkeypatch.setattr(os, "mkdir", failing(errno.EROFS))
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
            patched.setattr(os, "rename", failing(errno.EROFS))
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


def test_a_model_that_is_closed_while_it_is_identified_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identifying, closed = threading.Event(), threading.Event()

    def identify() -> Fingerprint:
        identifying.set()
        assert closed.wait(60)
        raise ValueError("model.gguf: is read after it was closed")

    with rig(tmp_path, known=False, identify=identify) as r:
        assert identifying.wait(60)
    closed.set()
    tier(r).wait_opened(60)
    assert not caplog.records
