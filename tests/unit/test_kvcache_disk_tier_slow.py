"""The engine with a prefix cache on the disk: disks that are slow or never answer."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.kvcache import saver
from luce.kvcache.disk import store
from luce.kvcache.disk.deadline import Deadline
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.manifest import ReplyTokens
from luce.kvcache.disk.part import PartReader
from luce.kvcache.disk.reader import Reader
from luce.kvcache.disk.store import Store
from luce.runtime.step import PAGE
from tests.support import snapshots
from tests.support.cached_engine import ids
from tests.support.daemons import within
from tests.support.disk_tier import MODEL, descriptors, rig, snapshots_left, tier, writing_threads


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


def test_no_page_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The writer is slower than the engine: each checkpoint of a long prompt continues the previous one all the same.
    sync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(0.01)
        sync(fd)

    with rig(tmp_path, recurrent=True, interval=100) as r:
        while tier(r).store is None:
            pass
        monkeypatch.setattr(os, "fsync", slow)
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


def test_unfinished_writes_are_dropped_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, sync = threading.Event(), os.fsync

    def slow(fd: int) -> None:
        gate.wait(120)
        sync(fd)

    with rig(tmp_path, flush=0.1) as r:
        assert within(60, lambda: tier(r).store is not None)
        monkeypatch.setattr(os, "fsync", slow)
        for seed in range(3):
            r.ask(ids(200, seed), 3)
        disk = tier(r)
    # It has ended, and the disk hangs still.
    assert disk.stats.saves == 0 and not gate.is_set()
    gate.set()
    assert within(60, lambda: not writing_threads())
    assert snapshots_left(tmp_path) == disk.stats.saves <= 1


def test_a_slow_disk_delays_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    sync = os.fsync

    def slow(fd: int) -> None:
        gate.wait(30)
        sync(fd)

    with rig(tmp_path) as r:
        while tier(r).store is None:
            pass
        monkeypatch.setattr(os, "fsync", slow)
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
    # At the end nothing is in the way of what was skipped.
    with rig(tmp_path) as r:
        for seed in range(12):
            assert r.ask(ids(100, seed), 3)[1] == 100


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
