"""What the engine needs of a backend. `LayerSplitBackend` is the only one that serves; tests script another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.runtime.step import Int32, Output, Step
from luce.shard.saved_state import Piece, SavedState


class Backend(Protocol):
    """Runs steps. One thread calls it."""

    @property
    def vocab(self) -> int:
        """Logits per row."""

    @property
    def context(self) -> int:
        """Most positions of one sequence."""

    @property
    def slots(self) -> int:
        """Most sequences at once: recurrent states exist for slots 0..slots-1."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each page group, None for full attention, in the order of Step.views."""

    @property
    def bound(self) -> int | None:
        """Most pages of full attention that a sequence may hold at a time, None if as many as it is long."""

    @property
    def sealed_bytes(self) -> int:
        """Host memory for what `seal` keeps of a page."""

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages that exist in each page group: numbers 0..pages-1."""

    @property
    def page_bytes(self) -> int:
        """Host memory for a page of full attention that is saved."""

    @property
    def branch_pages(self) -> int:
        """Pages of each group beside `pages`, numbered behind them, for branches of trees; 0 if there may be none."""

    @property
    def verify(self) -> int:
        """Most rows of a speculative span, or of a tree; 0 if there may be none."""

    @property
    def recurrent(self) -> bool:
        """Whether a slot has a state that cannot be rewound by shortening."""

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each shard. They cover all layers, in order."""

    def lost(self) -> str:
        """Why all that sequences keep in the backend has been lost since the last call; empty if it has not."""

    def forward(self, step: Step, queued: Callable[[], None] = lambda: None) -> Output:
        """Run one step. Raises BackendError or DeviceError: the step's sequences are lost, later steps work.

        ShardLostError: so is every other sequence that has run a step, and steps fail until `lost` has told.
        `queued` is called once, before the output is waited for if it can be: what is captured of the step comes before
        all that is queued on the drafter's device from then on. Not if the step failed by then.
        """

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """These rows of the slot's speculative spans count, at least the first one: its next span accepts none, and
        `save` gives the states behind them. Raises LuceError; what sequences keep is lost then, as `lost` tells."""

    def move_features(self, slot: int, position: int, path: Sequence[int]) -> None:
        """Of the slot's tree, whose root was run at `position`, these rows count: what was captured of them is moved
        to their positions, for a drafter."""

    def seal(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """As luce.shard.shard.Shard.seal, in all layers."""

    def unseal(self, slot: int) -> None:
        """As luce.shard.shard.Shard.unseal, in all layers. Raises LuceError."""

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        """The mean of what the layers say, float64 [n]: luce.shard.shard.Shard.rank. Raises LuceError."""

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> SavedState:
        """Put aside the recurrent states of a slot, if one is named, and the given pages of each page group.

        As luce.shard.shard.Shard.save, of all layers. Raises LuceError.
        """

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], kept: SavedState, first: int = 0) -> None:
        """The reverse of `save`, into any slot and any pages of the same numbers; see Shard.restore. Raises LuceError:
        what was restored up to there is undefined."""

    def landing(self, size: int) -> NDArray[np.uint8]:
        """Host memory of `size` bytes that `fill` copies from fastest. Raises LuceError."""

    def expect(self, pages: int) -> None:
        """So many pages of full attention may be saved soon: host memory for what of them lies on this process's
        devices is made ready behind the scenes."""

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy pieces to where they belong as they come, each shard its own share at its own pace.

        Raises what `pieces` raises, and BackendError naming a tensor that is missing or has another shape or type:
        what was copied up to there is undefined.
        """

    def close(self) -> None:
        """Release weights and states. Idempotent."""
