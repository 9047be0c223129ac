"""The interface of the engine to the model. `LayerSplitBackend` implements it; tests use a scripted one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.runtime.step import Int32, Output, Step
from luce.shard.saved_state import SavedState, StatePiece


@dataclass(frozen=True)
class Capacity:
    """What a backend has room for. It does not change once the model is loaded."""

    #: logits per row
    vocab: int
    #: most positions of one sequence
    context: int
    #: most sequences at a time: recurrent states exist for slots 0..slots-1
    slots: int
    #: window of each page group, None for full attention, in the order of Step.views
    windows: tuple[int | None, ...]
    #: pages of each page group: numbers 0..pages-1
    pages: tuple[int, ...]
    #: bytes of host memory for a saved page of full attention, in all layers
    page_bytes: int
    #: most pages of full attention that a sequence holds on the devices (KVFlash); None: all of its pages
    max_resident_pages: int | None
    #: further pages of each group for the branches of draft trees, numbered after `pages`; 0: no draft trees
    branch_pages: int
    #: most rows of a speculative span or of a draft tree; 0: neither is possible
    verify_rows: int
    #: whether a slot has a recurrent state, which cannot be rewound by shortening
    recurrent: bool
    #: layers of each shard; they cover all layers, in order
    layers: tuple[range, ...]
    #: bytes of host memory that `ranking` keeps of a page
    ranking_bytes: int


class BackendState(Protocol):
    """Saves and restores the pages and recurrent states of sequences, in all shards."""

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> SavedState:
        """As luce.shard.shard.ShardState.save, for all layers. Raises LuceError."""

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0) -> None:
        """The reverse of `save`, into any slot and as many pages; as luce.shard.shard.ShardState.restore.

        Raises LuceError; the contents of the pages and of the slot are undefined then.
        """

    def load(self, pieces: Iterable[StatePiece]) -> None:
        """Copy pieces to the devices as they come; each shard takes its own tensors at its own pace.

        Raises what `pieces` raises, and BackendError naming a tensor that is missing or has another shape or type. The
        contents of the pages and of the slot are undefined then.
        """

    def staging_buffer(self, size: int) -> NDArray[np.uint8]:
        """Host memory of `size` bytes, of the kind that `load` copies from fastest. Raises LuceError."""

    def reserve(self, pages: int) -> None:
        """Prepare host memory in the background for so many pages of full attention, which may be saved soon.

        Only for the part of them that lies on devices of this process.
        """


class BackendRanking(Protocol):
    """Estimates which pages of full attention a sequence attends to."""

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """As luce.shard.shard.ShardRanking.add, in all layers."""

    def drop(self, slot: int) -> None:
        """As luce.shard.shard.ShardRanking.drop, in all layers. Raises LuceError."""

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        """The mean over the layers of luce.shard.shard.ShardRanking.rank: float64 [n]. Raises LuceError."""


class Backend(Protocol):
    """A loaded model that runs steps. One thread calls it."""

    @property
    def capacity(self) -> Capacity:
        """Sizes and limits."""

    @property
    def state(self) -> BackendState:
        """Pages and recurrent states of sequences, to host memory and back."""

    @property
    def ranking(self) -> BackendRanking:
        """Attention to pages. Only for a backend that was loaded to rank pages."""

    def lost(self) -> str:
        """Why the states of all sequences have been lost since the last call; empty if they have not."""

    def forward(self, step: Step, queued: Callable[[], None] = lambda: None) -> Output:
        """Run one step. Raises BackendError or DeviceError: the step's sequences are lost, later steps work.

        ShardLostError: every other sequence that has run a step is lost too, and steps fail until `lost` has reported
        it. `queued` is called once, unless the step has failed by then, and before the wait for the output where that
        is possible: the step's captured features precede all work that is queued on the drafter's device from then on.
        """

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """Accept these rows, at least the first one, of the slot's speculative spans.

        The slot's next span accepts none, and `state.save` saves the states after these rows. Raises LuceError; the
        states of all sequences are lost then, as `lost` reports.
        """

    def move_features(self, slot: int, position: int, path: Sequence[int]) -> None:
        """Move the captured features of the accepted rows `path` of a draft tree to their positions.

        `position`: that of the tree's root. For a drafter that reads features.
        """

    def close(self) -> None:
        """Release weights and states. Idempotent."""
