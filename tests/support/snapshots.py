"""Snapshots whose contents follow from their tokens, so that whatever is read back can be told from anything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from luce.kvcache.disk import store as stores
from luce.kvcache.disk.index import Entry
from luce.kvcache.disk.manifest import Recall
from luce.kvcache.disk.store import Store
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import Tensors

LAYERS = (range(2), range(2, 4))
MODEL = "0123456789abcdef0123456789abcdef"


def page(tokens: Int32) -> Tensors:
    """Keys and values of PAGE tokens: float16 in layer 0, bytes in layer 3."""
    values = np.outer(tokens, np.arange(1, 9)).astype(np.float32)
    return {"blk.0.k": np.sin(values).astype(np.float16)[:, None, :], "blk.3.v": (values % 251).astype(np.uint8)}


def state(ids: Int32) -> Tensors:
    """What a point has beside pages."""
    return {"blk.2.memory": np.cos(np.arange(500, dtype=np.float32) * float(ids.sum() % 1000))}


def logits(ids: Int32) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.sin(np.arange(97, dtype=np.float32) + np.float32(ids[-1]))


def write(
    store: Store, ids: Int32, *, passing: bool = False, batch: int = 2, recall: Recall | None = None
) -> Entry | None:
    """Write a snapshot as the engine would; None if it is there."""
    missing = store.missing(ids)
    if missing is None:
        return None
    parent, first = missing
    whole = len(ids) // PAGE
    writer = store.writer(ids, parent, first, 5000 + 600 * (whole - first), passing=passing)
    try:
        for begin in range(first, whole, batch):
            pages = [page(ids[i * PAGE : (i + 1) * PAGE]) for i in range(begin, min(begin + batch, whole))]
            writer.pages(begin, {name: np.concatenate([p[name] for p in pages]) for name in pages[0]}, LAYERS)
        writer.state(state(ids), LAYERS)
        writer.opening([1, 2], logits(ids[::-1]))
        return writer.finish(logits(ids), recall)
    except BaseException:
        writer.abort()
        raise


def check(store: Store, entry: Entry, ids: Int32) -> None:
    """Everything that a snapshot holds is what belongs to its tokens."""
    reader = store.reader(entry)
    try:
        assert (reader.tokens() == ids[entry.manifest.first * PAGE :]).all()
        at = 0
        for first, count, frames in reader.runs:
            assert first == at
            at += count
            whole = [page(ids[i * PAGE : (i + 1) * PAGE]) for i in range(first, at)]
            assert {frame.name for _, frame in frames} == set(whole[0])
            for part, frame in frames:
                expected = np.concatenate([p[frame.name] for p in whole])
                assert (part.read(frame)[: count * PAGE] == expected).all()
        assert at == len(ids) // PAGE
        found = {frame.name: part.read(frame) for part, frame in reader.state_frames()}
        assert found.keys() == state(ids).keys() and all((found[n] == t).all() for n, t in state(ids).items())
        kept = reader.logits()
        assert kept is not None and (kept == logits(ids)).all()
        opened = reader.opened(np.array([1, 2], np.int32))
        assert opened is not None and (opened == logits(ids[::-1])).all()
        assert reader.opened(ids[:0]) is reader.opened(ids[:2]) is None
    finally:
        reader.close()


def listed(store: Store) -> Iterator[tuple[Entry, Int32]]:
    """The snapshots that can be resumed, with their tokens."""
    for entry in store.entries:
        if entry.manifest.point:
            yield entry, store.tokens(entry)


def sound(root: Path, allowed: Sequence[Int32]) -> int:
    """A fresh look at a directory: all that is listed is whole and one of `allowed`, and nothing else is left there.

    Returns how many there are.
    """
    with patch.object(stores, "_UNNAMED_SECONDS", -1.0):
        store = Store(root, MODEL, 0)
    known = {ids.tobytes() for ids in allowed}
    count = 0
    for entry, ids in listed(store):
        assert ids.tobytes() in known
        check(store, entry, ids)
        assert entry in store.find(ids)
        count += 1
    assert not list((store.root / "tmp").iterdir()), "tmp is not empty"
    assert store.quarantines == 0
    for entry in store.entries:
        files = {path.name for path in entry.path.iterdir()}
        assert files == {part.name for part in entry.manifest.parts} | {"manifest.json"}
    return count
