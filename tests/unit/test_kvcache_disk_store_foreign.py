"""A directory of snapshots: foreign and damaged files, and several servers on it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from luce.kvcache.disk.directory import Directory
from luce.kvcache.disk.files import OpenDirectory
from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.store import SnapshotGoneError, Store, StoreFullError
from tests.support.snapshots import MODEL, check, conversation_of, ids, sound, write


@pytest.mark.parametrize("file", ["manifest.json", "tokens.part", "pages-000-001.part", "state-002-003.part"])
@pytest.mark.parametrize("size", ["none", "one", "half", "almost"])
def test_a_truncated_file_is_quarantined(file: str, size: str, tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(3, step=150)
    for turn in conversation:
        write(store, turn)
    path = store.find(conversation[1])[0].path / file
    data = path.read_bytes()
    path.write_bytes(data[: {"none": 0, "one": 1, "half": len(data) // 2, "almost": len(data) - 1}[size]])
    again = Store(tmp_path, MODEL, 0)
    # What continues it is of no use without it.
    assert [e.manifest.length for e in again.find(conversation[2])] == [150]
    assert again.quarantines == 1
    assert sound(tmp_path, conversation) == 1


@pytest.mark.parametrize("gone", [LAYOUT, f"{LAYOUT}/tmp", f"{LAYOUT}/{MODEL}"])
def test_removed_directories_are_created_again(gone: str, tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(2)
    write(store, conversation[0])
    shutil.rmtree(tmp_path / gone)
    store.rescan()
    assert bool(store.snapshots) == gone.endswith("tmp")
    for turn in conversation:
        write(store, turn)
        store.rescan()
        check(store, store.find(turn)[0], turn)
    assert sound(tmp_path, conversation) == 2


def test_nothing_is_written_where_a_disk_was_mounted(tmp_path: Path) -> None:
    store = Store(tmp_path / "disk", MODEL, 0)
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(FileNotFoundError):
        write(store, ids(100))
    assert not (tmp_path / "disk").exists()


def test_only_the_last_damaged_snapshots_stay_in_trash(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    for seed in range(6):
        snapshot = write(store, ids(100, seed))
        assert snapshot is not None
        store.quarantine(snapshot, "a test")
    assert len(list((store.root / "trash").iterdir())) == 3


def test_foreign_files_and_directories_stay(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    write(store, ids(100))
    (tmp_path / "old.dkv").write_bytes(b"DKVC")
    (tmp_path / "photos").mkdir()
    (store.root / MODEL / "notes.txt").write_text("mine")
    (store.root / MODEL / "letters").mkdir()
    again = Store(tmp_path, MODEL, 0)
    assert len(again.snapshots) == 1
    assert (tmp_path / "old.dkv").exists() and (tmp_path / "photos").exists()
    assert (store.root / MODEL / "notes.txt").exists()
    assert (store.root / MODEL / "letters").exists() and again.quarantines == 0


def test_garbage_of_writers_that_ended_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    tmp = store.root / "tmp"
    old = time.time() - 7200
    for name in (f"{os.getpid()}-aa", f"{os.getpid()}-bb", "4194303-cc", "nobody"):
        (tmp / name).mkdir()
        (tmp / name / "part").write_bytes(b"x")
    os.utime(tmp / f"{os.getpid()}-bb", (old, old))
    Store(tmp_path, MODEL, 0)
    assert [path.name for path in tmp.iterdir()] == [f"{os.getpid()}-aa"]


def test_files_that_a_manifest_does_not_name_are_removed(tmp_path: Path) -> None:
    snapshot = write(Store(tmp_path, MODEL, 0), conversation_of(1)[0])
    assert snapshot is not None
    left = [snapshot.path / name for name in ("manifest.json.0123abcd", "state-004-005.part")]
    for path in left:
        path.write_bytes(b"left by a killed process")
    # Another process may be about to name them.
    Store(tmp_path, MODEL, 0)
    assert all(path.exists() for path in left)
    Store(tmp_path, MODEL, 0).tidy(older_than=-1.0)
    assert not any(path.exists() for path in left)
    assert sound(tmp_path, conversation_of(1)) == 1


def test_a_snapshot_that_cannot_be_removed_stays_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, MODEL, 0)
    for turn in conversation_of(2):
        write(store, turn)

    def refuse(*given: object, **more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        for snapshot in store.find(conversation_of(2)[1])[:1]:
            with pytest.raises(OSError, match="Read-only"):
                store.evict(snapshot)
        with pytest.raises(OSError, match="Read-only"):
            store.clear()
    assert sound(tmp_path, conversation_of(2)) == len(store.snapshots) == 2
    # Clearing a directory that is gone is no error.
    shutil.rmtree(store.root)
    assert store.clear() == 2 and not store.snapshots


def test_another_server_sees_what_the_first_one_wrote_and_removed(tmp_path: Path) -> None:
    one, two = Store(tmp_path, MODEL, 0), Store(tmp_path, MODEL, 0)
    conversation = conversation_of(2)
    write(one, conversation[0])
    two.rescan()
    write(two, conversation[1])
    assert two.find(conversation[1])[0].manifest.parent == two.find(conversation[0])[0].manifest.id
    one.rescan()
    check(one, one.find(conversation[1])[0], conversation[1])
    two.clear()
    one.rescan()
    assert not one.snapshots
    # Both write the same.
    written = [write(store, conversation[0]) for store in (one, two)]
    assert all(written)
    assert sound(tmp_path, conversation) == 1


def test_a_snapshot_that_another_server_evicted_is_reloaded(tmp_path: Path) -> None:
    one, two = Store(tmp_path, MODEL, 0), Store(tmp_path, MODEL, 0)
    conversation = conversation_of(2)
    for turn in conversation:
        write(one, turn)
    two.rescan()
    first, second = two.find(conversation[1])[::-1]
    one.evict(one.find(conversation[0])[0])
    # Its pages can still be read; its state is gone.
    check(two, second, conversation[1])
    with pytest.raises(FileNotFoundError):
        two.open(first)
    two.reload(first)
    assert [e.manifest.length for e in two.find(conversation[1])] == [200]
    check(two, two.find(conversation[1])[0], conversation[1])
    one.clear()
    two.reload(two.find(conversation[1])[0])
    assert not two.find(conversation[1]) and two.quarantines == 0


def test_the_same_snapshot_from_two_servers_is_one(tmp_path: Path) -> None:
    # The second one has not seen the first one's when it gives its own the name.
    one, two, turn = Store(tmp_path, MODEL, 0), Store(tmp_path, MODEL, 0), ids(150)
    for store in (one, two):
        snapshot = write(store, turn)
        assert snapshot is not None
        check(store, snapshot, turn)
    assert one.find(turn)[0].manifest == two.find(turn)[0].manifest
    assert sound(tmp_path, [turn]) == 1


@pytest.mark.parametrize("stays", [True, False])
def test_another_server_writes_the_same_snapshot_first(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's continues a snapshot that the first server has not seen."""
    one, two = Store(tmp_path, MODEL, 0), Store(tmp_path, MODEL, 0)
    turn, publish = ids(300), Directory.publish

    def late(directory: Directory, path: OpenDirectory, id: str) -> bool:
        monkeypatch.setattr(Directory, "publish", publish)
        assert write(two, turn[:150]) and write(two, turn)
        published = directory.publish(path, id)
        if not stays:
            two.clear()
        return published

    monkeypatch.setattr(Directory, "publish", late)
    if stays:
        snapshot = write(one, turn)
        assert snapshot is not None and snapshot.manifest.parent == two.find(turn[:150])[0].manifest.id
        check(one, snapshot, turn)
        assert sound(tmp_path, [turn[:150], turn]) == 2
    else:
        with pytest.raises(SnapshotGoneError, match="another server removed"):
            write(one, turn)
        assert not one.snapshots


