"""What shards put aside of a sequence, each in host memory of the process that drives its devices.

Nothing of it moves between processes until somebody asks for a window of it. It goes with the last reference.
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

#: tensors by name: `blk.N.k`, `.v` [pages * PAGE, kv_heads, n] (n: luce.ops.kvtype), `blk.N.memory`, `.past`
Tensors = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class StatePiece:
    """A part of a sequence's state, of any placement: the tensors of some layers."""

    #: whose recurrent states it holds; None: of no slot
    slot: int | None
    #: pages of each page group that its keys and values belong to
    pages: Sequence[Sequence[int]]
    #: the layers to copy; mirrors are copied from their donors' tensors
    layers: range
    #: of these layers, and possibly of others
    tensors: Tensors


class SavedState(Protocol):
    """A sequence's state as `save` found it."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, in all processes."""

    @property
    def pages(self) -> int:
        """Pages of full attention in it; known before they are copied."""

    def ready(self) -> bool:
        """Whether it is all copied, without waiting. Raises LuceError if it never will be."""

    def wait(self) -> None:
        """Until it is."""

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        """All of it; of tensors that are made of pages, `count` pages from `first` on.

        What is in other processes comes in windows of bounded size, each when the iterator comes to it. Mirrors of
        other shards' keys and values are left out. Raises LuceError.
        """


@dataclass(frozen=True, eq=False)
class HostSavedState:
    """Tensors in this process, there when `copied` has happened. `paged`: those that are made of pages."""

    tensors: Tensors
    copied: Event
    paged: frozenset[str] = frozenset()
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
        """Some tensors; of those that are made of pages, `count` pages from `first` on."""
        end = None if count is None else (first + count) * PAGE
        return {
            name: tensor[first * PAGE : end] if name in self.paged else tensor
            for name, tensor in self.tensors.items()
            if name in names
        }


@dataclass(frozen=True, eq=False)
class JoinedSavedState:
    """What several shards have kept, in their order. `quiet` waits until nobody else talks to them."""

    parts: Sequence[SavedState]
    quiet: Callable[[], None] = field(default=lambda: None)

    @property
    def nbytes(self) -> int:
        self.quiet()
        return sum(part.nbytes for part in self.parts)

    @property
    def pages(self) -> int:
        return max((part.pages for part in self.parts), default=0)

    def ready(self) -> bool:
        self.quiet()
        return all(part.ready() for part in self.parts)

    def wait(self) -> None:
        self.quiet()
        for part in self.parts:
            part.wait()

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        for part in self.parts:
            windows = part.windows(first, count)
            # Steps may have begun since the last one.
            self.quiet()
            while (window := next(windows, None)) is not None:
                yield window
                self.quiet()


def layer_of(name: str) -> int:
    """N of `blk.N.NAME`, -1 if the name is another one."""
    match = re.match(r"blk\.(\d{1,6})\.", name)
    return -1 if match is None else int(match[1])
