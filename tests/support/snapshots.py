"""Snapshots whose contents follow from their tokens, so that tests can check what is read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import ReplyTokens
from luce.kvcache.disk.store import Store
from luce.kvcache.disk.writer import NewSnapshot, Writer
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import Tensors

LAYERS = (range(2), range(2, 4))
MODEL = "0123456789abcdef0123456789abcdef"


def ids(n: int, seed: int = 0) -> Int32:
    """`n` random tokens."""
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def conversation_of(turns: int, step: int = 100, seed: int = 0) -> list[Int32]:
    """The tokens after each turn of a conversation: each begins with those of the turn before."""
    whole = np.random.default_rng(seed).integers(0, 1000, turns * step).astype(np.int32)
    return [whole[: (turn + 1) * step] for turn in range(turns)]


def page(tokens: Int32) -> Tensors:
    """Keys and values of PAGE tokens: float16 in layer 0, bytes in layer 3."""
    values = np.outer(tokens, np.arange(1, 9)).astype(np.float32)
    return {"blk.0.k": np.sin(values).astype(np.float16)[:, None, :], "blk.3.v": (values % 251).astype(np.uint8)}


def state(ids: Int32) -> Tensors:
    """The tensors of a checkpoint beside whole pages."""
    return {"blk.2.memory": np.cos(np.arange(500, dtype=np.float32) * float(ids.sum() % 1000))}


def logits(ids: Int32) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.sin(np.arange(97, dtype=np.float32) + np.float32(ids[-1]))


def write(
    store: Store, ids: Int32, *, interim: bool = False, batch: int = 2, reply: ReplyTokens | None = None
) -> Snapshot | None:
    """Write a snapshot as the engine would; None if it is there."""
    missing = store.missing(ids)
    if missing is None:
        return None
    parent, first = missing
    whole = len(ids) // PAGE
    new = NewSnapshot(ids, parent, first, 5000 + 600 * (whole - first), interim)
    writer = Writer(store, new, LAYERS, lambda task: task())
    try:
        for begin in range(first, whole, batch):
            pages = [page(ids[i * PAGE : (i + 1) * PAGE]) for i in range(begin, min(begin + batch, whole))]
            writer.pages(begin, {name: np.concatenate([p[name] for p in pages]) for name in pages[0]})
        writer.state(state(ids))
        writer.prompt_end([1, 2], logits(ids[::-1]))
        writer.finish(logits(ids), reply)
        return writer.snapshot
    except BaseException:
        writer.abort()
        raise


def check(store: Store, snapshot: Snapshot, ids: Int32) -> None:
    """Everything that a snapshot holds is what belongs to its tokens."""
    reader = store.open(snapshot)
    try:
        assert (reader.tokens() == ids[snapshot.manifest.first_page * PAGE :]).all()
        at = 0
        for first, count, frames in reader.page_runs:
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
        last = reader.logits()
        assert last is not None and (last == logits(ids)).all()
        prompt_end = reader.prompt_end_logits(np.array([1, 2], np.int32))
        assert prompt_end is not None and (prompt_end == logits(ids[::-1])).all()
        assert reader.prompt_end_logits(ids[:0]) is reader.prompt_end_logits(ids[:2]) is None
    finally:
        reader.close()


def listed(store: Store) -> Iterator[tuple[Snapshot, Int32]]:
    """The resumable snapshots, with their tokens."""
    for snapshot in store.snapshots:
        if snapshot.manifest.resumable:
            yield snapshot, store.tokens(snapshot)


def sound(root: Path, allowed: Sequence[Int32]) -> int:
    """Open a directory anew: every resumable snapshot is whole and one of `allowed`, and there are no other files.

    Returns the number of resumable snapshots.
    """
    store = Store(root, MODEL, 0)
    store.tidy(older_than=-1.0)
    known = {ids.tobytes() for ids in allowed}
    count = 0
    for snapshot, ids in listed(store):
        assert ids.tobytes() in known
        check(store, snapshot, ids)
        assert snapshot in store.find(ids)
        count += 1
    assert not list((store.root / "tmp").iterdir()), "tmp is not empty"
    assert store.quarantines == 0
    for snapshot in store.snapshots:
        files = {path.name for path in snapshot.path.iterdir()}
        assert files == {part.name for part in snapshot.manifest.parts} | {"manifest.json"}
    return count
