"""A shard: consecutive layers on one device, with the same interface in this process and in a daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.layers.decoder_layer import Embedding
from luce.ops.matmul import FEW_ROWS
from luce.runtime.device import Array, Device, Flag
from luce.runtime.step import Int32, Output, PendingMasks, Step
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


#: The result of the last shard: a function that waits for the step and fetches its output.
Pending = Callable[[], Output]


@dataclass(frozen=True)
class DeferredOutput:
    """The result of the last shard for a step with `masks_deferred`."""

    #: queues the output under these masks, None without any; called before the shard gets another step
    queue: Callable[[PendingMasks | None], Pending]


#: The result of a shard for a step.
ShardResult = Activation | Pending | DeferredOutput


@dataclass(frozen=True)
class DeviceInfo:
    """The part of a shard on one device."""

    device: str
    layers: range
    #: bytes
    weights: int
    #: bytes of pages and recurrent states
    state: int
    #: bytes of matrices that are stored unpacked as float16 as well, for products of many rows
    unpacked: int
    #: layers whose routed experts lie on the CPU of the device's machine, ascending
    offloaded: tuple[int, ...] = ()
    #: bytes of these experts, in the machine's memory
    offloaded_bytes: int = 0
    #: most rows of a step of replies in which a row has the bits that it has alone
    invariant_rows: int = FEW_ROWS
    #: whether prompts of FEW_ROWS + 1 to MANY_ROWS rows each may share a step, with the bits that each has alone
    shares_prompts: bool = False


@dataclass(frozen=True)
class ShardInfo:
    """Facts about a shard for /props, inspect and logs."""

    #: in the order of their layers; only a daemon's shard may have several
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
    def invariant_rows(self) -> int:
        """Most rows of a step of replies in which a row has the bits that it has alone, on each of its devices."""
        return min(part.invariant_rows for part in self.devices)

    @property
    def shares_prompts(self) -> bool:
        """Whether short prompts may share a step on each of its devices."""
        return all(part.shares_prompts for part in self.devices)

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

    #: number of the shard, or `draft`
    shard: int | str
    #: names of its devices, with commas
    device: str
    #: whether the daemon runs
    up: bool
    #: how often the daemon was lost and started again
    restarts: int
    #: how activations travel: `shared` or `stream`
    transport: str
    #: whether its devices, not its host, wait for and raise flags in shared memory
    gpu_waits: bool
    #: bytes of activations since the load, by transport and direction (`sent` or `received`)
    moved: Mapping[tuple[str, str], int]
    #: seconds that threads of the server have waited for its responses; None for a draft, whose time is part of
    #: drafting
    waited: float | None


class ShardState(Protocol):
    """Saves and restores the pages and recurrent states of sequences."""

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> SavedState:
        """Copy a sequence's state to host memory: the given pages of each page group, and the slot's recurrent states.

        luce.shard.saved_state names the tensors. Without a slot, no recurrent states are saved; without pages of a
        group, nothing of this group. Later steps wait for the copy, unless the caller promises not to change the pages
        until the copy is done (`held`).
        """

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0
    ) -> Callable[[], None] | None:
        """The reverse of `save`, into any slot and as many pages.

        `first`: the first page to copy, if the state was saved without a slot and has one group. Returns a function
        that waits for the daemon's response, or None if the device runs later steps after the copy by itself.
        """

    def load(self, piece: StatePiece) -> None:
        """Copy this shard's tensors of a piece, whatever placement saved it. Floats are converted to this device's
        type.

        A remote shard has its own thread for this call, and no other thread calls the shard meanwhile. Raises
        BackendError naming the tensor if one is missing or has another shape or type; then nothing of the piece is
        copied.
        """


class ShardRanking(Protocol):
    """Estimates which pages a sequence attends to. Only of a shard that was loaded to rank pages."""

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Compute the statistics that `rank` needs, from the present contents of full pages of full attention.

        `entries`: the pages' places in the slot's sequence; earlier statistics of these are replaced. The statistics
        are stored in host memory. Later steps that write to the pages wait for the work.
        """

    def drop(self, slot: int) -> None:
        """Release the statistics of a slot's pages. Idempotent."""

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        """Estimate the share of its attention that the slot's row at `position` gives to each page.

        `entries`: int32 [n], added entries of the sequence in ascending order. `position`: of one of the last
        NEWEST_QUERIES rows of the slot's last span. Returns float64 [layers, n], a row for each ranking layer.

        Formula: for each query head, the softmax over the keys of these pages, estimated from mean and variance of each
        channel over groups of 16 keys (luce.shard.page_ranking); summed over a page; then the largest of the layer's
        heads. Products are in float32 and the rest in float64, so the split into shards changes nothing. Raises
        BackendError if a page was not added.
        """


