"""The engine with a prefix cache on the disk, over the scripted backend."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from luce.kvcache.disk.expansion import SnapshotLimits
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.store import Store
from luce.kvcache.disk.tier import DiskTier
from tests.support.cached_engine import Rig
from tests.support.daemons import within
from tests.support.replies import make_engine
from tests.support.scripted_backend import ScriptedBackend

MODEL = Fingerprint("0123456789abcdef", {"--cache-type-k": "f16"})


@contextmanager
def rig(
    directory: Path,
    *,
    budget: int = 0,
    known: bool = True,
    model: Fingerprint = MODEL,
    identify: Callable[[], Fingerprint] | None = None,
    interval: int = 8192,
    flush: float = 30,
    resume_seconds: float = 0,
    **backend: Any,
) -> Iterator[Rig]:
    """An engine that starts anew over a directory; all is written when it ends."""
    scripted = ScriptedBackend(context=512, chunk=32, slots=2, **backend)
    scripted.resumes = not scripted.capacity.recurrent
    identify = identify or (lambda: model)
    disk = DiskTier(
        directory,
        budget=budget,
        identify=identify,
        known=known,
        layers=scripted.capacity.layers,
        limits=SnapshotLimits.of(scripted.capacity),
    )
    engine = make_engine(
        scripted,
        cache_bytes=1 << 22,
        checkpoint_interval=interval,
        disk=disk,
        min_disk_tokens=1,
        flush_seconds=flush,
        resume_seconds=resume_seconds,
    )
    try:
        yield Rig(engine, scripted)
    finally:
        engine.close()
    assert scripted.broken is None, scripted.broken


def tier(r: Rig) -> DiskTier:
    assert r.engine.cache is not None and r.engine.cache.disk is not None
    return r.engine.cache.disk


def wait_for(r: Rig, snapshots: int) -> None:
    """Until so many are written, or are not going to be."""
    stats = tier(r).stats
    assert within(60, lambda: stats.saves + stats.skipped + stats.failures >= snapshots)


def writing_threads() -> list[threading.Thread]:
    """The writing threads of all disk tiers."""
    return [thread for thread in threading.enumerate() if thread.name == "luce-cache-write"]


def descriptors(directory: Path) -> list[str]:
    """Files below a directory that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(str(directory))]


def snapshots_left(directory: Path) -> int:
    """Snapshots that a start would find; nothing else is left below the directory then."""
    found = Store(directory, MODEL.model, 0)
    assert not found.quarantines and not list((found.root / "tmp").iterdir())
    return len(found.snapshots)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and "trash" not in path.parts)
