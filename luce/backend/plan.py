"""Layers to devices. Pure: sizes in, ranges out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luce.errors import UsageError
from luce.layers.state import DeltaState, KVPool
from luce.models.spec import Attention, ModelSpec, PageGroup
from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.rank import KEPT
from luce.runtime.device import Device
from luce.runtime.step import PAGE


def split_layers(layers: int, devices: int, weights: Sequence[float] = ()) -> tuple[range, ...]:
    """Consecutive ranges of layers in proportion to `weights` (default: equal), each at least one layer long.

    Raises UsageError if that is impossible.
    """
    if weights and len(weights) != devices:
        given = ",".join(f"{weight:g}" for weight in weights)
        raise UsageError(
            f"--target-layer-split {given}: {len(weights)} weights for {devices} devices", param="target_layer_split"
        )
    check_devices(layers, devices)
    weights = tuple(weights) or (1.0,) * devices
    total = sum(weights)
    if not 0 < total < math.inf:
        raise UsageError(f"--target-layer-split: the weights add up to {total:g}", param="target_layer_split")
    ranges = []
    begin, share = 0, 0.0
    for index, weight in enumerate(weights):
        share += weight
        # Halves round up: Python's round() would send 2.5 to 2.
        wanted = layers if index == devices - 1 else math.floor(share / total * layers + 0.5)
        end = max(begin + 1, min(layers - (devices - index - 1), wanted))
        ranges.append(range(begin, end))
        begin = end
    return tuple(ranges)


def check_devices(layers: int, devices: int) -> None:
    """Raises UsageError unless every device can have a layer."""
    if not 0 < devices <= layers:
        raise UsageError(
            f"--target-devices: bad layer split for {devices} devices and {layers} layers", param="target_devices"
        )


def align(spec: ModelSpec, ranges: Sequence[range]) -> tuple[range, ...]:
    """Ranges whose boundary lies between the last donor of keys and values and its borrowers: it moves to the donor.

    The last donor then needs no mirror on the next device. In Gemma 4 that is the layer of full attention, whose mirror
    would grow with the context. Only one boundary moves; shards behind it mirror all the donors they borrow from.
    """
    donors = (spec.donor(layer) for layer in range(len(spec.blocks)))
    last = max((donor for donor in donors if donor is not None), default=0)
    aligned = list(ranges)
    for index, layers in enumerate(ranges[:-1]):
        if layers.start < last < layers.stop:
            aligned[index] = range(layers.start, last)
            aligned[index + 1] = range(last, ranges[index + 1].stop)
            break
    return tuple(aligned)


def plan_layers(spec: ModelSpec, devices: int, weights: Sequence[float] = ()) -> tuple[range, ...]:
    """The layers of each device by weights: split_layers, aligned."""
    return align(spec, split_layers(len(spec.blocks), devices, weights))


@dataclass(frozen=True)
class Room:
    """A device as fill_layers sees it, in bytes.

    free: what layers may take, so without what an embedding or a head takes; may be negative. weights, state: of each
    layer of the model, if it is placed here. spare: takes layers only if the others cannot hold them. buffers: by the
    layer that is the first one here, for what is handed over; none if empty.
    """

    free: int
    weights: tuple[int, ...]
    state: tuple[int, ...]
    spare: bool = False
    buffers: tuple[int, ...] = ()

    def used(self, layers: range, donors: Sequence[int | None]) -> int:
        """Bytes of a shard of these layers. Donors in earlier shards are mirrored: their state is here as well."""
        mirrors = {donor for donor in donors[layers.start : layers.stop] if donor is not None and donor < layers.start}
        own = sum(self.weights[layers.start : layers.stop]) + sum(self.state[layers.start : layers.stop])
        return own + sum(self.state[donor] for donor in mirrors) + (self.buffers[layers.start] if self.buffers else 0)


def fill_layers(rooms: Sequence[Room], donors: Sequence[int | None]) -> tuple[range, ...]:
    """Consecutive ranges of layers by bytes, in proportion to what each device has free, each at least one layer long.

    Of all such splits the first of: fewest bytes that do not fit (none, if any split fits); fewest layers on spare
    devices; least sum of used^2 / free, whose minimum lies where used is proportional to free. So equal devices get
    equal bytes, as far as whole layers go; of equally good splits the one with more layers on the earlier devices.

    `donors`: per layer the layer whose keys and values it reads. Raises UsageError if there are more devices than
    layers.
    """
    count = len(donors)
    check_devices(count, len(rooms))
    # Integers: used^2 / free times the product of all that is free, so that equal splits compare equal.
    scale = math.prod(max(1, room.free) for room in rooms)
    best: dict[int, tuple[tuple[int, int, int], tuple[range, ...]]] = {0: ((0, 0, 0), ())}
    for index, room in enumerate(rooms):
        left = len(rooms) - index - 1
        ends = range(count, count + 1) if not left else range(index + 1, count - left + 1)
        longer: dict[int, tuple[tuple[int, int, int], tuple[range, ...]]] = {}
        for end in ends:
            for start, (cost, ranges) in best.items():
                if start >= end:
                    continue
                layers = range(start, end)
                used = room.used(layers, donors)
                added = (
                    max(0, used - room.free),
                    len(layers) if room.spare else 0,
                    used * used * (scale // max(1, room.free)),
                )
                total = (cost[0] + added[0], cost[1] + added[1], cost[2] + added[2])
                if end not in longer or total <= longer[end][0]:
                    longer[end] = total, (*ranges, layers)
        best = longer
    return best[count][1]


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
    if boundary in (0, len(spec.blocks)):
        return tuple(captured)
    mixers = [spec.blocks[donor].mixer for donor in spec.lent(boundary)]
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
    """What the layers of a shard keep on a device, for tentative spans of up to `verify` rows.

    Raises UsageError if their heads do not take a type of `kv`.
    """
    page = [0] * len(spec.page_groups)
    slot = 0
    for layer in (*mirrored(spec, layers), *layers):
        mixer = spec.blocks[layer].mixer
        if spec.donor(layer) is not None:
            continue
        if isinstance(mixer, Attention):
            if spec.ranks(layer) and layer in layers:
                slot += 4 * KEPT * mixer.heads * mixer.head_dim
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
