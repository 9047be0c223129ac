"""A directory of snapshots: what is evicted, and the budget."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from luce.kvcache.disk.files import OpenDirectory, open_directory
from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.store import Store, StoreFullError
from luce.runtime.step import PAGE, Int32
from tests.support.snapshots import MODEL, conversation_of, ids, sound, write


def last_used(days: float, store: Store, *prompts: Int32) -> None:
    """Set the last use of snapshots to a number of days ago."""
    for prompt in prompts:
        snapshot = store.exact(prompt)
        assert snapshot is not None
        snapshot.last_used = time.time() - days * 86400
        os.utime(snapshot.path / "manifest.json", (snapshot.last_used, snapshot.last_used))


def eviction_order(store: Store, *prompts: Int32) -> list[int]:
    """Evict snapshots one by one: the order in which prompts can no longer resume."""
    order: list[int] = []
    while store.snapshots:
        store.budget = store.nbytes
        store.make_room(1)
        store.budget = 0
        left = [snapshot is not None and snapshot.manifest.resumable for snapshot in map(store.exact, prompts)]
        order += [i for i, there in enumerate(left) if not there and i not in order]
    return order


def test_the_least_recently_used_snapshots_are_evicted(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    prompts = [ids(150, seed) for seed in range(5)]
    for prompt in prompts:
        snapshot = write(store, prompt)
        assert snapshot is not None
    store.budget = store.nbytes + 100
    for age, i in enumerate((3, 0, 4, 1, 2)):
        last_used(9 - age, store, prompts[i])
    write(store, ids(150, seed=7))
    assert store.nbytes <= store.budget and store.evictions >= 1
    left = [i for i in range(5) if store.find(prompts[i])]
    assert left == sorted((3, 0, 4, 1, 2)[store.evictions :])


def test_a_parent_is_evicted_after_its_children(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(3)
    for turn in conversation:
        write(store, turn)
    for opened in (store, Store(tmp_path, MODEL, 0)):
        snapshot = opened.exact(conversation[2])
        assert snapshot is not None
        last_used(3, opened, *conversation)
        opened.mark_used(snapshot)
        assert len({snapshot.last_used for snapshot in opened.snapshots}) == 1
    assert eviction_order(Store(tmp_path, MODEL, 0), *conversation) == [2, 1, 0]


def test_a_new_snapshot_counts_as_a_use_of_its_parent(tmp_path: Path) -> None:
    # The sequence may have been resumed from memory.
    store, conversation, other = Store(tmp_path, MODEL, 0), conversation_of(2), ids(150, seed=5)
    for prompt in (conversation[0], other):
        write(store, prompt)
    last_used(3, store, conversation[0])
    last_used(2, store, other)
    write(store, conversation[1])
    assert eviction_order(store, *conversation, other) == [2, 1, 0]
    # Also what comes back.
    for turn in conversation:
        write(store, turn)
    store.evict(store.find(conversation[0])[0])
    last_used(3, store, *conversation)
    write(store, other)
    write(store, conversation[0])
    assert eviction_order(store, conversation[0], other) == [1, 0]


def test_a_use_by_another_server_counts(tmp_path: Path) -> None:
    one, two, prompts = Store(tmp_path, MODEL, 0), Store(tmp_path, MODEL, 0), [ids(150, seed) for seed in range(3)]
    for days, prompt in zip((3, 2, 1), prompts, strict=True):
        write(one, prompt)
        last_used(days, one, prompt)
    two.rescan()
    two.mark_used(two.find(prompts[0])[0])
    assert eviction_order(one, *prompts) == [1, 2, 0]


def test_models_unused_for_a_month_are_evicted_first(tmp_path: Path) -> None:
    mine, prompts = Store(tmp_path, MODEL, 0), [ids(150, seed) for seed in range(3)]
    others = [Store(tmp_path, letter * 32, 0) for letter in "ab"]
    for store in (mine, *others):
        for prompt in prompts:
            write(store, prompt)
    last_used(90, mine, *prompts)
    last_used(31, others[0], *prompts)
    # Some snapshots of a recently used model were not used.
    last_used(29, others[1], prompts[0])
    last_used(40, others[1], *prompts[1:])
    mine.rescan()
    mine.budget, gone = mine.nbytes, []
    while mine.snapshots:
        before = {(snapshot.manifest.model[0], snapshot.manifest.key) for snapshot in mine.snapshots}
        mine.budget = mine.nbytes
        mine.make_room(1)
        gone += [
            m for m, _ in before - {(snapshot.manifest.model[0], snapshot.manifest.key) for snapshot in mine.snapshots}
        ]
    assert gone == ["a"] * 3 + [MODEL[0]] * 3 + ["b"] * 3


def test_the_parent_of_a_new_snapshot_is_not_evicted_for_it(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    first, second = conversation_of(2)
    for turn in (first, second):
        write(store, turn)
    store.evict(store.find(first)[0])
    # What is left of the first turn served the second one only, which has to go.
    store.budget = store.nbytes + 100
    other = np.concatenate([first, ids(100, seed=7)])
    written = write(store, other)
    assert written is not None and written.manifest.first_page == len(first) // PAGE
    assert not store.find(second) and store.evictions == 1
    assert sound(tmp_path, [other]) == 1


def test_superseded_snapshots_of_a_conversation_are_evicted_first(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    other, conversation = ids(150, seed=5), conversation_of(5)
    write(store, other)
    for turn in conversation:
        write(store, turn, interim=True)
    store.budget = store.nbytes
    write(store, ids(100, seed=6))
    assert store.find(other)
    assert store.find(conversation[4])[0].manifest.length == 500
    assert len(store.find(conversation[4])) < 5


def test_a_snapshot_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 3000)
    with pytest.raises(StoreFullError):
        write(store, ids(300))
    assert not list((store.root / "tmp").iterdir())


def test_the_file_system_keeps_some_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, MODEL, 0)
    write(store, ids(100))
    everything, _ = open_directory(tmp_path).free()
    monkeypatch.setattr(OpenDirectory, "free", lambda directory: (everything, 0))
    with pytest.raises(StoreFullError):
        write(store, ids(100, seed=1))
    # It tried: what was there is gone.
    assert store.evictions == 1


def test_quarantined_snapshots_count_and_are_removed_first(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    for seed in range(2):
        snapshot = write(store, ids(100, seed))
    assert snapshot is not None
    before = store.nbytes
    store.quarantine(snapshot, "a test")
    assert store.nbytes >= before
    store.budget = before + 1000
    store.make_room(2000)
    assert not list((store.root / "trash").iterdir())
    assert len(store.snapshots) == 1 and store.evictions == 0


def test_a_snapshot_larger_than_expected_evicts_others_or_fails(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    write(store, ids(100))
    store.budget = store.nbytes + 2000
    store.compression = 0.01
    write(store, ids(150, seed=1))
    assert store.evictions == 1 and store.nbytes <= store.budget
    store.compression = 0.01
    with pytest.raises(StoreFullError):
        write(store, ids(1500, seed=2))
    assert store.nbytes <= store.budget and not list((store.root / "tmp").iterdir())


def test_earlier_formats_count_and_are_removed_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    old = tmp_path / "luce-v1" / MODEL / "some"
    old.mkdir(parents=True)
    (old / "part").write_bytes(bytes(5000))
    for name in ("luce-v99", "luce-vain"):
        (tmp_path / name).mkdir()
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(2)
    assert store.nbytes == 5000
    assert caplog.messages == ["luce-v1 of an earlier version (0.0 MiB) is not read, and makes room first"]
    write(store, conversation[0])
    store.budget = store.nbytes + 2500
    write(store, conversation[1])
    assert store.nbytes <= store.budget and store.evictions == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAYOUT, "luce-v99", "luce-vain"]
    assert sound(tmp_path, conversation) == 2
