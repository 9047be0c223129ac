"""A directory of snapshots: chains, eviction, budgets, foreign files, and several servers."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from luce.kvcache.disk import store as stores
from luce.kvcache.disk.directory import LAYOUT, Directory
from luce.kvcache.disk.manifest import ReplyTokens, keys
from luce.kvcache.disk.store import SnapshotGoneError, Store, StoreFullError
from luce.runtime.step import PAGE, Int32
from tests.support.snapshots import MODEL, check, conversation_of, sound, write


def ids(n: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def test_keys_are_those_of_the_prefixes() -> None:
    prompt = ids(300)
    for length, key in keys(prompt, [1, 64, 65, 300]):
        assert dict(keys(prompt[:length], [length])) == {length: key}


def test_the_longest_prefix_comes_first(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(3)
    snapshots = [write(store, turn) for turn in conversation]
    prompt = np.concatenate([conversation[2], ids(5, seed=9)])
    assert store.find(prompt) == snapshots[::-1]
    assert store.find(prompt, longer_than=100) == snapshots[:0:-1]
    assert store.find(conversation[1]) == snapshots[1::-1]
    assert store.find(conversation[0][:-1]) == []
    assert Store(tmp_path, "f" * 32, 0).find(prompt) == []


def test_a_turn_stores_its_own_pages_only(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(6)
    sizes = []
    for turn in conversation:
        snapshot = write(store, turn)
        assert snapshot is not None
        sizes.append(snapshot.manifest.nbytes)
        assert write(store, turn) is None
    assert max(sizes[1:]) < 1.5 * min(sizes[1:])
    for turn in conversation:
        check(store, store.find(turn)[0], turn)
        assert (store.tokens(store.find(turn)[0]) == turn).all()
    assert sound(tmp_path, conversation) == 6


def test_whole_pages_are_found_wherever_texts_diverge(tmp_path: Path) -> None:
    store, text = Store(tmp_path, MODEL, 0), ids(640)
    first = write(store, text[:200])
    whole = write(store, text)
    other = Store(tmp_path, "f" * 32, 0)
    for opened in (store, Store(tmp_path, MODEL, 0)):
        for length, holder in ((63, None), (64, first), (191, first), (192, first), (300, whole), (639, whole)):
            prompt = np.concatenate([text[:length], ids(50, seed=9)])
            found = opened.longest_prefix(prompt)
            expected = None if holder is None else (holder.manifest.id, length // PAGE * PAGE)
            assert (found and (found[0].manifest.id, found[1])) == expected
            assert other.longest_prefix(prompt) is None
        # Something is left to be read, and no more than is asked for.
        assert [opened.longest_prefix(text[:n])[1] for n in (640, 193, 192)] == [576, 192, 128]
        assert opened.longest_prefix(text, limit=150)[1] == 128 and opened.longest_prefix(text, limit=63) is None
        assert (
            opened.longest_prefix(text, longer_than=500)[1] == 576
            and opened.longest_prefix(text, longer_than=576) is None
        )
    # Pages of an evicted snapshot are found as well; an unusable snapshot is not.
    assert first is not None and whole is not None
    store.evict(first)
    assert store.longest_prefix(text[:150]) == (first, 128)
    whole.unusable = "a test"
    assert store.longest_prefix(text) == (first, 192)
    whole.unusable = ""
    store.evict(whole)
    assert store.longest_prefix(text) is None


def test_texts_that_diverge_share_their_pages(tmp_path: Path) -> None:
    store, text = Store(tmp_path, MODEL, 0), ids(640)
    one = write(store, text, interim=True)
    other = np.concatenate([text[:600], ids(1000, seed=1)])
    assert store.missing(other) == (one, 9)
    two = write(store, other)
    assert (
        one is not None and two is not None and (two.manifest.parent, two.manifest.first_page) == (one.manifest.id, 9)
    )
    # It does not supersede the snapshot that it diverges from.
    assert one.children == {two} and not one.superseded
    check(store, two, other)
    assert (store.tokens(two) == other).all()
    # Of this one too little would be shared, but for what it shares itself.
    third = np.concatenate([other[:700], ids(100, seed=2)])
    assert store.missing(third) == (one, 9)
    assert store.missing(np.concatenate([text[:300], ids(400, seed=3)])) == (None, 0)
    write(store, third)
    store.evict(one)
    assert sound(tmp_path, [text, other, third]) == 2
    # A whole beginning comes before others that have as much.
    store = Store(tmp_path, MODEL, 0)
    begun = write(store, other[: 9 * PAGE])
    assert begun is not None and begun.manifest.parent == one.manifest.id
    assert store.missing(np.concatenate([other[: 9 * PAGE], ids(100, seed=4)])) == (begun, 9)
    for snapshot in [store.exact(prompt) for prompt in (other, third, other[: 9 * PAGE])]:
        assert snapshot is not None
        store.evict(snapshot)
    assert not store.snapshots and not list((store.root / MODEL).iterdir())


def test_children_stay_readable_when_their_parents_are_evicted(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(4)
    for turn in conversation:
        write(store, turn)
    before = store.nbytes
    for turn in conversation[:3]:
        store.evict(store.find(turn)[0])
    assert store.nbytes < before
    assert [e.manifest.length for e in store.find(conversation[3])] == [400]
    assert sound(tmp_path, conversation) == 1
    # One of them comes back, without writing its pages again.
    assert store.missing(conversation[1]) == (store.chain(store.find(conversation[3])[0])[0], 200 // PAGE)
    write(store, conversation[1])
    assert sound(tmp_path, conversation) == 2
    for turn in (conversation[3], conversation[1]):
        store.evict(store.find(turn)[0])
    assert store.nbytes == 0 and not store.snapshots
    assert not list((store.root / MODEL).iterdir())


def test_replies_are_known_while_their_tokens_are_stored(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(3)
    for turn, (digest, begin) in zip(conversation, (("a", 30), ("b", 70), ("a", 300)), strict=True):
        write(store, turn, reply=ReplyTokens(((digest, begin, len(turn) + 1),), (7,)))
    for opened in (store, Store(tmp_path, MODEL, 0)):
        # Of two the newer one; where it ends with what no snapshot has, that too.
        assert opened.reply_tokens("b") == [*conversation[1][70:], 7]
        assert opened.reply_tokens("a") == [7] and opened.reply_tokens("c") is None
    assert Store(tmp_path, "f" * 32, 0).reply_tokens("b") is None
    store.evict(store.find(conversation[1])[0])
    store.evict(store.find(conversation[2])[0])
    assert store.reply_tokens("b") is None and store.reply_tokens("a") == [*conversation[0][30:], 7]
    write(store, conversation[1])
    store.evict(store.find(conversation[0])[0])
    # Its pages are needed still.
    assert store.reply_tokens("a") == [*conversation[0][30:], 7]
    write(store, conversation[0], reply=ReplyTokens((("d", 0, 5),), ()))
    for opened in (store, Store(tmp_path, MODEL, 0)):
        assert opened.reply_tokens("d") == conversation[0][:5].tolist()
        assert opened.reply_tokens("a") is None
    (store.find(conversation[0])[0].path / "tokens.part").unlink()
    assert store.reply_tokens("d") is None


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
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda path: disk._replace(free=0))
    with pytest.raises(StoreFullError):
        write(store, ids(100, seed=1))
    # It tried: what was there is gone.
    assert store.evictions == 1


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


def test_earlier_formats_count_and_are_removed_first(tmp_path: Path) -> None:
    old = tmp_path / "luce-v1" / MODEL / "some"
    old.mkdir(parents=True)
    (old / "part").write_bytes(bytes(5000))
    for name in ("luce-v99", "luce-vain"):
        (tmp_path / name).mkdir()
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(2)
    assert store.nbytes == 5000
    write(store, conversation[0])
    store.budget = store.nbytes + 2500
    write(store, conversation[1])
    assert store.nbytes <= store.budget and store.evictions == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAYOUT, "luce-v99", "luce-vain"]
    assert sound(tmp_path, conversation) == 2


def test_only_the_last_damaged_snapshots_stay_in_trash(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    for seed in range(6):
        snapshot = write(store, ids(100, seed))
        assert snapshot is not None
        store.quarantine(snapshot, "a test")
    assert len(list((store.root / "trash").iterdir())) == 3


def test_foreign_files_stay_and_foreign_directories_are_quarantined(tmp_path: Path) -> None:
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
    assert not (store.root / MODEL / "letters").exists() and again.quarantines == 1


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

    def refuse(*given: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(stores.os, "rename", refuse)
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


def test_an_unreadable_snapshot_is_not_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, turn = Store(tmp_path, MODEL, 0), ids(150)
    write(store, turn)

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
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


def test_many_snapshots_are_found_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    snapshot = write(store, ids(70))
    assert snapshot is not None
    for seed in range(40):
        write(store, ids(10, seed=seed + 1))
    again = Store(tmp_path, MODEL, 0)
    assert len(again.snapshots) == 41
    assert again.find(ids(70))[0].manifest == snapshot.manifest
