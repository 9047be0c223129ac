"""A snapshot on its way back from the disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from luce.draft.feature_tail import FeatureTail
from luce.kvcache.disk.expansion import SnapshotLimits, check_tokens
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import FEATURES, LOGITS, PROMPT_END, RESIDENCY
from luce.kvcache.disk.part import DamagedError, Frame, PartInfo, PartReader
from luce.kvcache.prefix_ids import PrefixIds
from luce.kvcache.prefix_tree import Residency
from luce.runtime.step import PAGE
from luce.shard.saved_state import layer_of

#: pages that are read together
_PAGES = 32
#: bytes of tensors that are read together, unless one layer has more
_BYTES = 32 << 20


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Tensor = TypeVar("_Tensor", bound=_Sized)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on the disk: rows of one frame, or of several frames in order."""

    frames: Sequence[tuple[PartReader, Frame, slice]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        counts = [len(range(*rows.indices(frame.shape[0]))) for _, frame, rows in self.frames]
        return sum(counts), *self.frames[0][1].shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when it is decoded."""
        return math.prod(self.shape) * np.dtype(self.frames[0][1].dtype).itemsize

    def read(self, memory: NDArray[np.uint8]) -> NDArray[np.generic]:
        """Decode the tensor into memory of `nbytes` bytes. Raises DamagedError or OSError."""
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


class Reader:
    """A snapshot and the snapshots that it continues (`chain`, shortest first), all indexes read. Thread-safe.

    Raises DamagedError or OSError. `limits` of the model, None if it is not known.
    """

    def __init__(self, chain: Sequence[Snapshot], limits: SnapshotLimits | None = None) -> None:
        self.manifest = chain[-1].manifest
        self._limits = limits
        self._parts: list[PartReader] = []
        #: runs of pages in order: first page, number of pages, frames; a run's frames may have more pages at their end
        self.page_runs: list[tuple[int, int, list[tuple[PartReader, Frame]]]] = []
        self._state: list[tuple[PartReader, Frame]] = []
        try:
            for snapshot, after in zip(chain, [*chain[1:], None], strict=True):
                end = snapshot.manifest.length // PAGE if after is None else after.manifest.first_page
                self._open_pages(snapshot, end)
            for info in self.manifest.state:
                part = self._opened(chain[-1], info)
                self._state += [(part, frame) for frame in part.frames]
            if limits is not None:
                limits.check(self.manifest, (frame for _, frame in self._state))
            self._tokens = self._opened(chain[-1], self.manifest.tokens)
            check_tokens(self.manifest, self._tokens.frames)
        except BaseException:
            self.close()
            raise

    def tokens(self) -> PrefixIds:
        """The tokens that this snapshot stores itself: from page `manifest.first_page` on."""
        return _tokens(self._tokens)

    def pages(self, begin: int, end: int) -> Iterator[tuple[int, int, dict[str, StoredTensor]]]:
        """(first, count, tensors by name) of pages [begin, end), a few at a time. Raises DamagedError if one is
        missing."""
        first, count = begin, 0
        found: dict[str, list[tuple[PartReader, Frame, slice]]] = {}
        for run_first, run_count, frames in self.page_runs:
            low, high = max(run_first, begin), min(run_first + run_count, end)
            if low >= high:
                continue
            if count and count + high - low > _PAGES:
                yield first, count, _stored(found)
                first, count, found = first + count, 0, {}
            if low != first + count:
                break
            count += high - low
            for part, frame in frames:
                rows = slice((low - run_first) * PAGE, (high - run_first) * PAGE)
                found.setdefault(frame.name, []).append((part, frame, rows))
        if count:
            yield first, count, _stored(found)
        if first + count < end:
            raise DamagedError(f"{self.manifest.id}: page {first + count} is missing")

    def state(self) -> dict[str, StoredTensor]:
        """The tensors of the checkpoint that are not whole pages."""
        return {frame.name: StoredTensor([(part, frame, slice(None))]) for part, frame in self.state_frames()}

    def state_frames(self) -> list[tuple[PartReader, Frame]]:
        """The frames of these tensors."""
        others = (LOGITS, PROMPT_END, RESIDENCY, FEATURES)
        return [(part, frame) for part, frame in self._state if frame.name.partition(".")[0] not in others]

    def logits(self) -> NDArray[np.float32] | None:
        """The logits of the last token, if they are stored: float32 [vocab]."""
        return self._vector(LOGITS)

    def prompt_end_logits(self, ids: PrefixIds) -> NDArray[np.float32] | None:
        """The logits of the prompt that continues this snapshot by `ids`, if they are stored: float32 [vocab]."""
        same = len(ids) and np.array_equal(ids, np.array(self.manifest.prompt_end, np.int64))
        return self._vector(PROMPT_END) if same else None

    def residency(self) -> Residency | None:
        """Which pages were resident, None if all were. Raises DamagedError or OSError."""
        for part, frame in self._state:
            if frame.name == RESIDENCY:
                try:
                    return Residency.decode(part.read(frame))
                except ValueError as error:
                    raise DamagedError(f"{self.manifest.id}: wrong residency: {error}") from error
        return None

    def features(self) -> FeatureTail | None:
        """Features of the last positions for drafters, if they are stored and a drafter may use them. Raises
        DamagedError or OSError."""
        frames = [(part, frame) for part, frame in self._state if frame.name.partition(".")[0] == FEATURES]
        most = math.inf if self._limits is None else self._limits.features
        if not frames or not most:
            return None
        size = sum(frame.nbytes for _, frame in frames)
        if size > most:
            raise DamagedError(f"{self.manifest.id}: {size} bytes of features; the drafter can use {most}")
        names = {frame.name for _, frame in frames}
        rows = [part.read(frame) for part, frame in frames]
        alike = all(r.ndim == 2 and r.dtype == np.uint16 and r.shape[1:] == rows[0].shape[1:] for r in rows)
        layers = min(names).split(".")[1:]
        if len(names) != 1 or not alike or not all(layer.isdecimal() for layer in layers):
            raise DamagedError(f"{self.manifest.id}: its features have different layers, shapes or types")
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

    def _open_pages(self, snapshot: Snapshot, end: int) -> None:
        found: dict[int, list[tuple[PartReader, Frame]]] = {}
        for info in snapshot.manifest.pages:
            part = self._opened(snapshot, info)
            for frame in part.frames:
                found.setdefault(frame.page, []).append((part, frame))
        if self._limits is not None:
            self._limits.check(snapshot.manifest, (frame for run in found.values() for _, frame in run))
        at = snapshot.manifest.first_page
        for first in sorted(found):
            counts = {frame.shape[0] // PAGE for _, frame in found[first] if frame.shape}
            if first != at or len(counts) != 1:
                raise DamagedError(f"{snapshot.manifest.id}: page {at} is missing")
            (count,) = counts
            if first < end:
                self.page_runs.append((first, min(count, end - first), found[first]))
            at += count
        if found and at < end:
            raise DamagedError(f"{snapshot.manifest.id}: page {at} is missing")

    def _opened(self, snapshot: Snapshot, info: PartInfo) -> PartReader:
        self._parts.append(PartReader(snapshot.open, info))
        return self._parts[-1]


def by_layers(
    tensors: Mapping[str, _Tensor], shards: Sequence[range], most: int = _BYTES
) -> Iterator[tuple[range, dict[str, _Tensor]]]:
    """Split tensors into parts of about `most` bytes: (layers of one shard, their tensors), for each shard in turn.

    Together the parts name every layer of `shards` once, also those without tensors.
    """
    parts = [list(_of_shard(tensors, layers, most)) for layers in shards]
    for together in zip_longest(*parts):
        yield from (part for part in together if part is not None)


def _of_shard(tensors: Mapping[str, _Tensor], layers: range, most: int) -> Iterator[tuple[range, dict[str, _Tensor]]]:
    begin, size = layers.start, 0
    found: dict[str, _Tensor] = {}
    own = {name: layer for name in tensors if (layer := layer_of(name)) in layers}
    for name, layer in sorted(own.items(), key=lambda item: item[1]):
        tensor = tensors[name]
        if size and size + tensor.nbytes > most and layer not in map(layer_of, found):
            yield range(begin, layer), found
            begin, size, found = layer, 0, {}
        found[name] = tensor
        size += tensor.nbytes
    yield range(begin, layers.stop), found


def read_tokens(snapshot: Snapshot) -> PrefixIds:
    """The tokens that a snapshot stores itself. Raises DamagedError or OSError."""
    part = PartReader(snapshot.open, snapshot.manifest.tokens)
    try:
        check_tokens(snapshot.manifest, part.frames)
        return _tokens(part)
    finally:
        part.close()


def verify(snapshot: Snapshot, limits: SnapshotLimits | None = None) -> None:
    """Read all bytes that a snapshot stores itself. Raises DamagedError or OSError."""
    manifest = snapshot.manifest
    frames: list[Frame] = []
    for info in manifest.parts:
        part = PartReader(snapshot.open, info)
        try:
            if info is manifest.tokens:
                check_tokens(manifest, part.frames)
            else:
                frames += part.frames
            if limits is not None:
                limits.check(manifest, frames)
            for frame in part.frames:
                part.check(frame)
        finally:
            part.close()


def _tokens(part: PartReader) -> PrefixIds:
    found = part.read(part.frames[0])
    return found.astype(np.int64 if found.itemsize == 8 else np.int32, copy=False)


def _stored(found: Mapping[str, Sequence[tuple[PartReader, Frame, slice]]]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(frames) for name, frames in found.items()}
