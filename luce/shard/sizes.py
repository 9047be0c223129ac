"""What layers, their state and what passes between them take, in bytes and columns. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from luce.layers.state import DeltaState, KVPool
from luce.models.spec import Attention, ModelSpec, PageGroup
from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.page_ranking import NEWEST_QUERIES
from luce.runtime.device import Device
from luce.runtime.step import PAGE


def handed_on(spec: ModelSpec, boundary: int) -> int:
    """Bytes per token that pass the boundary between layers boundary - 1 and boundary; at the end of the model what is
    captured for a drafter.

    The float32 values of handed_widths.
    """
    return 4 * sum(handed_widths(spec, boundary))


def handed_widths(spec: ModelSpec, boundary: int) -> tuple[int, ...]:
    """Columns of each array of the Activation that passes a boundary.

    The residual stream; with per-layer embeddings the token's embedding too; the keys and values of donors before the
    boundary that layers behind it read: none of these at either end of the model. Of each captured layer before the
    boundary its output, two values of bfloat16 in a column.
    """
    captured = [spec.hidden // 2 for layer in spec.captured if layer < boundary]
    if boundary in (0, len(spec.layers)):
        return tuple(captured)
    mixers = [spec.layers[donor].mixer for donor in spec.lent(boundary)]
    rows = [2 * mixer.kv_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, Attention)]
    return (*[spec.hidden] * (2 if spec.per_layer else 1), *rows, *captured)


def mirrored(spec: ModelSpec, layers: range) -> tuple[int, ...]:
    """The blocks of earlier shards whose keys and values `layers` read: their shard keeps a mirror of these."""
    donors = {spec.donor(layer) for layer in layers}
    return tuple(sorted(donor for donor in donors if donor is not None and donor < layers.start))


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a device needs beside weights: of one page in each page group, and of one sequence's slot."""

    page: tuple[int, ...]
    slot: int


def state_bytes(device: Device, spec: ModelSpec, layers: range, kv: KVTypes = AUTO, verify: int = 0) -> StateBytes:
    """What the layers of a shard keep on a device, for speculative spans of up to `verify` rows.

    Raises UsageError if their heads do not take a type of `kv`.
    """
    page = [0] * len(spec.page_groups)
    slot = 0
    for layer in (*mirrored(spec, layers), *layers):
        mixer = spec.layers[layer].mixer
        if spec.donor(layer) is not None:
            continue
        if isinstance(mixer, Attention):
            if spec.ranks(layer) and layer in layers:
                slot += 4 * NEWEST_QUERIES * mixer.heads * mixer.head_dim
            page[spec.page_groups.index(PageGroup(mixer.window))] += KVPool.page_bytes(device, mixer, kv)
        else:
            slot += DeltaState.slot_bytes(mixer, verify)
    return StateBytes(tuple(page), slot)


def pages_for(window: int | None, context: int, chunk: int) -> int:
    """Pages of one group that a sequence of `context` positions needs at most, with steps of up to `chunk` rows.

    A windowed group holds what the oldest row of a chunk still sees, and the chunk itself.
    """
    full = -(-context // PAGE)
    if window is None:
        return full
    return min(full, -(-(window + chunk) // PAGE) + 1)
