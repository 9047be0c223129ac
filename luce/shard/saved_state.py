"""The saved state of a sequence: each shard's part is in host memory of the process that drives the shard's devices.

Tensors move between processes only when a caller reads a window of them. The memory is freed with the last reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Event
from luce.runtime.step import PAGE

#: Tensors by name: `blk.N.k` and in most layers `.v` [pages * PAGE, kv_heads, n] (n: luce.ops.kvtype), `blk.N.memory`,
#: `.past`
Tensors = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class StatePiece:
    """A part of a sequence's state, independent of the placement: the tensors of some layers."""

    #: slot of the recurrent states; None: there are none
    slot: int | None
    #: pages of each page group for the keys and values
    pages: Sequence[Sequence[int]]
    #: layers to copy; mirrors are copied from their donors' tensors
    layers: range
    #: tensors of these layers, and possibly of others
    tensors: Tensors


class SavedState(Protocol):
    """A sequence's state at the time of `save`."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, in all processes."""

    @property
    def pages(self) -> int:
        """Number of saved pages of full attention; known before they are copied."""

    def ready(self) -> bool:
        """Whether all copies are done, without waiting. Raises LuceError if they failed."""

    def wait(self) -> None:
        """Wait until all copies are done."""

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        """All tensors; of tensors that are made of pages, `count` pages from `first` on.

        Tensors of other processes come in windows of bounded size, which the iterator fetches one at a time. Mirrors of
        other shards' keys and values are excluded. Raises LuceError.
        """


@dataclass(frozen=True, eq=False)
class HostSavedState:
    """Tensors in this process."""

    tensors: Tensors
    #: ends the copies to the tensors
    copied: Event
    #: names of the tensors that are made of pages
    paged: frozenset[str] = frozenset()
    #: names of the tensors that copy another shard's keys and values
    mirrors: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def pages(self) -> int:
        return max((len(self.tensors[name]) // PAGE for name in self.paged), default=0)

    def ready(self) -> bool:
        return self.copied.done()

    def wait(self) -> None:
        self.copied.wait()

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        self.copied.wait()
        yield self.rows(first, count, self.tensors.keys() - self.mirrors)

    def rows(self, first: int, count: int | None, names: Container[str]) -> Tensors:
        """The tensors `names`; of those that are made of pages, `count` pages from `first` on."""
        end = None if count is None else (first + count) * PAGE
        return {
            name: tensor[first * PAGE : end] if name in self.paged else tensor
            for name, tensor in self.tensors.items()
            if name in names
        }


@dataclass(frozen=True, eq=False)
class JoinedSavedState:
    """The saved states of several shards."""

    #: in the order of the shards
    parts: Sequence[SavedState]
    #: waits until no other thread calls the shards
    wait_idle: Callable[[], None] = field(default=lambda: None)

    @property
    def nbytes(self) -> int:
        self.wait_idle()
        return sum(part.nbytes for part in self.parts)

    @property
    def pages(self) -> int:
        return max((part.pages for part in self.parts), default=0)

    def ready(self) -> bool:
        self.wait_idle()
        return all(part.ready() for part in self.parts)

    def wait(self) -> None:
        self.wait_idle()
        for part in self.parts:
            part.wait()

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        for part in self.parts:
            windows = part.windows(first, count)
            # Steps may have begun since the last one.
            self.wait_idle()
            while (window := next(windows, None)) is not None:
                yield window
                self.wait_idle()


def layer_of(name: str) -> int:
    """N of a tensor's name `blk.N.NAME`, -1 for other names."""
    match = re.match(r"blk\.(\d{1,6})\.", name)
    return -1 if match is None else int(match[1])
