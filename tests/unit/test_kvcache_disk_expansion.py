"""Small files that expand to more than the machine has."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.kvcache.disk.expansion import SnapshotLimits
from luce.kvcache.disk.manifest import FEATURES, LOGITS, PROMPT_END, RESIDENCY
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.store import Store
from tests.support import forged
from tests.support.cached_engine import ids
from tests.support.daemons import within
from tests.support.disk_tier import MODEL, rig, tier

#: bytes that a part expands to, and bytes of memory that finding it out may take
BOMB, FEW = 256 << 20, 24 << 20
ZEROS: NDArray[np.int32] = np.zeros(BOMB // 4, np.int32)
#: kind of part, name of the tensor, its first page, and what the log says
BOMBS = {
    "tokens": ("tokens", "tokens", -1, "tokens of [('<i4', (67108864,))] instead of 100 int32"),
    "pages": ("pages", "blk.0.k", 0, "its pages expand to"),
    "state": ("state", "blk.0.memory", -1, "its state expand to"),
    "logits": ("state", LOGITS, -1, "its logits expand to"),
    "the prompt's end": ("state", PROMPT_END, -1, "its prompt_end expand to"),
    "residency": ("state", RESIDENCY, -1, "its residency expand to"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_part_that_expands_beyond_the_model_is_not_expanded(
    bomb: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, name, page, reason = BOMBS[bomb]
    caplog.set_level(logging.INFO)
    with rig(tmp_path) as r:
        for seed in range(2):
            r.ask(ids(100, seed), 3)
    store = Store(tmp_path, MODEL.model, 0)
    snapshot = store.exact(np.array(ids(100), np.int32))
    assert snapshot is not None
    forged.replace_part(snapshot, kind, {name: (page, ZEROS)})
    assert sum(path.stat().st_size for path in snapshot.path.iterdir()) < 200_000
    with rig(tmp_path) as r:
        tier(r).wait_opened(60)
        tracemalloc.start()
        try:
            assert r.ask([*ids(100), 5], 3)[0] == r.backend.reply([*ids(100), 5], 3)
            assert within(60, lambda: not tier(r).waiting)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < FEW
        # It is damaged, and said to be so; the other one is found.
        assert tier(r).stats.damaged == 1 and tier(r).current_stats().quarantines == 1
        assert r.ask(ids(100, 1), 3) == (r.backend.reply(ids(100, 1), 3), 100)
    assert reason in caplog.text and "takes too long" not in caplog.text


def test_features_beyond_what_the_drafter_can_use_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
    snapshot = Store(tmp_path, MODEL.model, 0).exact(np.array(ids(100), np.int32))
    assert snapshot is not None
    forged.replace_part(snapshot, "state", {f"{FEATURES}.1.2": (-1, ZEROS.view(np.uint16).reshape(-1, 2))})
    with rig(tmp_path) as r:
        tier(r).wait_opened(60)
        tracemalloc.start()
        try:
            assert r.ask(ids(100), 3) == (r.backend.reply(ids(100), 3), 100)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < FEW and not tier(r).stats.damaged
    # Without a drafter nobody reads them.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    store = Store(tmp_path, MODEL.model, 0, SnapshotLimits(1 << 20, 1 << 20, 1 << 20, features=1000))
    reader = store.open(next(one for one in store.snapshots if one.manifest.id == snapshot.manifest.id))
    with pytest.raises(DamagedError, match=f"{BOMB} bytes of features; the drafter can use 1000"):
        reader.features()
    reader.close()


def test_verifying_takes_little_memory(tmp_path: Path) -> None:
    # `luce cache verify` does not know the model: it reads all that is there.
    with rig(tmp_path) as r:
        r.ask(ids(100), 3)
    store = Store(tmp_path, MODEL.model, 0)
    snapshot = store.exact(np.array(ids(100), np.int32))
    assert snapshot is not None
    forged.replace_part(snapshot, "state", {"blk.0.memory": (-1, ZEROS)})
    store = Store(tmp_path, MODEL.model, 0)
    snapshot = store.exact(np.array(ids(100), np.int32))
    assert snapshot is not None
    tracemalloc.start()
    try:
        store.verify(snapshot)
        assert tracemalloc.get_traced_memory()[1] < FEW
    finally:
        tracemalloc.stop()
    forged.replace_part(snapshot, "tokens", {"tokens": (-1, ZEROS)})
    store = Store(tmp_path, MODEL.model, 0)
    with pytest.raises(DamagedError, match="instead of 100 int32"):
        store.verify(next(one for one in store.snapshots if one.manifest.id == snapshot.manifest.id))
