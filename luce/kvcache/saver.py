"""Saver: checkpoints on their way to the disk, in small steps between the steps of running sequences."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from luce import log
from luce.errors import LuceError
from luce.kvcache.disk.manifest import ReplyTokens, keys
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.disk.writer import NewSnapshot, Writer
from luce.kvcache.memory_tier import BATCH, MemoryTier
from luce.kvcache.prefix_ids import PrefixIds, tokens_of
from luce.kvcache.prefix_tree import Checkpoint, PageNode
from luce.shard.saved_state import SavedState

_log = logging.getLogger(__name__)

#: while sequences run, the time between two pieces of work for the disk, as a multiple of the time of the first one
PAUSE_RATIO = 100
#: checkpoints that may wait for the disk; beyond that the oldest is skipped, if possible one that another continues
MAX_QUEUED = 16
#: replies without a snapshot of their own whose texts are kept; beyond that the oldest is forgotten
_MAX_OWED = 256


@dataclass(frozen=True)
class SnapshotExtras:
    """Data that a snapshot has beside its checkpoint."""

    #: texts of the reply at its end
    reply: ReplyTokens | None = None
    #: tokens from the checkpoint to the end of the prompt, and the logits there
    prompt_end: tuple[tuple[int, ...], NDArray[np.float32]] | None = None


class _Owed(NamedTuple):
    """The texts of a reply that has no snapshot of its own, and the length and key of the tokens that it would have."""

    length: int
    key: str
    reply: ReplyTokens


class Saver:
    """Writes checkpoints of at least `min_tokens` tokens to `disk`, which it closes. The texts of a reply whose
    checkpoint is not written go into the next snapshot of its conversation.

    All methods but `queued` and `busy` run on the engine's thread.
    """

    def __init__(self, memory: MemoryTier, disk: DiskTier, min_tokens: int) -> None:
        self.min_tokens = min_tokens
        self._memory = memory
        self._disk = disk
        self._queue: deque[tuple[Checkpoint, SnapshotExtras]] = deque()
        #: checkpoints that were skipped because too many waited; `flush` writes those that are still in memory
        self._skipped: WeakSet[Checkpoint] = WeakSet()
        self._owed: deque[_Owed] = deque(maxlen=_MAX_OWED)
        #: hands the pieces of a checkpoint to the disk, one at each step
        self.export: Generator[SavedState | None] | None = None
        #: the copy that `export` waits for
        self._awaited: SavedState | None = None
        #: the snapshot begun last
        self._writer: Writer | None = None
        #: time.monotonic() at which `pump` continues
        self._next = 0.0

    def enqueue(self, checkpoint: Checkpoint, extras: SnapshotExtras) -> None:
        """Write a checkpoint, if it is long enough."""
        if checkpoint.length < self.min_tokens:
            self._owe(self._memory.tree.ids(checkpoint), extras.reply)
            return
        self._queue.append((checkpoint, extras))
        if len(self._queue) > MAX_QUEUED:
            index, ids = self._dispensable()
            skipped, lost = self._queue[index]
            del self._queue[index]
            self._skipped.add(skipped)
            self._owe(ids, lost.reply)
            self._disk.stats.skipped += 1
            log.event(_log, "snapshot skipped", logging.DEBUG, tokens=skipped.length, why="too many wait for the disk")

    def clear(self) -> None:
        """Write nothing of the queue, nor the rest of the snapshot in progress."""
        self._queue.clear()
        self._skipped.clear()
        self._end_export()
        self._owed.clear()

    @property
    def pending(self) -> bool:
        """Whether `pump` has something to do now."""
        if not self._disk.accepts:
            return False
        # The next checkpoint continues the previous one once that is on the disk.
        return self.export is not None or (bool(self._queue) and (self._writer is None or self._writer.over))

    @property
    def queued(self) -> int:
        """Checkpoints that are being written or wait for it. Thread-safe."""
        writer = self._writer
        return len(self._queue) + (self.export is not None or (writer is not None and not writer.over))

    @property
    def busy(self) -> bool:
        """Whether anything is being written or waits for it. Thread-safe."""
        return bool(self.export or self._queue) or self._disk.waiting > 0

    def pump(self, *, idle: bool) -> None:
        """Do one bounded piece of work, if there is one and the disk accepts it.

        `idle`: no request waits for the engine. Otherwise pieces take at most one part in PAUSE_RATIO of the engine's
        thread.
        """
        started = time.monotonic()
        if not self.pending or not (idle or started >= self._next):
            return
        if self.export is None:
            self.export = self._export(*self._queue.popleft())
        try:
            if idle and self._awaited is not None:
                self._awaited.wait()
            self._awaited = next(self.export)
        except StopIteration:
            self.export = self._awaited = None
        except Exception as error:
            _log.warning("a checkpoint could not be written: %s", error, exc_info=not isinstance(error, LuceError))
            self._end_export()
        now = time.monotonic()
        self._next = now + PAUSE_RATIO * (now - started)

    def flush(self, seconds: float) -> None:
        """Write the queue and what was skipped, for at most `seconds`, and stop."""
        end = time.monotonic() + seconds
        again = [checkpoint for checkpoint in self._memory.tree.checkpoints if checkpoint in self._skipped]
        self._queue.extend((checkpoint, SnapshotExtras()) for checkpoint in again)
        if self._queue:
            # Needed before anything can be written.
            self._disk.wait_opened(seconds)
        while (self.export or self._queue) and time.monotonic() < end and self._disk.writable:
            self.pump(idle=True)
            if not self.pending:
                time.sleep(0.002)
        self._disk.close(max(0.0, end - time.monotonic()))

    def _export(self, checkpoint: Checkpoint, extras: SnapshotExtras) -> Generator[SavedState | None]:
        """Copy the pages of a checkpoint to host memory and hand everything to the disk, one bounded piece at a time.

        Yields the copy that it waits for, or None. Raises LuceError.
        """
        tree = self._memory.tree
        ids = tree.ids(checkpoint)
        if checkpoint not in tree.checkpoints:
            self._owe(ids, extras.reply)
            return
        missing = self._disk.missing(ids)
        if missing is None:
            return
        extras = replace(extras, reply=self._with_owed(ids, extras.reply))
        parent, first_page = missing
        nodes = self._memory.nodes(checkpoint)[first_page:]
        writer: Writer | None = None
        complete = False

        def begin(raw_bytes: int) -> Writer:
            self._writer = self._disk.write(NewSnapshot(ids, parent, first_page, raw_bytes, checkpoint.interim))
            return self._writer

        try:
            while nodes:
                run = _alike(nodes)
                if not all(node.in_tree for node in run):
                    return
                saved, index = yield from self._memory.saved_pages(run)
                if writer is None:
                    writer = begin(saved.nbytes // len(run) * len(nodes) + checkpoint.nbytes)
                for tensors in saved.windows(index, len(run)):
                    writer.pages(run[0].index, tensors)
                    yield None
                nodes = nodes[len(run) :]
            if writer is None:
                writer = begin(checkpoint.nbytes)
            for tensors in checkpoint.state.windows():
                writer.state(tensors)
                yield None
            if checkpoint.residency is not None:
                writer.residency(checkpoint.residency)
            for tail in () if checkpoint.features is None else checkpoint.features.windows():
                writer.features(tail)
                yield None
            if extras.prompt_end is not None:
                writer.prompt_end(*extras.prompt_end)
            writer.finish(checkpoint.logits, extras.reply)
            complete = True
        finally:
            if not complete:
                self._owe(ids, extras.reply)
                if writer is not None:
                    writer.abort()

    def _end_export(self) -> None:
        if self.export is not None:
            # It may wait for copies of a shard that is lost.
            with contextlib.suppress(LuceError):
                self.export.close()
        self.export = self._awaited = None

    def _dispensable(self) -> tuple[int, PrefixIds]:
        """The place in the queue of the oldest checkpoint that one behind it continues, else the first; and its
        tokens."""
        waiting = [self._memory.tree.ids(checkpoint) for checkpoint, _ in self._queue]
        for i, ids in enumerate(waiting):
            if any(len(later) > len(ids) and np.array_equal(later[: len(ids)], ids) for later in waiting[i + 1 :]):
                return i, ids
        return 0, waiting[0]

    def _owe(self, ids: PrefixIds, reply: ReplyTokens | None) -> None:
        """Keep the texts of a reply behind these tokens, which end with those of its checkpoint."""
        if reply is not None:
            ((length, key),) = keys(ids, [len(ids)])
            self._owed.append(_Owed(length, key, reply))

    def _with_owed(self, ids: PrefixIds, reply: ReplyTokens | None) -> ReplyTokens | None:
        """The texts of a snapshot of these tokens: of its own reply, and those that are owed to earlier ones."""
        found = dict(keys(ids, sorted({owed.length for owed in self._owed if owed.length <= len(ids)})))
        texts = () if reply is None else reply.texts
        kept = []
        for owed in self._owed:
            if found.get(owed.length) != owed.key:
                kept.append(owed)
                continue
            rest = owed.reply.rest
            behind = tokens_of(ids[owed.length : owed.length + len(rest)])
            end = owed.length + len(rest) * (tuple(behind.tolist()) == rest)
            texts = (*(text for text in owed.reply.texts if text[2] <= end), *texts)
        self._owed = deque(kept, _MAX_OWED)
        return ReplyTokens(texts, () if reply is None else reply.rest) if texts else None


def _alike(nodes: Sequence[PageNode]) -> Sequence[PageNode]:
    """The first nodes that are all on the devices only, or consecutive in host memory; at most BATCH."""
    first = nodes[0].host
    for count, node in enumerate(nodes[:BATCH]):
        if node.host != (None if first is None else (first[0], first[1] + count)):
            return nodes[:count]
    return nodes[:BATCH]
