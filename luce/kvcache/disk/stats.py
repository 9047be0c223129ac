"""Numbers of the disk tier for /v1/cache and the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnusedSnapshots:
    """Snapshots of the same weights that this model cannot use."""

    model: str
    snapshots: int
    bytes: int
    #: the settings that differ
    reason: str


@dataclass
class DiskStats:
    """Counters since the start, with numbers of one moment."""

    #: bytes below the directory, and their limit
    bytes: int = 0
    budget: int = 0
    snapshots: int = 0
    #: snapshots that are being written or wait for it
    queued: int = 0
    hits: int = 0
    reused_tokens: int = 0
    saves: int = 0
    #: snapshots not written because too many were queued, or because another server removed what they continue
    skipped: int = 0
    failures: int = 0
    evictions: int = 0
    quarantines: int = 0
    #: snapshots that were found and could not be restored: their bytes are not what was written
    damaged: int = 0
    #: the same: the disk reported an error
    unreadable: int = 0
    #: the same: the disk took too long
    slow: int = 0
    #: the same: they do not fit this model, or memory was short
    refused: int = 0
    #: bytes of snapshots on the disk, and before compression
    written_bytes: int = 0
    raw_bytes: int = 0
    #: work of the writing thread
    save_seconds: float = 0.0
    #: time that sequences waited for snapshots
    load_seconds: float = 0.0
    #: found at the start
    unused: tuple[UnusedSnapshots, ...] = ()


@dataclass(frozen=True)
class CachedPrefix:
    """A checkpoint as /v1/cache lists it."""

    id: str
    #: "ram" or "disk"
    tier: str
    tokens: int
    bytes: int
    #: seconds since the snapshot was made and since it was last used; None in memory, where only the order is known
    age: float | None = None
    idle: float | None = None
    #: why a snapshot on the disk is not used, "" if it is
    unusable: str = ""
