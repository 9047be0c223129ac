"""The state of a layer between steps: KV pages of an attention layer, recurrent state of a DeltaNet layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.models.spec import Attention, GatedDeltaNet
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


@dataclass(frozen=True)
class KVPool:
    """The pages of an attention layer, shared by all sequences.

    Zeroed at the start: rows of a page that are not written yet are read and multiplied by a weight of zero.
    """

    #: [pages * PAGE, kv_heads, n], with n and dtype as luce.ops.kvtype lays them out
    k: Array
    v: Array

    @classmethod
    def allocate(cls, device: Device, spec: Attention, pages: int, kv: KVTypes = AUTO) -> KVPool:
        """A pool of `pages` pages. Raises UsageError if a type does not fit the head size."""
        k, v = kv.layout(device, spec.head_dim)
        rows = pages * PAGE
        return cls(
            device.zeros((rows, spec.kv_heads, k[1]), k[0]),
            device.zeros((rows, spec.kv_heads, v[1]), v[0]),
        )

    @staticmethod
    def page_bytes(device: Device, spec: Attention, kv: KVTypes = AUTO) -> int:
        """Bytes of K and V of one page. Raises UsageError if a type does not fit the head size."""
        return PAGE * spec.kv_heads * sum(n * dtype.itemsize for dtype, n in kv.layout(device, spec.head_dim))


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
