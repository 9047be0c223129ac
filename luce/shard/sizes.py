"""Sizes of layers' states and of the activations between shards. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.layers.state import DeltaState, KVPool
from luce.models.spec import Attention, GatedDeltaNet, ModelSpec, PageGroup
from luce.ops.page_ranking import NEWEST_QUERIES
from luce.runtime.device import Device
from luce.runtime.step import PAGE
from luce.shard.shard_options import ShardOptions


def activation_bytes(spec: ModelSpec, boundary: int, captured: Sequence[int] = ()) -> int:
    """Bytes per token that cross the boundary between layers boundary - 1 and boundary.

    These are the float32 values of activation_widths. At the end of the model they are the features that are captured
    for a drafter.
    """
    return 4 * sum(activation_widths(spec, boundary, captured))


def activation_widths(spec: ModelSpec, boundary: int, captured: Sequence[int] = ()) -> tuple[int, ...]:
    """Columns of each array of the Activation that crosses a boundary.

    The arrays: the residual stream; its other copies, if layers keep some; with per-layer embeddings, the token's
    embedding; the keys and values of donors before the boundary that later layers read. Neither end of the model has
    any of these. Then the output of each layer of `captured` before the boundary, with two bfloat16 values in a column.
    """
    features = [spec.hidden // 2 for layer in captured if layer < boundary]
    if boundary in (0, len(spec.layers)):
        return tuple(features)
    mixers = [spec.layers[donor].mixer for donor in spec.lent(boundary)]
    rows = [2 * mixer.kv_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, Attention)]
    copies = [spec.hidden * (spec.streams - 1)] if spec.streams > 1 else []
    return (spec.hidden, *copies, *([spec.hidden] if spec.per_layer else []), *rows, *features)


def mirrored(spec: ModelSpec, layers: range) -> tuple[int, ...]:
    """The layers of earlier shards whose keys and values `layers` read; the shard of `layers` has a copy of these."""
    donors = {spec.donor(layer) for layer in layers}
    return tuple(sorted(donor for donor in donors if donor is not None and donor < layers.start))


@dataclass(frozen=True)
class StateBytes:
    """Bytes of states on a device."""

    #: bytes of one page of each page group
    page: tuple[int, ...]
    #: bytes of one sequence's recurrent states and newest queries
    slot: int

    def total(self, pages: Sequence[int], slots: int) -> int:
        """Bytes of `pages` pages of each page group and of `slots` sequences."""
        return slots * self.slot + sum(count * size for count, size in zip(pages, self.page, strict=True))


def state_bytes(device: Device, spec: ModelSpec, layers: range, options: ShardOptions) -> StateBytes:
    """Bytes of the states of a shard's layers on a device.

    Raises UsageError if their heads do not support a type of `options.kv`.
    """
    page = [0] * len(spec.page_groups)
    slot = 0
    for layer in (*mirrored(spec, layers), *layers):
        mixer = spec.layers[layer].mixer
        if spec.donor(layer) is not None:
            continue
        if isinstance(mixer, GatedDeltaNet):
            slot += DeltaState.slot_bytes(mixer, options.verify_rows)
            continue
        if isinstance(mixer, Attention) and options.ranks(spec, layer) and layer in layers:
            slot += 4 * NEWEST_QUERIES * mixer.heads * mixer.head_dim
        size = KVPool.page_bytes(device, mixer, options.kv, hidden=spec.hidden)
        page[spec.page_groups.index(PageGroup(mixer.window))] += size
    return StateBytes(tuple(page), slot)


def pages_for(window: int | None, context: int, chunk: int) -> int:
    """The most pages of one group that a sequence of `context` positions needs, with steps of up to `chunk` rows.

    A windowed group holds the positions that the oldest row of a chunk still sees, and the chunk itself.
    """
    full = -(-context // PAGE)
    if window is None:
        return full
    return min(full, -(-(window + chunk) // PAGE) + 1)
