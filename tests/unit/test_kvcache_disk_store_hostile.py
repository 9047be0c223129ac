"""A directory of snapshots that somebody made up: each bad one is reported as it is, and takes no other with it."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.kvcache.disk.directory import Directory
from luce.kvcache.disk.manifest import LAYOUT, MANIFEST, ReplyTokens
from luce.kvcache.disk.open_files import MOST_IDLE
from luce.kvcache.disk.part import PartInfo, digest
from luce.kvcache.disk.store import Store
from luce.runtime.step import PAGE
from tests.support import forged
from tests.support.disk_tier import descriptors
from tests.support.snapshots import MODEL, check, ids, page, write

#: turns of a conversation: more than Python's frames, and more files than a process has descriptors by default
TURNS = 1150


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_a_chain_of_thousands_is_opened_read_quarantined_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    whole = ids(TURNS * PAGE)
    forged.chain(tmp_path, whole)
    store = Store(tmp_path, MODEL, 0)
    last = store.find(whole[: TURNS * PAGE], longer_than=(TURNS - 2) * PAGE, limit=(TURNS - 1) * PAGE)[0]
    reader = store.open(last)
    assert len(descriptors(tmp_path)) <= MOST_IDLE
    for first, count, frames in reader.page_runs:
        expected = page(whole[first * PAGE : (first + count) * PAGE])
        assert all((part.read(frame) == expected[frame.name]).all() for part, frame in frames)
    assert len(reader.page_runs) == TURNS - 1 and 0 < len(descriptors(tmp_path)) <= MOST_IDLE
    reader.close()
    assert not descriptors(tmp_path)
    assert (store.tokens(last) == whole[: (TURNS - 1) * PAGE]).all()
    store.mark_used(last)
    # The rest of the conversation goes with a damaged snapshot.
    middle = store.chain(last)[100]
    store.quarantine(middle, "a test")
    assert len(store.snapshots) == 100
    store.clear()
    assert not store.snapshots and not list((store.root / MODEL).iterdir())
    # What is left of a chain is swept in one go, too.
    forged.chain(tmp_path, whole)
    first = Store(tmp_path, MODEL, 0).chain(last)[0]
    (first.path / MANIFEST).unlink()
    again = Store(tmp_path, MODEL, 0)
    assert not again.snapshots and again.quarantines == 1


def test_evicting_the_last_turn_frees_a_long_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    whole = ids(TURNS * PAGE)
    forged.chain(tmp_path, whole)
    for snapshot in (store := Store(tmp_path, MODEL, 0)).snapshots:
        if snapshot.manifest.length < TURNS * PAGE:
            forged.replace_manifest(snapshot, resumable=False)
    store = Store(tmp_path, MODEL, 0)
    (last,) = [snapshot for snapshot in store.snapshots if snapshot.manifest.resumable]
    store.evict(last)
    assert not store.snapshots and not list((store.root / MODEL).iterdir())


INFO = PartInfo("tokens.part", 1, "0" * 32)
#: fields of a manifest that no server writes, and what the log says about them
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "NUL": ({"tokens": PartInfo("tokens\0.part", 1, "")}, r"names a part 'tokens\x00.part'"),
    "path": ({"tokens": PartInfo("../../lock", 1, "")}, "names a part '../../lock'"),
    "absolute": ({"state": (PartInfo("/etc/passwd", 1, ""),)}, "names a part '/etc/passwd'"),
    "long": ({"tokens": PartInfo("a" * 300 + ".part", 1, "")}, "names a part 'aaa"),
    "twice": ({"state": (INFO, INFO)}, "names a part twice"),
    "key": ({"key": "f" * 64}, "has the key of another snapshot"),
    "pages": ({"first_page": 2, "page_keys": ""}, "impossible pages"),
    "size": ({"tokens": PartInfo("tokens.part", -1, "")}, "impossible pages or sizes"),
    "reply": ({"reply": ReplyTokens((("a", -5, 3),), ())}, "impossible positions of a reply"),
    "format": ({"format": 3}, "format 3"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_forged_manifest_takes_no_other_with_it(field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes, reason = FIELDS[field]
    store, texts = Store(tmp_path, MODEL, 0), [ids(100, seed) for seed in range(2)]
    bad = write(store, texts[0])
    write(store, texts[1])
    assert bad is not None
    forged.replace_manifest(bad, **changes)
    again = Store(tmp_path, MODEL, 0)
    assert [len(again.find(text)) for text in texts] == [0, 1]
    check(again, again.find(texts[1])[0], texts[1])
    assert again.quarantines == 1 and reason in caplog.text


def test_a_manifest_of_deep_lists_takes_no_other_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, texts = Store(tmp_path, MODEL, 0), [ids(100, seed) for seed in range(2)]
    bad = write(store, texts[0])
    write(store, texts[1])
    assert bad is not None
    line = b'{"extra":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (bad.path / MANIFEST).write_bytes(line + b"\n" + digest(line).encode() + b"\n")
    again = Store(tmp_path, MODEL, 0)
    assert [len(again.find(text)) for text in texts] == [0, 1] and again.quarantines == 1
    assert "is not a snapshot and moved to trash" in caplog.text


@pytest.mark.parametrize("length", [1, 2, 3])
def test_snapshots_that_continue_each_other_in_a_circle_are_removed(length: int, tmp_path: Path) -> None:
    store, other = Store(tmp_path, MODEL, 0), ids(300, seed=9)
    circle = [write(store, ids(100 + seed, seed)) for seed in range(length)]
    write(store, other)
    for number, snapshot in enumerate(circle):
        following = circle[(number + 1) % length]
        assert snapshot is not None and following is not None
        forged.replace_manifest(snapshot, parent=following.manifest.id, first_page=0)
    again = Store(tmp_path, MODEL, 0)
    (left,) = again.snapshots
    check(again, left, other)
    assert again.clear() == 1 and not list((again.root / MODEL).iterdir())


def test_thousands_of_strangers_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ids(100)
    write(Store(tmp_path, MODEL, 0), text)
    directory = tmp_path / LAYOUT / MODEL
    for number in range(2000):
        (directory / f"stranger-{number}").mkdir()
        (directory / f"{number:032x}-{number}").mkdir()
    (directory / ("x" * 255)).mkdir()
    emptied: list[int] = []
    empty = Directory.empty_trash

    def counted(self: Directory, quarantined: int = 0) -> None:
        emptied.append(quarantined)
        empty(self, quarantined)

    monkeypatch.setattr(Directory, "empty_trash", counted)
    store = Store(tmp_path, MODEL, 0)
    check(store, store.find(text)[0], text)
    # Those with the name of a snapshot are moved together; a few of them are named.
    assert store.quarantines == 2000 and len(emptied) == 2
    assert len(list((tmp_path / LAYOUT / "trash").iterdir())) == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 6 and warnings[-1] == "1995 more directories are no snapshots and moved to trash"
    assert all("No such file or directory: 'manifest.json'" in warning for warning in warnings[:5])
    # The others are somebody's.
    assert len(list(directory.iterdir())) == 2002
    before = len(caplog.records)
    store.rescan()
    assert write(store, np.arange(70, dtype=np.int32)) is not None and len(caplog.records) == before


def test_a_snapshot_of_a_made_up_size_takes_no_space_from_others(tmp_path: Path) -> None:
    store, texts = Store(tmp_path, MODEL, 0), [ids(100, seed) for seed in range(3)]
    written = [write(store, text) for text in texts]
    bad = written[2]
    assert bad is not None
    # A file of holes: it occupies nothing.
    size = 1 << 40
    os.truncate(bad.path / "tokens.part", size)
    forged.replace_manifest(bad, tokens=PartInfo("tokens.part", size, bad.manifest.tokens.index))
    again = Store(tmp_path, MODEL, 1 << 20)
    again.make_room(0)
    assert [len(again.find(text)) for text in texts] == [1, 1, 0] and again.evictions == 1
