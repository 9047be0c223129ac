"""The state of a layer between steps: pages of an attention layer or a convolution, recurrent state of a DeltaNet
layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luce.models.spec import Attention, GatedDeltaNet, ShortConv
from luce.ops.deltanet import RecurrentState
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE


@dataclass(frozen=True)
class StateOptions:
    """Number and types of the states of a shard's layers."""

    #: pages of each page group
    pages: Sequence[int]
    slots: int
    kv: KVTypes = AUTO
    #: most rows of a speculative span; 0: there are none
    verify_rows: int = 0
    #: whether layers with pages of full attention keep the newest queries of each slot, to rank pages
    rank_pages: bool = False
    #: whether a layer reads a whole text before the next one begins, so that layers share pools of the same form
    one_layer_at_a_time: bool = False


@dataclass(frozen=True)
class KVPool:
    """The pages of a layer, shared by all sequences.

    Zeroed at the start: rows of a page that are not written yet are read and multiplied by a weight of zero.
    """

    #: [pages * PAGE, kv_heads, n], with n and dtype as luce.ops.kvtype lays them out
    k: Array
    #: None: the keys are the values, or the rows are no keys (float32 inputs of a convolution)
    v: Array | None

    @property
    def parts(self) -> dict[str, Array]:
        """The arrays by the names of saved tensors."""
        return {"k": self.k} if self.v is None else {"k": self.k, "v": self.v}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(int(part.nbytes) for part in self.parts.values())

    @classmethod
    def allocate(
        cls, device: Device, spec: Attention | ShortConv, pages: int, kv: KVTypes = AUTO, *, hidden: int = 0
    ) -> KVPool:
        """A pool of `pages` pages. Raises UsageError if a type does not fit the head size.

        `hidden`: channels of a convolution.
        """
        heads, layout = _page_layout(device, spec, kv, hidden)
        parts = [device.zeros((pages * PAGE, heads, n), dtype) for dtype, n in layout]
        return cls(parts[0], parts[1] if len(parts) > 1 else None)

    @staticmethod
    def form(device: Device, spec: Attention | ShortConv, kv: KVTypes = AUTO, *, hidden: int = 0) -> object:
        """What pools that can stand for each other have in common; it can be compared and hashed."""
        return _page_layout(device, spec, kv, hidden)

    @staticmethod
    def page_bytes(device: Device, spec: Attention | ShortConv, kv: KVTypes = AUTO, *, hidden: int = 0) -> int:
        """Bytes of one page. Raises UsageError if a type does not fit the head size."""
        heads, layout = _page_layout(device, spec, kv, hidden)
        return PAGE * heads * sum(n * dtype.itemsize for dtype, n in layout)


def _page_layout(
    device: Device, spec: Attention | ShortConv, kv: KVTypes, hidden: int
) -> tuple[int, tuple[tuple[np.dtype[np.generic], int], ...]]:
    """Heads, and (dtype, n) of each part of a pool."""
    if isinstance(spec, ShortConv):
        return 1, ((np.dtype(np.float32), hidden),)
    layout = kv.layout(device, spec.head_dim)
    return spec.kv_heads, layout[:1] if spec.latent is not None else layout


@dataclass(frozen=True)
class DeltaState(RecurrentState):
    """The recurrent states of a DeltaNet layer."""

    @classmethod
    def allocate(cls, device: Device, spec: GatedDeltaNet, slots: int, verify: int = 0) -> DeltaState:
        """States of `slots` sequences, with speculative spans of at most `verify` rows."""
        heads, d = spec.value_heads, spec.head_dim
        return cls(
            device.zeros((slots, heads, d, d)),
            device.zeros((slots, heads, spec.conv_kernel - 1, 3, d)),
            device.zeros((slots, heads, verify, 5, d)),
            device.zeros((slots, heads, verify)),
        )

    @staticmethod
    def slot_bytes(spec: GatedDeltaNet, verify: int = 0) -> int:
        """Bytes of one sequence's state in one layer."""
        vectors = spec.head_dim + 3 * (spec.conv_kernel - 1) + 5 * verify
        return 4 * spec.value_heads * (spec.head_dim * vectors + verify)
