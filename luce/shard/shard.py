"""A shard: consecutive layers on one device, behind a small set of verbs that are the same here and in a daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device
from luce.runtime.step import Int32, Output, Step
from luce.shard.saved_state import Piece, SavedState

#: What a shard hands to the next one, on a device: float32 [rows, H], the residual stream; in models with per-layer
#: embeddings float32 [rows, H], the scaled token embeddings, which every shard derives its layers' inputs from; for
#: each block of ModelSpec.lent(boundary) float32 [rows, 2 kv_heads head_dim], the rows' keys, normed and rotated, and
#: then their values; of each captured layer so far float32 [rows, H / 2], whose bytes are its output as bfloat16. Each
#: row is contiguous.
Activation = tuple[Array, ...]

#: What the last shard returns: waits for the step and fetches its output.
Pending = Callable[[], Output]

#: Gets a step and the outputs of the captured layers, uint16 [rows, H] each, from the last shard, while its work on the
#: step is queued: work that is queued on its device now finds them there. Of a daemon's shard they are on the host.
Captured = Callable[[Step, Sequence[Array]], None]


@dataclass(frozen=True)
class ShardInfo:
    """What a shard reports about itself. `weights` and `state` in bytes on its device, and beside them `unpacked`:
    matrices as float16 for products of many rows."""

    device: str
    layers: range
    weights: int
    state: int
    unpacked: int


@dataclass(frozen=True)
class DaemonState:
    """A daemon's shard, by its number, or `draft`, and its devices: whether it is there, how often it was lost before.

    transport: how activations go to it and come from it, `shared` or `stream`; words: whether its devices wait for
    them, and tell outputs, by themselves; moved: bytes since the load, by the way that they went, likewise, and whether
    they were `sent` or `received`; waited: seconds that threads of the server have waited for its answers, None of a
    draft, where drafting takes them.
    """

    shard: int | str
    device: str
    up: bool
    restarts: int
    transport: str
    words: bool
    moved: Mapping[tuple[str, str], int]
    waited: float | None


class Shard(Protocol):
    """Loaded when constructed. One thread calls it; a failed call leaves it usable.

    Raises BackendError or DeviceError; ShardLostError if the state of all sequences is gone, until `lost` has told.
    """

    @property
    def info(self) -> ShardInfo:
        """Facts for /props, inspect and logs: of all its devices together."""

    @property
    def parts(self) -> tuple[ShardInfo, ...]:
        """The same for each device; a daemon's shard may have several."""

    @property
    def apart(self) -> bool:
        """Whether calls wait for another process."""

    @property
    def reuses(self) -> bool:
        """Whether the next step overwrites the Activation that the last one returned."""

    def lost(self) -> str:
        """Why all that sequences keep here has been lost since the last call; empty if it has not."""

    def down(self) -> str:
        """Why this shard does nothing any more, and never will; empty as long as it does. Any thread may ask."""

    @property
    def device(self) -> Device:
        """Where what is handed over must lie."""

    def announce(self, step: Step, handed: Activation | None) -> None:
        """The step of the next `forward`, and where what is handed over will be, before it is there."""

    def forward(self, step: Step, handed: Activation | None) -> Activation | Pending:
        """Queue the layers' work on a step's rows. None is handed to the first shard.

        What is handed over may be overwritten, and the result may lie in it. The last shard returns Pending, the others
        an Activation.
        """

    def embed(self, tokens: Int32) -> Array:
        """Rows of the token table as they are, without the model's scale: int32 [n] -> float32 [n, H].

        On this shard's device, of a daemon's shard on the host. For a draft without a table of its own. Raises
        BackendError if this is not the first shard.
        """

    def project(
        self, hidden: Array, *, top: int = 0, logits: bool = False, scale: float = 0.0, softcap: float = 0.0
    ) -> Pending:
        """Queue the head's product with rows that somebody else has normed: the model's norm and softcap are left out.

        `hidden` is float32 [n, H], on this shard's device or on the host. The output has the rows' ids; the `top`
        largest logits of each, at most MAX_CANDIDATES, if `top` is not 0, and with a `scale` their norms as
        luce.ops.sample.argmax_logsumexp has them; all logits if asked for, else none. Raises BackendError if this is
        not the last shard.
        """

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """Apply these rows of the slot's speculative spans to its recurrent states."""

    def seal(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Keep on the host what `rank` has to know of pages of full attention, full ones, as they are now.

        `entries`: which pages of the slot's sequence they are; what was kept of these is replaced. Steps that write to
        them later wait for the work. Only where the spec says that pages are ranked.
        """

    def unseal(self, slot: int) -> None:
        """Give up what `seal` kept of a slot's pages. Idempotent."""

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        """How much of its attention the slot's row at `position` gives to sealed pages, estimated: float64 [layers,
        n], for int32 [n], entries of the sequence in ascending order; one row for each layer that ranks.

        The row is one of the last NEWEST_QUERIES of the slot's last span. For each query head, its softmax over the
        keys of these pages, of which mean and variance of each channel are known for each 16 (luce.shard.page_ranking);
        summed over a page; then the largest of the layer's heads. Products in float32, the rest in float64, so what
        layers are on a shard changes nothing. Raises BackendError if a page is not sealed.
        """

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> SavedState:
        """Put a sequence's state aside: the given pages of each page group, and its recurrent states.

        Names of tensors are those of luce.shard.saved_state. Without a slot there are no recurrent states, and of a
        group without pages nothing. Steps that follow wait for the copy, unless what is copied stays as it is that long
        (`held`).
        """

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], kept: SavedState, first: int = 0
    ) -> Callable[[], None] | None:
        """The reverse of `save`, into any slot and any pages of the same number.

        `first`: of what was saved without a slot, and of one group, the first page to copy. Returns what waits for the
        answer, or None where steps that follow come after it by themselves.
        """

    def fill(self, piece: Piece) -> None:
        """Copy this shard's share of a piece, which may be of any placement; floats are converted to this device's.

        Called by a thread of its own, while nobody else calls the shard, if `apart`. Raises BackendError naming the
        tensor if one is missing or has another shape or type; nothing of the piece is copied then.
        """

    def close(self) -> None:
        """Release weights and states. Idempotent."""
