"""A shard: consecutive layers on one device, behind a small set of verbs that are the same here and in a daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device
from luce.runtime.step import Int32, Output, Step
from luce.shard.saved_state import SavedState, StatePiece

#: Arrays that cross a boundary between shards, on a device: float32 [rows, H], the residual stream; in models with
#: per-layer embeddings float32 [rows, H], the scaled token embeddings, from which every shard derives its layers'
#: inputs; for each layer of ModelSpec.lent(boundary) float32 [rows, 2 kv_heads head_dim], the rows' keys, normed and
#: rotated, and then their values; of each captured layer before the boundary float32 [rows, H / 2], whose bytes are its
#: output as bfloat16. Each row is contiguous.
Activation = tuple[Array, ...]


class TransientActivation(tuple[Array, ...]):
    """An Activation that the next step of its shard overwrites."""

    __slots__ = ()


#: What the last shard returns: waits for the step and fetches its output.
Pending = Callable[[], Output]


@dataclass(frozen=True)
class DeviceInfo:
    """The part of a shard that lies on one device."""

    device: str
    layers: range
    #: bytes of weights, and of pages and recurrent states
    weights: int
    state: int
    #: bytes of matrices that are kept unpacked as float16 beside the weights, for products of many rows
    unpacked: int


@dataclass(frozen=True)
class ShardInfo:
    """Facts about a shard for /props, inspect and logs."""

    #: a daemon's shard may have several, in the order of their layers
    devices: tuple[DeviceInfo, ...]

    @property
    def device(self) -> str:
        """The names of its devices, with commas."""
        return ",".join(part.device for part in self.devices)

    @property
    def layers(self) -> range:
        """The layers of all its devices."""
        return range(self.devices[0].layers.start, self.devices[-1].layers.stop)

    @property
    def weights(self) -> int:
        """Bytes of weights on all its devices."""
        return sum(part.weights for part in self.devices)

    @property
    def state(self) -> int:
        """Bytes of pages and recurrent states on all its devices."""
        return sum(part.state for part in self.devices)

    @property
    def unpacked(self) -> int:
        """Bytes of unpacked matrices on all its devices."""
        return sum(part.unpacked for part in self.devices)


@dataclass(frozen=True)
class DaemonState:
    """A daemon that holds a shard or a drafter, for /metrics and /health."""

    #: number of its shard, or `draft`
    shard: int | str
    #: names of its devices, with commas
    device: str
    #: whether it answers
    up: bool
    #: how often it was lost before
    restarts: int
    #: how activations travel: `shared` or `stream`
    transport: str
    #: whether its devices wait for flags in shared memory, and raise them, by themselves
    gpu_waits: bool
    #: bytes since the load, by transport and direction (`sent` or `received`)
    moved: Mapping[tuple[str, str], int]
    #: seconds that threads of the server have waited for its responses; None for a draft, whose time drafting reports
    waited: float | None


class ShardState(Protocol):
    """Saves and restores the pages and recurrent states of sequences."""

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> SavedState:
        """Copy a sequence's state to host memory: the given pages of each page group, and the slot's recurrent states.

        luce.shard.saved_state names the tensors. Without a slot no recurrent states are saved, and nothing of a group
        without pages. Steps that follow wait for the copy, unless the caller keeps the pages unchanged until it is done
        (`held`).
        """

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0
    ) -> Callable[[], None] | None:
        """The reverse of `save`, into any slot and as many pages.

        `first`: the first page to copy of a state that was saved without a slot, of one group. Returns what waits for
        the response, or None where the device itself orders the steps that follow behind the copy.
        """

    def load(self, piece: StatePiece) -> None:
        """Copy this shard's tensors of a piece, which may be of any placement; floats are converted to this device's.

        A thread of its own calls this where the shard is remote, and no other thread calls the shard meanwhile. Raises
        BackendError naming the tensor if one is missing or has another shape or type; nothing of the piece is copied
        then.
        """


class ShardRanking(Protocol):
    """Estimates which pages a sequence attends to. Only of a shard that was loaded to rank pages."""

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Compute from full pages of full attention, as they are now, the statistics that `rank` needs.

        `entries`: which pages of the slot's sequence they are; earlier statistics of these are replaced. They lie in
        host memory. Steps that write to the pages later wait for the work.
        """

    def drop(self, slot: int) -> None:
        """Release the statistics of a slot's pages. Idempotent."""

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        """How much of its attention the slot's row at `position` gives to some pages, estimated: float64 [layers, n].

        `entries`: int32 [n], entries of the sequence in ascending order, which were added. One row of the result for
        each layer that ranks.

        The row at `position` is one of the last NEWEST_QUERIES of the slot's last span. For each query head, its
        softmax over the keys of these pages, of which mean and variance of each channel are known for each 16
        (luce.shard.page_ranking); summed over a page; then the largest of the layer's heads. Products in float32, the
        rest in float64, so the split into shards changes nothing. Raises BackendError if a page was not added.
        """


class ShardEnds(Protocol):
    """The token table of the first shard and the head of the last one, for a draft that has none of its own."""

    @property
    def device(self) -> Device:
        """That of the shard."""

    def embed(self, tokens: Int32) -> Array:
        """Rows of the token table as they are, without the model's scale: int32 [n] -> float32 [n, H].

        On the shard's device; on the host if the shard is remote. Raises BackendError if this is not the first shard.
        """

    def project(
        self, hidden: Array, *, top: int = 0, logits: bool = False, scale: float = 0.0, softcap: float = 0.0
    ) -> Pending:
        """Queue the head's product with rows that the caller has normed: the model's norm and softcap are left out.

        `hidden` is float32 [n, H], on this shard's device or on the host. The output has the rows' ids; the `top`
        largest logits of each, at most MAX_CANDIDATES, if `top` is not 0, and with a `scale` their norms as
        luce.ops.sample.argmax_logsumexp has them; all logits if `logits`, else none. Raises BackendError if this is not
        the last shard.
        """


class Shard(Protocol):
    """Loaded when constructed. One thread calls it; a failed call leaves it usable.

    Raises BackendError or DeviceError; ShardLostError if the states of all sequences are gone, until `lost` has
    reported it.
    """

    @property
    def info(self) -> ShardInfo:
        """Its layers, devices and sizes."""

    @property
    def device(self) -> Device:
        """Where `forward` reads its activation and leaves its result."""

    @property
    def remote(self) -> bool:
        """Whether it is in another process, so that calls wait for that process."""

    @property
    def state(self) -> ShardState:
        """Pages and recurrent states of sequences, to host memory and back."""

    @property
    def ranking(self) -> ShardRanking:
        """Attention to pages."""

    @property
    def ends(self) -> ShardEnds:
        """Token table and head."""

    def lost(self) -> str:
        """Why the states of all sequences have been lost since the last call; empty if they have not."""

    def down(self) -> str:
        """Why this shard will never work again; empty while it works. Any thread may ask."""

    def announce(self, step: Step, activation: Activation | None) -> None:
        """The step of the next `forward`, and the arrays that its activation will lie in, before it is there."""

    def forward(self, step: Step, activation: Activation | None) -> Activation | Pending:
        """Queue the layers' work on a step's rows. The first shard gets None.

        The activation may be overwritten, and the result may lie in it. The last shard returns Pending, the others an
        Activation.
        """

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """Apply these rows of the slot's speculative spans to its recurrent states."""

    def close(self) -> None:
        """Release weights and states. Idempotent."""
