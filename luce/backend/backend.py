"""The engine's interface to the model. `LayerSplitBackend` implements it; tests use a scripted backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.ops.matmul import FEW_ROWS
from luce.runtime.step import Int32, Output, Step
from luce.shard.saved_state import SavedState, StatePiece


@dataclass(frozen=True)
class Capacity:
    """Sizes and limits of a loaded model. They do not change."""

    #: logits of a row
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
    #: the most bytes of host memory for the rest of a checkpoint: recurrent states, windows and a page that is not full
    checkpoint_bytes: int
    #: most resident pages of full attention of a sequence (KVFlash); None: all pages are resident
    max_resident_pages: int | None
    #: further pages of each group for the branches of draft trees, numbered after `pages`; 0: no draft trees
    branch_pages: int
    #: most rows of a speculative span or of a draft tree; 0: neither is possible
    verify_rows: int
    #: whether a slot has a recurrent state, which shortening a sequence cannot rewind
    recurrent: bool
    #: layers of each shard; they cover all layers, in order
    layers: tuple[range, ...]
    #: bytes of host memory for the statistics of a page; 0: pages are not ranked
    ranking_bytes: int
    #: most rows of replies and drafts in a step in which a row has the bits that it has alone, on every device; if more
    #: than FEW_ROWS, replies without drafts have them in any number
    invariant_rows: int = FEW_ROWS
    #: whether prompts of FEW_ROWS + 1 to MANY_ROWS rows each may share a step, with the bits that each has alone, on
    #: every device
    shares_prompts: bool = False


class BackendState(Protocol):
    """Saves and restores the pages and recurrent states of sequences, in all shards."""

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> SavedState:
        """See luce.shard.shard.ShardState.save; for all layers. Raises LuceError."""

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0) -> None:
        """The reverse of `save`, into any slot and as many pages. See luce.shard.shard.ShardState.restore.

        Raises LuceError; then the contents of the pages and of the slot are undefined.
        """

    def load(self, pieces: Iterable[StatePiece]) -> None:
        """Copy the tensors of `pieces` to the devices, all shards at the same time.

        Raises the errors of `pieces`, and BackendError naming a tensor that is missing or has another shape or type.
        Then the contents of the pages and of the slot are undefined.
        """

    def staging_buffer(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes of the host memory from which `load` copies fastest. Raises LuceError."""

    def reserve(self, pages: int) -> None:
        """Prepare host memory in the background for saving `pages` pages of full attention soon.

        Only for their keys and values on devices of this process.
        """


class BackendRanking(Protocol):
    """Estimates which pages of full attention a sequence attends to."""

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """See luce.shard.shard.ShardRanking.add; in all layers."""

    def drop(self, slot: int) -> None:
        """See luce.shard.shard.ShardRanking.drop; in all layers. Raises LuceError."""

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        """The mean over the layers of luce.shard.shard.ShardRanking.rank: float64 [n]. Raises LuceError."""


class Backend(Protocol):
    """A loaded model that runs steps. One thread calls it."""

    @property
    def capacity(self) -> Capacity:
        """Sizes and limits."""

    @property
    def asynchronous(self) -> bool:
        """Whether `forward` calls `queued` long before the output is there, as the devices work beside the host."""

    @property
    def state(self) -> BackendState:
        """Saves and restores pages and recurrent states of sequences."""

    @property
    def ranking(self) -> BackendRanking:
        """Estimates attention to pages. Only for a backend that was loaded to rank pages."""

    def lost(self) -> str:
        """The reason why the states of all sequences were lost since the last call; empty if they were not."""

    def ready(self) -> bool:
        """Whether a step can run now, as no shard is away."""

    def down(self) -> str:
        """The reason why all further steps will fail; empty while steps can succeed. Any thread may call it."""

    def forward(self, step: Step, queued: Callable[[], None] = lambda: None) -> Output:
        """Run one step. Raises BackendError or DeviceError: the step's sequences are lost, later steps work.

        Raises ShardLostError: every other sequence that has run a step is lost too, and steps fail until `lost` has
        reported the loss. `queued` is called once, unless the step fails earlier; if possible, before the wait for the
        output. The step's captured features precede all work that is queued on the drafter's device after this call.
        """

    def stage(self, step: Step) -> None:
        """Prepare a step, while the devices work: the next call of `forward` may be for it. Until then its tokens may
        change, in place, and nothing else. What fails here fails in `forward`.
        """

    def follow(self, step: Step) -> bool:
        """Queue a step behind the one whose `forward` has called `queued`, from within that call. Its rows' tokens are
        the next tokens of that one's output rows, in order, which nobody knows yet. The next call of `forward` is for
        it, and brings its masks if it has `masks_deferred`.

        False if this backend cannot; then nothing is queued. Raises as `forward`, for both steps.
        """

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """Accept these rows, at least the first one, of the slot's speculative spans.

        The slot's next span accepts no rows, and `state.save` saves the states after these rows. Raises LuceError;
        then the states of all sequences are lost, as `lost` reports.
        """

    def move_features(self, slot: int, position: int, path: Sequence[int]) -> None:
        """Move the captured features of the accepted rows `path` of a draft tree to their positions.

        `position`: the position of the tree's root. For a drafter that reads features.
        """

    def close(self) -> None:
        """Release weights and states. Idempotent."""
