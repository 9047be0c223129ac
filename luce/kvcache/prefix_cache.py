"""PrefixCache: reuses what sequences computed for later sequences that begin with the same tokens.

Pages of full attention are shared where they are, in the devices' pools. A later sequence writes behind them only, so
no sequence writes to a shared page. The rest of a checkpoint cannot be shared: recurrent states, the last window of
windowed groups, and the page that is not full. It is copied to host memory when the checkpoint is saved, and to the
slot and pages of a sequence that resumes there.

Checkpoints lie in memory (luce.kvcache.memory_tier). Some of them are written to the disk behind the replies
(luce.kvcache.saver), and come back from there (luce.kvcache.restorer). Everything runs on the engine's thread, the only
one that may call the backend.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce import log
from luce.backend.backend import Backend
from luce.draft.feature_tail import FeatureTail
from luce.errors import LuceError
from luce.kvcache.disk.deadline import Deadline
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import keys, snapshot_id
from luce.kvcache.disk.stats import CachedPrefix, DiskStats
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.memory_tier import MemoryTier
from luce.kvcache.page_table import PageTables
from luce.kvcache.paging import Pager
from luce.kvcache.prefix_ids import PrefixIds
from luce.kvcache.prefix_tree import Checkpoint, PageNode
from luce.kvcache.restorer import Restorer
from luce.kvcache.saver import Saver, SnapshotExtras
from luce.runtime.step import PAGE

_log = logging.getLogger(__name__)

#: a snapshot is read only if it has more tokens beyond the prefix in memory than this
_MIN_GAIN = 64


@dataclass(frozen=True)
class Hit:
    """Where a prompt resumes."""

    #: tokens restored, 0 if nothing was found
    length: int
    #: the checkpoint at `length`; None if whole pages were restored only
    checkpoint: Checkpoint | None
    #: "ram", "disk" or "none"
    tier: str
    #: tokens of the prompt in cached whole pages, even if no sequence can resume behind them
    matched: int
    #: float32 [vocab] of the last token, if the whole prompt was restored: the reply begins without a step
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class _Match:
    """A place in memory where a prompt can resume: the fields as in Hit."""

    length: int
    nodes: Sequence[PageNode]
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class CacheStats:
    """Numbers at one moment, with counters since the start."""

    #: host memory of the RAM tier, and its limit
    bytes: int = 0
    budget: int = 0
    checkpoints: int = 0
    #: pages on the devices
    pages: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    reused_tokens: int = 0
    #: time to compute the reused tokens at the speed of the prompts so far, less the time to restore them
    seconds_saved: float = 0.0
    disk: DiskStats | None = None


class PrefixCache:
    """Both tiers. `budget`: bytes of host memory. `disk` gets checkpoints of at least `min_tokens` tokens.

    `pager`: for sequences whose pages do not all fit on the devices.
    """

    def __init__(
        self,
        backend: Backend,
        tables: PageTables,
        budget: int,
        disk: DiskTier | None = None,
        min_tokens: int = 0,
        pager: Pager | None = None,
    ) -> None:
        self._pager = pager
        self._hits = self._misses = self._reused_tokens = 0
        #: prompts computed so far: tokens, seconds
        self._computed = (0, 0.0)
        self._seconds_saved = 0.0
        self.memory = MemoryTier(backend, tables, budget, pager)
        self._restorer = Restorer(backend, tables, self.memory, pager)
        self.disk = disk
        self.saver = None if disk is None else Saver(self.memory, disk, min_tokens)
        #: whether sequences resume at checkpoints only. Without recurrent states and windows they resume behind any
        #: page
        self.checkpoints_only = backend.capacity.recurrent or tables.windowed

    def stats(self) -> CacheStats:
        """Numbers for /v1/cache and the metrics. Thread-safe."""
        disk = None if self.disk is None else self.disk.current_stats()
        if disk is not None and self.saver is not None:
            disk.queued = self.saver.queued
        return CacheStats(
            bytes=self.memory.bytes,
            budget=self.memory.budget,
            checkpoints=len(self.memory.tree.checkpoints),
            pages=self.memory.pages,
            hits=self._hits,
            misses=self._misses,
            evictions=self.memory.evictions,
            reused_tokens=self._reused_tokens,
            seconds_saved=self._seconds_saved,
            disk=disk,
        )

    def resume(self, prompt: PrefixIds, slot: int, limit: int | None = None) -> Hit:
        """Restore the longest cached prefix of a prompt, at most `limit` tokens, into an empty slot.

        The whole prompt is restored only at a checkpoint with the logits of the last token.
        """
        started = time.monotonic()
        hit = self._resume(prompt, slot, len(prompt) if limit is None else limit)
        took = time.monotonic() - started
        tokens, seconds = self._computed
        if hit.length and tokens:
            self._seconds_saved += max(0.0, hit.length * seconds / tokens - took)
        if hit.length:
            facts = {"tier": hit.tier, "tokens": hit.length, "prompt": len(prompt), "seconds": round(took, 4)}
            log.event(_log, "prefix reused", logging.DEBUG, **facts)
        return hit

    def record_computed(self, tokens: int, seconds: float) -> None:
        """Note the time that computing tokens of a prompt took."""
        self._computed = self._computed[0] + tokens, self._computed[1] + seconds

    def save(
        self,
        slot: int,
        ids: PrefixIds,
        logits: NDArray[np.float32] | None = None,
        features: FeatureTail | None = None,
        *,
        interim: bool,
        after: Checkpoint | None = None,
        extras: SnapshotExtras | None = None,
    ) -> Checkpoint | None:
        """Save a checkpoint of a slot, which holds exactly `ids`. None if that failed.

        `after`: the previous checkpoint of the same sequence, which this one supersedes if that is an interim one.
        `extras`: write it to the disk as well, with these. `features`: of the last positions, for drafters.
        """
        if self._pager is not None and not self._pager.complete(slot):
            return None
        try:
            checkpoint = self.memory.save(slot, ids, logits, features, interim=interim)
        except LuceError as error:
            _log.warning("a checkpoint could not be saved: %s", error)
            return None
        checkpoint.interim &= interim
        checkpoint.superseded = False
        if after is not None and after is not checkpoint:
            after.superseded = after.interim
        if extras is not None:
            self.enqueue(checkpoint, extras)
        return checkpoint

    def enqueue(self, checkpoint: Checkpoint, extras: SnapshotExtras) -> None:
        """Write a checkpoint to the disk, if there is a disk tier."""
        if self.saver is not None:
            self.saver.enqueue(checkpoint, extras)

    def contents(self) -> list[CachedPrefix]:
        """The checkpoints in memory, then those on the disk, most recently used first."""
        tree = self.memory.tree
        found = []
        for checkpoint in sorted(tree.checkpoints, key=lambda checkpoint: -checkpoint.last_used):
            ((length, key),) = keys(tree.ids(checkpoint), [checkpoint.length])
            found.append(CachedPrefix(snapshot_id(key, length), "ram", length, checkpoint.nbytes))
        return found + ([] if self.disk is None else self.disk.contents())

    def clear(self) -> list[CachedPrefix]:
        """Remove all checkpoints, in memory and on the disk; returns the former contents."""
        found = self.contents()
        if self.saver is not None:
            self.saver.clear()
        self.memory.clear()
        if self.disk is not None:
            self.disk.clear()
        return found

    def _resume(self, prompt: PrefixIds, slot: int, limit: int) -> Hit:
        match, matched = self._match(prompt, limit)
        for snapshot, length in self._snapshots(prompt, 0 if match is None else match.length + _MIN_GAIN, limit):
            assert self.disk is not None
            # An earlier one of the list may be the same snapshot, or have shown that the disk is slow.
            if snapshot.unusable or not self.disk.readable:
                continue
            loaded = self._restorer.from_disk(self.disk, slot, prompt, length, snapshot, self._deadline(length))
            if loaded is not None:
                checkpoint, logits = loaded
                whole = checkpoint.length // PAGE * PAGE
                # The logits of the prompt's end follow from tokens behind the limit too.
                logits = logits if limit >= len(prompt) else None
                return Hit(checkpoint.length, checkpoint, "disk", max(matched, whole), logits)
            # The slot took pages and freed them: the match may have been evicted.
            match, matched = self._match(prompt, limit)
        if match is None or not self._restorer.from_memory(slot, match.length, match.nodes, match.checkpoint):
            self._misses += 1
            why = "nothing of it is cached"
            if match is not None:
                why = "it could not be restored"
            elif matched:
                why = "pages of it are cached, but no state behind them"
            log.event(_log, "prefix not reused", logging.DEBUG, prompt=len(prompt), matched=matched, why=why)
            return Hit(0, None, "none", matched)
        self._hits += 1
        self._reused_tokens += match.length
        logits = None if match.checkpoint is None or match.length < len(prompt) else match.checkpoint.logits
        return Hit(match.length, match.checkpoint, "ram", matched, logits)

    def _match(self, prompt: PrefixIds, limit: int) -> tuple[_Match | None, int]:
        """Where in memory a prompt can resume, and how many of its first `limit` tokens lie in cached whole pages."""
        nodes, checkpoints = self.memory.tree.match(prompt[:limit])
        usable = [c for c in checkpoints if c.length < len(prompt) or c.logits is not None]
        checkpoint = usable[-1] if usable else None
        length = 0 if checkpoint is None else checkpoint.length
        matched = len(nodes) * PAGE
        whole = min(matched, (len(prompt) - 1) // PAGE * PAGE)
        if not self.checkpoints_only and whole > length:
            return _Match(whole, nodes[: whole // PAGE], None), matched
        if checkpoint is None:
            return None, matched
        return _Match(length, nodes[: length // PAGE], checkpoint), matched

    def _snapshots(self, prompt: PrefixIds, longer_than: int, limit: int) -> list[tuple[Snapshot, int]]:
        return [] if self.disk is None else self.disk.find(prompt, longer_than, limit, exact=self.checkpoints_only)

    def _deadline(self, length: int) -> Deadline:
        """For reading `length` tokens: the time to compute them, if known."""
        tokens, seconds = self._computed
        return Deadline(length * seconds / tokens) if tokens else Deadline()
