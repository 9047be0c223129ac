"""A shard: consecutive layers on one device, behind a small set of verbs that are the same here and in a daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.runtime.device import Array, Device
from luce.runtime.step import Output, Step


@dataclass(frozen=True)
class ShardInfo:
    """What a shard reports about itself. `weights` and `state` in bytes on its device."""

    device: str
    layers: range
    weights: int
    state: int


class Shard(Protocol):
    """Loaded when constructed. One thread calls it; a failed call leaves it usable unless it says otherwise."""

    @property
    def info(self) -> ShardInfo:
        """Facts for /props, inspect and logs."""

    @property
    def device(self) -> Device:
        """Where `hidden` must lie."""

    def forward(self, step: Step, hidden: Array | None) -> Array | Output:
        """Run the layers on a step's rows. `hidden` float32 [rows, H] may be overwritten; None for the first shard.

        The last shard returns Output, others float32 [rows, H]. Models with per-layer embeddings hand on [2 rows, H]:
        the stream, then the scaled token embeddings that every shard derives its layers' inputs from.
        """

    def save(self, slot: int | None, pages: Sequence[Sequence[int]]) -> dict[str, NDArray[np.generic]]:
        """Copy a sequence's state to the host: the given pages of each page group, and its recurrent states.

        Keys are `blk.N.k`, `.v` [pages * PAGE, kv_heads, n] (n: luce.ops.kvtype) and `blk.N.memory`, `.conv`. Without a
        slot the latter are left out, and the former where there are no pages of the layer's group.
        """

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], tensors: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """The reverse of `save`, into any slot and any pages of the same number.

        Raises BackendError naming the tensor if one is missing, has another shape or another dtype; nothing is changed
        then. Tensors of other shards' layers are ignored.
        """

    def close(self) -> None:
        """Release weights and states. Idempotent."""
