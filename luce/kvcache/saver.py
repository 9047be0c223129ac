"""Saver: points on their way to the disk, in bounded pieces between the steps of the sequences that run."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce import log
from luce.errors import LuceError
from luce.kvcache.disk.manifest import ReplyTokens
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.disk.writer import NewSnapshot, Writer
from luce.kvcache.memory_tier import BATCH, MemoryTier
from luce.kvcache.prefix_tree import Checkpoint, PageNode
from luce.shard.saved_state import SavedState

_log = logging.getLogger(__name__)

# Time between two pieces of work for the disk while sequences run, in times of what the first one took.
_PATIENCE = 100
# Checkpoints that may wait for the disk; the oldest is skipped.
_OFFERED = 16


@dataclass(frozen=True)
class Offer:
    """What is to be written of a point beside itself.

    recall   texts of the reply that it ends with
    opening  ids behind it up to the end of the prompt, and the logits there
    """

    recall: ReplyTokens | None = None
    opening: tuple[tuple[int, ...], NDArray[np.float32]] | None = None


class Saver:
    """Writes points of at least `least` tokens to `disk`, which it closes.

    All but `waiting` and `busy` on the engine's thread.
    """

    def __init__(self, memory: MemoryTier, disk: DiskTier, least: int) -> None:
        self._memory = memory
        self._disk = disk
        self._least = least
        self._offered: deque[tuple[Checkpoint, Offer]] = deque()
        self._export: Generator[SavedState | None] | None = None
        self._awaited: SavedState | None = None
        self._saving: Writer | None = None
        #: when `pump` goes on, on time.monotonic's clock
        self._next = 0.0

    def offer(self, point: Checkpoint, offer: Offer) -> None:
        """A point is worth writing, if it is long enough."""
        if point.length < self._least:
            return
        self._offered.append((point, offer))
        if len(self._offered) > _OFFERED:
            skipped, _ = self._offered.popleft()
            self._disk.stats.skipped += 1
            log.event(_log, "snapshot skipped", logging.DEBUG, tokens=skipped.length, why="too many wait for the disk")

    def forget(self) -> None:
        """What was offered is not worth it any longer, nor is what is being written."""
        self._offered.clear()
        if self._export is not None:
            # A shard may be lost, on whose copies it waits.
            with contextlib.suppress(LuceError):
                self._export.close()
        self._export = self._awaited = None

    @property
    def pending(self) -> bool:
        """Whether `pump` has something to do now."""
        if not self._disk.accepts:
            return False
        # The next point continues the one before, once that is on the disk.
        return self._export is not None or (bool(self._offered) and (self._saving is None or self._saving.over))

    @property
    def waiting(self) -> int:
        """Checkpoints that are being written, or are to be. Any thread may ask."""
        saving = self._saving
        return len(self._offered) + (self._export is not None or (saving is not None and not saving.over))

    @property
    def busy(self) -> bool:
        """Whether something is to be written, or is being written. Any thread may ask."""
        return bool(self._export or self._offered) or self._disk.waiting > 0

    def pump(self, *, idle: bool) -> None:
        """A bounded piece of work for the disk, if there is some and the disk has room.

        `idle`: whether nobody waits for the engine. Otherwise there is time in between, so that it takes no more than a
        share of _PATIENCE of the engine's thread.
        """
        started = time.monotonic()
        if not self.pending or not (idle or started >= self._next):
            return
        if self._export is None:
            self._export = self._exported(*self._offered.popleft())
        try:
            if idle and self._awaited is not None:
                self._awaited.wait()
            self._awaited = next(self._export)
        except StopIteration:
            self._export = self._awaited = None
        except LuceError as error:
            _log.warning("a prefix could not be saved: %s", error)
            self._export = self._awaited = None
        now = time.monotonic()
        self._next = now + _PATIENCE * (now - started)

    def flush(self, seconds: float) -> None:
        """Write what waits to be written, for so long at most, and stop writing."""
        end = time.monotonic() + seconds
        if self._offered:
            # It is waited for in the end anyway.
            self._disk.wait_opened(seconds)
        while (self._export or self._offered) and time.monotonic() < end and self._disk.writable:
            self.pump(idle=True)
            if not self.pending:
                time.sleep(0.002)
        self._disk.close(max(0.0, end - time.monotonic()))

    def _exported(self, point: Checkpoint, offer: Offer) -> Generator[SavedState | None]:
        """Copies a point's pages to host memory and hands it to the disk, a bounded piece each turn.

        Gives what it waits for, if anything. Raises LuceError.
        """
        tree = self._memory.tree
        ids = tree.ids(point)
        missing = self._disk.missing(ids) if point in tree.points else None
        if missing is None:
            return
        parent, first = missing
        trail = self._memory.shared(point)[first:]
        save: Writer | None = None
        complete = False
        try:
            while trail:
                run = _alike(trail)
                if not all(block.alive for block in run):
                    return
                kept, at = yield from self._memory.on_host(run)
                if save is None:
                    raw = kept.nbytes // len(run) * len(trail) + point.nbytes
                    save = self._saving = self._disk.write(NewSnapshot(ids, parent, first, raw, point.passing))
                for tensors in kept.windows(at, len(run)):
                    save.pages(run[0].index, tensors)
                    yield None
                trail = trail[len(run) :]
            if save is None:
                save = self._saving = self._disk.write(NewSnapshot(ids, parent, first, point.nbytes, point.passing))
            for tensors in point.state.windows():
                save.state(tensors)
                yield None
            if point.residency is not None:
                save.residency(point.residency)
            for tail in () if point.features is None else point.features.windows():
                save.features(tail)
                yield None
            if offer.opening is not None:
                save.prompt_end(*offer.opening)
            save.finish(point.logits, offer.recall)
            complete = True
        finally:
            if save is not None and not complete:
                save.abort()


def _alike(blocks: Sequence[PageNode]) -> Sequence[PageNode]:
    """The first blocks that lie alike: on the devices only, or side by side in host memory. BATCH at most."""
    first = blocks[0]
    for count, block in enumerate(blocks[:BATCH]):
        same = block.data is None if first.data is None else block.data == (first.data[0], first.data[1] + count)
        if not same:
            return blocks[:count]
    return blocks[:BATCH]
