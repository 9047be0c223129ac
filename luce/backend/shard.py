"""A shard: consecutive layers on one device, behind a small set of verbs that are the same here and in a daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device
from luce.runtime.step import Int32, Output, Step

#: What a shard hands to the next one, on a device: float32 [rows, H], the residual stream; in models with per-layer
#: embeddings float32 [rows, H], the scaled token embeddings, which every shard derives its layers' inputs from; for
#: each block of ModelSpec.lent(boundary) float32 [rows, 2 kv_heads head_dim], the rows' keys, normed and rotated, and
#: then their values. Each row is contiguous.
Activation = tuple[Array, ...]

#: What the last shard returns: waits for the step and fetches its output.
Pending = Callable[[], Output]


@dataclass(frozen=True)
class ShardInfo:
    """What a shard reports about itself. `weights` and `state` in bytes on its device."""

    device: str
    layers: range
    weights: int
    state: int


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

    def lost(self) -> str:
        """Why all that sequences keep here has been lost since the last call; empty if it has not."""

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

    def project(self, hidden: Array, *, top: int = 0, logits: bool = False) -> Pending:
        """Queue the head's product with rows that somebody else has normed: the model's norm and softcap are left out.

        `hidden` is float32 [n, H], on this shard's device or on the host. The output has the rows' ids; the `top`
        largest logits of each, at most TOP, if `top` is not 0; all logits if asked for, else none. Raises BackendError
        if this is not the last shard.
        """

    def save(self, slot: int | None, pages: Sequence[Sequence[int]]) -> dict[str, NDArray[np.generic]]:
        """Copy a sequence's state to the host: the given pages of each page group, and its recurrent states.

        Keys are `blk.N.k`, `.v` [pages * PAGE, kv_heads, n] (n: luce.ops.kvtype) and `blk.N.memory`, `.past`. Without a
        slot the latter are left out, and the former where there are no pages of the layer's group. Mirrors of other
        shards' keys and values are always left out.
        """

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], tensors: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """The reverse of `save`, into any slot and any pages of the same number.

        `tensors` are those of all shards: mirrors are filled from their donors' tensors, floats converted to this
        device's. Raises BackendError naming the tensor if one is missing or has another shape or type; nothing is
        changed then.
        """

    def close(self) -> None:
        """Release weights and states. Idempotent."""
