"""A snapshot on its way back from the disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.draft.feature_tail import FeatureTail
from luce.kvcache.disk.index import Entry
from luce.kvcache.disk.manifest import FEATURES, LOGITS, OPENING, RESIDENCY
from luce.kvcache.disk.part import DamagedError, Frame, PartInfo, PartReader
from luce.kvcache.prefix_tree import Residency
from luce.runtime.step import PAGE, Int32
from luce.shard.saved_state import layer_of

#: pages that are read together, and bytes of a share
_TOGETHER, _SHARE_BYTES = 32, 32 << 20


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor that lie in several frames, one behind the other."""

    frames: Sequence[tuple[PartReader, Frame, slice]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        counts = [len(range(*rows.indices(frame.shape[0]))) for _, frame, rows in self.frames]
        return sum(counts), *self.frames[0][1].shape[1:]

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * np.dtype(self.frames[0][1].dtype).itemsize

    def read(self, memory: NDArray[np.uint8]) -> NDArray[np.generic]:
        """The tensor, in memory of `nbytes` bytes. Raises DamagedError, OSError."""
        joined = memory.view(self.frames[0][1].dtype).reshape(self.shape)
        at = 0
        for part, frame, rows in self.frames:
            count = len(range(*rows.indices(frame.shape[0])))
            if count == frame.shape[0]:
                part.read(frame, joined[at : at + count])
            else:
                joined[at : at + count] = part.read(frame)[rows]
            at += count
        return joined


#: tensors by name
Share = Mapping[str, Rows]


class Reader:
    """A snapshot and those that it continues, all files open. Thread-safe; raises DamagedError."""

    def __init__(self, chain: Sequence[Entry]) -> None:
        self.manifest = chain[-1].manifest
        self._parts: list[PartReader] = []
        #: by first page: the frames of a run of pages, and how many pages of them count
        self.runs: list[tuple[int, int, list[tuple[PartReader, Frame]]]] = []
        self._state: list[tuple[PartReader, Frame]] = []
        try:
            for entry, after in zip(chain, [*chain[1:], None], strict=True):
                end = entry.manifest.length // PAGE if after is None else after.manifest.first
                self._open_pages(entry, end)
            for info in self.manifest.state:
                part = self._opened(chain[-1].path, info)
                self._state += [(part, frame) for frame in part.frames]
            self._tokens = self._opened(chain[-1].path, self.manifest.tokens)
        except BaseException:
            self.close()
            raise

    def tokens(self) -> Int32:
        """Those that this snapshot stores itself: from page `manifest.first` on."""
        return _tokens(self._tokens)

    def pages(self, low: int, high: int) -> Iterator[tuple[int, int, Share]]:
        """(first, count, share) of pages [low, high), a few at a time. Raises DamagedError if some are missing."""
        first, count = low, 0
        found: dict[str, list[tuple[PartReader, Frame, slice]]] = {}
        for start, pages, frames in self.runs:
            begin, end = max(start, low), min(start + pages, high)
            if begin >= end:
                continue
            if count and count + end - begin > _TOGETHER:
                yield first, count, _share(found)
                first, count, found = first + count, 0, {}
            if begin != first + count:
                break
            count += end - begin
            for part, frame in frames:
                rows = slice((begin - start) * PAGE, (end - start) * PAGE)
                found.setdefault(frame.name, []).append((part, frame, rows))
        if count:
            yield first, count, _share(found)
        if first + count < high:
            raise DamagedError(f"{self.manifest.id}: page {first + count} is missing")

    def states(self) -> Share:
        """The point's state."""
        return {frame.name: Rows([(part, frame, slice(None))]) for part, frame in self.state_frames()}

    def state_frames(self) -> list[tuple[PartReader, Frame]]:
        """The frames of the point's state."""
        others = (LOGITS, OPENING, RESIDENCY, FEATURES)
        return [(part, frame) for part, frame in self._state if frame.name.partition(".")[0] not in others]

    def logits(self) -> NDArray[np.float32] | None:
        """Those of the last token, if they are there."""
        return self._vector(LOGITS)

    def opened(self, ids: Int32) -> NDArray[np.float32] | None:
        """The logits behind a prompt of which the snapshot lacks `ids` at the end, if they are there."""
        same = len(ids) and np.array_equal(ids, np.array(self.manifest.opening, np.int64))
        return self._vector(OPENING) if same else None

    def residency(self) -> Residency | None:
        """Which pages are to be on the devices, None if all are. Raises DamagedError, OSError."""
        for part, frame in self._state:
            if frame.name == RESIDENCY:
                try:
                    return Residency.decode(part.read(frame))
                except ValueError as error:
                    raise DamagedError(f"{self.manifest.id}: its residency is {error}") from error
        return None

    def features(self) -> FeatureTail | None:
        """What drafters read of the last positions, if that is there. Raises DamagedError, OSError."""
        frames = [(part, frame) for part, frame in self._state if frame.name.partition(".")[0] == FEATURES]
        if not frames:
            return None
        named = {frame.name for _, frame in frames}
        rows = [part.read(frame) for part, frame in frames]
        whole = all(r.ndim == 2 and r.dtype == np.uint16 and r.shape[1:] == rows[0].shape[1:] for r in rows)
        layers = min(named).split(".")[1:]
        if len(named) != 1 or not whole or not all(layer.isdecimal() for layer in layers):
            raise DamagedError(f"{self.manifest.id}: its features do not fit each other")
        return FeatureTail.of(tuple(map(int, layers)), np.concatenate(rows).astype(np.uint16, copy=False))

    def close(self) -> None:
        """Idempotent."""
        for part in self._parts:
            part.close()

    def _vector(self, name: str) -> NDArray[np.float32] | None:
        for part, frame in self._state:
            if frame.name == name:
                return part.read(frame).astype(np.float32, copy=False)
        return None

    def _open_pages(self, entry: Entry, end: int) -> None:
        found: dict[int, list[tuple[PartReader, Frame]]] = {}
        for info in entry.manifest.pages:
            part = self._opened(entry.path, info)
            for frame in part.frames:
                found.setdefault(frame.page, []).append((part, frame))
        at = entry.manifest.first
        for first in sorted(found):
            counts = {frame.shape[0] // PAGE for _, frame in found[first] if frame.shape}
            if first != at or len(counts) != 1:
                raise DamagedError(f"{entry.manifest.id}: page {at} is missing")
            (count,) = counts
            if first < end:
                self.runs.append((first, min(count, end - first), found[first]))
            at += count
        if found and at < end:
            raise DamagedError(f"{entry.manifest.id}: page {at} is missing")

    def _opened(self, directory: Path, info: PartInfo) -> PartReader:
        self._parts.append(PartReader(directory, info))
        return self._parts[-1]


def by_layers(share: Share, shards: Sequence[range]) -> Iterator[tuple[range, Share]]:
    """A share as smaller ones, each of some layers of a shard, for the shards in turn; together of all their layers."""
    parts = [list(_apart(share, layers)) for layers in shards]
    for together in zip_longest(*parts):
        yield from (part for part in together if part is not None)


def _apart(share: Share, layers: range) -> Iterator[tuple[range, Share]]:
    begin, size = layers.start, 0
    found: dict[str, Rows] = {}
    own = {name: layer for name in share if (layer := layer_of(name)) in layers}
    for name, layer in sorted(own.items(), key=lambda item: item[1]):
        rows = share[name]
        if size and size + rows.nbytes > _SHARE_BYTES and layer not in map(layer_of, found):
            yield range(begin, layer), found
            begin, size, found = layer, 0, {}
        found[name] = rows
        size += rows.nbytes
    yield range(begin, layers.stop), found


def read_tokens(entry: Entry) -> Int32:
    """The tokens that a snapshot stores itself. Raises DamagedError or OSError."""
    part = PartReader(entry.path, entry.manifest.tokens)
    try:
        return _tokens(part)
    finally:
        part.close()


def verify(entry: Entry) -> None:
    """Read everything that a snapshot stores itself. Raises DamagedError or OSError."""
    for info in entry.manifest.parts:
        part = PartReader(entry.path, info)
        try:
            for frame in part.frames:
                part.read(frame)
        finally:
            part.close()


def _tokens(part: PartReader) -> Int32:
    if len(part.frames) != 1:
        raise DamagedError("not one frame of tokens")
    return part.read(part.frames[0]).astype(np.int32, copy=False)


def _share(found: Mapping[str, Sequence[tuple[PartReader, Frame, slice]]]) -> Share:
    return {name: Rows(frames) for name, frames in found.items()}