class ShardEnds(Protocol):
    """The token table of the first shard and the head of the last one, for a draft that has none of its own."""

    @property
    def device(self) -> Device:
        """The shard's device."""

    @property
    def embedding(self) -> Embedding | None:
        """The token table, for work on the shard's device; None if the shard is remote, or not the first one."""

    def embed(self, tokens: Int32) -> Array:
        """Rows of the token table, without the model's scale: int32 [n] -> float32 [n, H].

        The result is on the shard's device, or on the host if the shard is remote. Raises BackendError if this is not
        the first shard.
        """

    def project(
        self, hidden: Array, *, top: int = 0, logits: bool = False, scale: float = 0.0, softcap: float = 0.0
    ) -> Pending:
        """Queue the head's product with rows that the caller has normed, without the model's norm and softcap.

        `hidden` is float32 [n, H], on this shard's device or on the host. The output has the rows' ids; if `top` is not
        0, the `top` largest logits of each row, at most MAX_CANDIDATES, and with a `scale` their norms
        (luce.ops.sample.argmax_logsumexp); if `logits`, all logits. Raises BackendError if this is not the last shard.
        """


class Shard(Protocol):
    """Consecutive layers of a model, loaded by the constructor. One thread calls a shard.

    Calls raise BackendError or DeviceError, and the shard stays usable. They raise ShardLostError if the states of all
    sequences are lost, until `lost` has reported the loss.
    """

    @property
    def info(self) -> ShardInfo:
        """Layers, devices and sizes."""

    @property
    def device(self) -> Device:
        """The device of the activation that `forward` reads, and of its result."""

    @property
    def remote(self) -> bool:
        """Whether the shard is in another process. Calls wait for that process."""

    @property
    def state(self) -> ShardState:
        """Saves and restores pages and recurrent states of sequences."""

    @property
    def ranking(self) -> ShardRanking:
        """Estimates attention to pages."""

    @property
    def ends(self) -> ShardEnds:
        """The token table and the head."""

    def lost(self) -> str:
        """The reason why the states of all sequences were lost since the last call; empty if they were not."""

    def down(self) -> str:
        """The reason why this shard will never work again; empty while it works. Any thread may call it."""

    def announce(self, step: Step, activation: Activation | None) -> Flag | None:
        """Announce the step of the next `forward` and the arrays of its activation, before these have their values.
        Only the first call for a step counts.

        Returns the flag in pinned memory that work on the step waits for, if a device may raise it: behind the
        activation, which is complete in place then.
        """

    def stage(self, step: Step) -> None:
        """As luce.backend.backend.Backend.stage; does nothing where that gains nothing."""

    def forward(self, step: Step, activation: Activation | None) -> ShardResult:
        """Queue the layers' work on a step's rows. `activation` is None for the first shard.

        The work may overwrite the activation, and the result may share its memory. The last shard returns Pending, or
        a DeferredOutput if `step.masks_deferred`, the others an Activation.
        """

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """Apply these rows of the slot's speculative spans to its recurrent states."""

    def close(self) -> None:
        """Release weights and states. Idempotent."""
