"""One snapshot on its way to the disk: its parts in a directory under tmp/, the manifest last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import luce
from luce.draft.feature_tail import FeatureTail
from luce.kvcache.disk import manifest as manifests
from luce.kvcache.disk.files import OpenDirectory
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import (
    FEATURES,
    LOGITS,
    MANIFEST,
    PROMPT_END,
    RESIDENCY,
    Manifest,
    ReplyTokens,
    keys,
    page_keys,
    snapshot_id,
)
from luce.kvcache.disk.part import PartWriter
from luce.kvcache.disk.store import Store
from luce.kvcache.prefix_ids import PrefixIds, stored
from luce.kvcache.prefix_tree import Residency
from luce.runtime.step import PAGE
from luce.shard.saved_state import Tensors, layer_of

#: a snapshot may exceed its expected size by this factor before more space is freed for it
_EXCESS = 1.25


@dataclass(frozen=True)
class NewSnapshot:
    """A snapshot to be written. `parent` and `first_page` as in Manifest."""

    ids: PrefixIds
    parent: Snapshot | None
    first_page: int
    #: expected size before compression
    raw_bytes: int
    interim: bool


class Writer:
    """Writes one snapshot. Finish or abort it.

    Every method hands a task to `run`, which may run it later on another thread, but in order; arrays must not change
    meanwhile. A task that fails ends the snapshot and raises OSError, StoreFullError or SnapshotGoneError; the tasks
    behind it do nothing. `layers` of each shard: one file for each. `written` is called when the snapshot is complete.
    """

    def __init__(
        self,
        store: Store,
        new: NewSnapshot,
        layers: Sequence[range],
        run: Callable[[Callable[[], None]], None],
        written: Callable[[Writer], None] = lambda writer: None,
    ) -> None:
        self._store = store
        self._new = new
        self._layers = layers
        self._run = run
        self._written = written
        #: below tmp/
        self._directory: OpenDirectory | None = None
        self._key = ""
        self._reserved = self._raw_bytes = self._accounted = 0
        #: snapshots that stay when space is freed for this one
        self._spared: Sequence[Snapshot] = ()
        self._prompt_end: tuple[int, ...] = ()
        self._parts: dict[str, PartWriter] = {}
        #: on the clock of time.monotonic
        self.started = time.monotonic()
        #: whether the snapshot is written, failed or aborted
        self.over = False
        #: the snapshot, once it is complete
        self.snapshot: Snapshot | None = None
        self._submit(self._begin)

    def pages(self, first: int, tensors: Tensors) -> None:
        """Write whole pages, numbered from `first` on."""
        self._submit(lambda: self._write(tensors, lambda name: self._file("pages", name), first))

    def state(self, tensors: Tensors) -> None:
        """Write tensors of the checkpoint that are not whole pages."""
        self._submit(lambda: self._write(tensors, lambda name: self._file("state", name)))

    def features(self, tail: FeatureTail) -> None:
        """Write features of the last positions for drafters, oldest first."""
        name = ".".join([FEATURES, *map(str, tail.layers)])
        self._submit(lambda: self._write({name: tail.rows}, lambda name: "state-features.part"))

    def residency(self, residency: Residency) -> None:
        """Write which pages were resident."""
        self._submit(lambda: self._write({RESIDENCY: residency.encode()}, lambda name: "state-residency.part"))

    def prompt_end(self, ids: Sequence[int], logits: NDArray[np.float32]) -> None:
        """Write the logits of a prompt's end, and the tokens from the snapshot's end to there."""

        def write() -> None:
            self._write({PROMPT_END: logits}, lambda name: "state-prompt-end.part")
            self._prompt_end = tuple(ids)

        self._submit(write)

    def finish(self, logits: NDArray[np.float32] | None, reply: ReplyTokens | None = None) -> None:
        """Write the logits of the last token, if given, and complete the snapshot."""
        self._submit(lambda: self._finish(logits, reply))

    def abort(self) -> None:
        """Remove what was written, after the tasks that were handed over."""
        self._submit(self.discard)

    def discard(self) -> None:
        """Remove what was written, now. Idempotent."""
        self.over = True
        for part in self._parts.values():
            with contextlib.suppress(OSError):
                part.close()
        if self._directory is not None:
            self._store.discard(self._directory)
        self._settle()

    def _submit(self, task: Callable[[], None]) -> None:
        def run() -> None:
            if self.over:
                return
            try:
                task()
            except BaseException:
                self.discard()
                raise

        self._run(run)

    def _begin(self) -> None:
        new = self._new
        ((length, self._key),) = keys(new.ids, [len(new.ids)])
        self._directory, self._reserved, self._spared = self._store.begin(
            snapshot_id(self._key, length), new.parent, new.raw_bytes
        )
        self._write({"tokens": stored(new.ids[new.first_page * PAGE :])}, lambda name: "tokens.part")

    def _finish(self, logits: NDArray[np.float32] | None, reply: ReplyTokens | None) -> None:
        assert self._directory is not None
        if logits is not None:
            self._write({LOGITS: logits}, lambda name: "state-logits.part")
        parts = {name: part.finish() for name, part in self._parts.items()}
        new, length = self._new, len(self._new.ids)
        manifest = Manifest(
            format=manifests.FORMAT,
            writer=luce.__version__,
            model=self._store.model,
            id=snapshot_id(self._key, length),
            key=self._key,
            length=length,
            created=time.time(),
            parent=None if new.parent is None else new.parent.manifest.id,
            first_page=new.first_page,
            interim=new.interim,
            resumable=True,
            has_logits=logits is not None,
            tokens=parts["tokens.part"],
            pages=tuple(part for name, part in parts.items() if name.startswith("pages")),
            state=tuple(part for name, part in parts.items() if name.startswith("state")),
            raw_bytes=self._raw_bytes,
            reply=reply,
            prompt_end=self._prompt_end,
            page_keys="".join(page_keys(new.ids, new.first_page)),
        )
        self._directory.write(MANIFEST, manifest.encode())
        self._directory.sync()
        self.snapshot = self._store.commit(self._directory, manifest)
        self._settle()
        self.over = True
        self._written(self)

    def _write(self, tensors: Tensors, file: Callable[[str], str], page: int = -1) -> None:
        assert self._directory is not None
        for name, tensor in tensors.items():
            part = self._parts.get(file(name))
            if part is None:
                part = self._parts[file(name)] = PartWriter(self._directory, file(name))
            before = part.nbytes
            part.add(name, tensor, page)
            self._raw_bytes += tensor.nbytes
            self._accounted += part.nbytes - before
            self._store.account(part.nbytes - before)
            if self._accounted > self._reserved * _EXCESS:
                self._reserved = self._accounted
                self._store.make_room(0, self._spared)

    def _settle(self) -> None:
        self._store.account(-self._accounted)
        self._accounted = 0
        if self._directory is not None:
            self._directory.close()

    def _file(self, kind: str, name: str) -> str:
        """Tensor `blk.N.NAME` belongs to the file of the shard with layer N."""
        own = next(layers for layers in self._layers if layer_of(name) in layers)
        return f"{kind}-{own.start:03d}-{own.stop - 1:03d}.part"
