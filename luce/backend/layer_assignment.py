"""Layers to devices. Pure: sizes in, ranges out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luce.errors import UsageError
from luce.models.spec import ModelSpec


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
    donors = (spec.donor(layer) for layer in range(len(spec.layers)))
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
    return align(spec, split_layers(len(spec.layers), devices, weights))


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