def test_a_snapshot_that_goes_while_it_is_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, turn = Store(tmp_path, MODEL, 0), ids(150)
    write(store, turn)
    status = OpenDirectory.status

    def late(directory: OpenDirectory, name: str) -> os.stat_result:
        if name == "tokens.part":
            monkeypatch.setattr(OpenDirectory, "status", status)
            store.clear()
        return status(directory, name)

    monkeypatch.setattr(OpenDirectory, "status", late)
    again = Store(tmp_path, MODEL, 0)
    assert not again.snapshots and again.quarantines == 0


def test_an_unreadable_snapshot_is_not_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, turn = Store(tmp_path, MODEL, 0), ids(150)
    write(store, turn)

    def fail(*given: object) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(OpenDirectory, "read", fail)
        again = Store(tmp_path, MODEL, 0)
        assert not again.snapshots and again.quarantines == 0
    assert sound(tmp_path, [turn]) == 1


def test_only_one_server_makes_room_at_a_time(tmp_path: Path) -> None:
    one = Store(tmp_path, MODEL, 0)
    write(one, ids(100))
    one.budget = 2 * one.nbytes
    with Directory(tmp_path, MODEL).lock() as locked, pytest.raises(StoreFullError):
        assert locked
        write(one, ids(100, seed=1))
    assert len(one.snapshots) == 1
    write(one, ids(100, seed=1))
    assert one.evictions == 1


def test_two_servers_and_a_reader_at_once(tmp_path: Path) -> None:
    conversations = [conversation_of(4, seed=seed) for seed in range(4)]
    errors: list[BaseException] = []
    over = threading.Event()

    def serve(seed: int) -> None:
        try:
            store, rng = Store(tmp_path, MODEL, 60_000), np.random.default_rng(seed)
            for _ in range(150):
                turn = conversations[rng.integers(4)][rng.integers(4)]
                store.rescan()
                try:
                    write(store, turn)
                except (StoreFullError, SnapshotGoneError):
                    continue
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        from luce.kvcache.disk.part import DamagedError

        store = Store(tmp_path, MODEL, 0)
        while not over.is_set():
            store.rescan()
            for conversation in conversations:
                for snapshot in store.find(conversation[3]):
                    try:
                        check(store, snapshot, conversation[snapshot.manifest.length // 100 - 1])
                    except (OSError, DamagedError):
                        # Removed meanwhile; what can be read is right.
                        continue
                    except BaseException as error:
                        errors.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in (1, 2)]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    reader.join()
    assert not errors, errors
    assert not list((tmp_path / LAYOUT / "trash").iterdir())
    sound(tmp_path, [turn for conversation in conversations for turn in conversation])
