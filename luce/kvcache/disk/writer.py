"""One snapshot on its way to the disk: its parts in a directory under tmp/, the manifest last."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import luce
from luce.draft.feature_tail import FeatureTail
from luce.kvcache.disk import manifest as manifests
from luce.kvcache.disk.files import sync_directory, write_file
from luce.kvcache.disk.index import Entry
from luce.kvcache.disk.manifest import FEATURES, LOGITS, MANIFEST, OPENING, RESIDENCY, Manifest, Recall, snapshot_id
from luce.kvcache.disk.part import PartWriter
from luce.kvcache.prefix_tree import Residency
from luce.runtime.step import Int32
from luce.shard.saved_state import Tensors, layer_of

#: what is reserved may be exceeded so many times before there has to be more room
_EXCESS = 1.25


class Destination(Protocol):
    """Where snapshots go: luce.kvcache.disk.store.Store."""

    model: str

    def commit(self, path: Path, manifest: Manifest) -> Entry:
        """Make a directory that is written and synchronised a snapshot."""

    def account(self, grown: int) -> None:
        """So many more bytes are in tmp/ (fewer, if negative)."""

    def make_room(self, size: int, keep: Sequence[Entry] = ()) -> None:
        """Give up others than `keep` until so many more bytes fit."""


class Writer:
    """One snapshot while it is written. `abort` it, or `finish` it. Methods raise OSError, StoreFullError, GoneError.

    There is room for `reserved` bytes; more is made beside `keep`.
    """

    def __init__(
        self,
        store: Destination,
        path: Path,
        length: int,
        key: str,
        prefixes: str,
        parent: Entry | None,
        first: int,
        passing: bool,
        reserved: int,
        keep: Sequence[Entry],
    ) -> None:
        self._store = store
        self._path = path
        self._length = length
        self._key = key
        self._prefixes = prefixes
        self._parent = parent
        self._first = first
        self._passing = passing
        self._reserved = reserved
        self._keep = keep
        self._raw = self._accounted = 0
        self._opening: tuple[int, ...] = ()
        self._open: dict[str, PartWriter] = {}

    def tokens(self, ids: Int32) -> None:
        """Those from page `first` on."""
        self._write({"tokens": ids.astype("<i4")}, lambda name: "tokens.part")

    def pages(self, first: int, tensors: Tensors, layers: Sequence[range]) -> None:
        """Whole pages from number `first` on, in a file for each range of layers."""
        self._write(tensors, lambda name: _file("pages", name, layers), first)

    def state(self, tensors: Tensors, layers: Sequence[range]) -> None:
        """Some of what the point has beside pages."""
        self._write(tensors, lambda name: _file("state", name, layers))

    def features(self, tail: FeatureTail) -> None:
        """Some of what drafters read of the last positions, oldest first."""
        name = ".".join([FEATURES, *map(str, tail.layers)])
        self._write({name: tail.rows}, lambda name: "state-features.part")

    def residency(self, residency: Residency) -> None:
        """Which pages are to be on the devices."""
        self._write({RESIDENCY: residency.encode()}, lambda name: "state-residency.part")

    def opening(self, ids: Sequence[int], logits: NDArray[np.float32]) -> None:
        """The ids behind the snapshot's own up to the end of a prompt, and the logits there."""
        self._write({OPENING: logits}, lambda name: "state-opening.part")
        self._opening = tuple(ids)

    def finish(self, logits: NDArray[np.float32] | None, recall: Recall | None = None) -> Entry:
        """Everything is written but the logits of the last token, if they are kept: make it a snapshot."""
        if logits is not None:
            self._write({LOGITS: logits}, lambda name: "state-logits.part")
        parts = {name: part.finish() for name, part in self._open.items()}
        manifest = Manifest(
            format=manifests.FORMAT,
            writer=luce.__version__,
            model=self._store.model,
            id=snapshot_id(self._key, self._length),
            key=self._key,
            length=self._length,
            created=time.time(),
            parent=None if self._parent is None else self._parent.manifest.id,
            first=self._first,
            passing=self._passing,
            point=True,
            logits=logits is not None,
            tokens=parts["tokens.part"],
            pages=tuple(part for name, part in parts.items() if name.startswith("pages")),
            state=tuple(part for name, part in parts.items() if name.startswith("state")),
            raw=self._raw,
            recall=recall,
            opening=self._opening,
            prefixes=self._prefixes,
        )
        write_file(self._path / MANIFEST, manifest.encode())
        sync_directory(self._path)
        entry = self._store.commit(self._path, manifest)
        self._settle()
        return entry

    def abort(self) -> None:
        """Remove what was written. Idempotent."""
        for part in self._open.values():
            with contextlib.suppress(OSError):
                part.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._settle()

    def _write(self, tensors: Tensors, file: Callable[[str], str], page: int = -1) -> None:
        for name, tensor in tensors.items():
            part = self._open.get(file(name))
            if part is None:
                part = self._open[file(name)] = PartWriter(self._path / file(name))
            before = part.nbytes
            part.add(name, tensor, page)
            self._raw += tensor.nbytes
            self._accounted += part.nbytes - before
            self._store.account(part.nbytes - before)
            if self._accounted > self._reserved * _EXCESS:
                self._reserved = self._accounted
                self._store.make_room(0, self._keep)

    def _settle(self) -> None:
        self._store.account(-self._accounted)
        self._accounted = 0


def _file(kind: str, name: str, layers: Sequence[range]) -> str:
    """`blk.N.NAME` belongs into the file of the range of layers that has N."""
    own = next(r for r in layers if layer_of(name) in r)
    return f"{kind}-{own.start:03d}-{own.stop - 1:03d}.part"
