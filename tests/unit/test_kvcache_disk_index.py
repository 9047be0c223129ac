"""Which snapshots match a text: a snapshot of all of it is of use only with the logits that its reply begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.tier import DiskTier
from tests.support.cached_engine import Rig, each_kind, ids
from tests.support.replies import make_engine
from tests.support.scripted_backend import ScriptedBackend


@contextmanager
def rig(directory: Path, **backend: Any) -> Iterator[Rig]:
    """An engine that starts anew over a directory; all is written when it ends."""
    scripted = ScriptedBackend(context=512, chunk=32, slots=2, **backend)
    scripted.resumes = not scripted.capacity.recurrent
    disk = DiskTier(
        directory,
        budget=0,
        identify=lambda: Fingerprint("0123456789abcdef", {}),
        known=True,
        layers=scripted.capacity.layers,
    )
    engine = make_engine(scripted, cache_bytes=1 << 22, disk=disk, min_disk_tokens=1)
    try:
        yield Rig(engine, scripted)
    finally:
        engine.close()
    assert scripted.broken is None, scripted.broken


@each_kind
def test_a_prompt_that_equals_the_end_of_a_stored_reply(kind: dict[str, Any], tmp_path: Path) -> None:
    prompt = ids(150)
    with rig(tmp_path, **kind) as r:
        reply, _ = r.ask(prompt, 20)
    # The reply's last token was never computed: the snapshot ends before it, without logits.
    turn = [*prompt, *reply[:-1]]
    with rig(tmp_path, **kind) as r:
        cache = r.engine.cache
        assert cache is not None and cache.disk is not None
        cache.disk.wait_opened(60)
        store = cache.disk.store
        assert store is not None
        stored = store.exact(np.array(turn, np.int32))
        assert stored is not None and stored.manifest.resumable and not stored.manifest.has_logits
        expected = r.backend.reply(turn, 6)
        first, cached = r.ask(turn, 6)
        assert first == expected and 0 < cached < len(turn)
        # The logits are known by now.
        assert r.ask(turn, 6) == (expected, len(turn))
        assert r.ask(prompt, 4) == (r.backend.reply(prompt, 4), len(prompt))
