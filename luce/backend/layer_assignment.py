"""Assigns layers to devices. Pure: sizes in, ranges out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luce.errors import UsageError
from luce.models.spec import ModelSpec


def split_layers(layers: int, devices: int, weights: Sequence[float] = ()) -> tuple[range, ...]:
    """Consecutive ranges of layers in proportion to `weights` (default: equal), each of at least one layer.

    Raises UsageError if such a split is impossible.
    """
    if weights and len(weights) != devices:
        listed = ",".join(f"{weight:g}" for weight in weights)
        raise UsageError(
            f"--target-layer-split {listed}: {len(weights)} weights for {devices} devices", param="target_layer_split"
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
    """Raises UsageError if there are more devices than layers, or none."""
    if not 0 < devices <= layers:
        raise UsageError(
            f"--target-devices: bad layer split for {devices} devices and {layers} layers", param="target_devices"
        )


def align(spec: ModelSpec, ranges: Sequence[range]) -> tuple[range, ...]:
    """Move the boundary between the last donor of keys and values and its borrowers to the donor.

    The last donor then needs no mirror on the next device. In Gemma 4 that is the layer of full attention, whose mirror
    would grow with the context. Only one boundary moves; later shards mirror all the donors that they borrow from.
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
class DeviceBudget:
    """The free memory of a device and the sizes of layers on it, in bytes."""

    #: free memory for layers, without the embedding and the head; may be negative
    free: int
    #: of each layer of the model
    weights: tuple[int, ...]
    #: of each layer of the model
    state: tuple[int, ...]
    #: whether the device gets layers only if the other devices cannot hold them
    last_resort: bool = False
    #: buffers for the activations that enter, by the first layer here; empty: none
    buffers: tuple[int, ...] = ()
    #: of each layer, what goes to the CPU if it must, from the last layer backwards; empty: nothing can
    movable: tuple[int, ...] = ()

    def moved(self, layers: range, used: int) -> tuple[int, int]:
        """Bytes of a shard with `used` bytes once as few layers as possible have moved their experts, and how many
        layers these are."""
        count = 0
        for layer in reversed(layers) if self.movable else ():
            if used <= self.free:
                break
            used -= self.movable[layer]
            count += self.movable[layer] > 0
        return used, count

    def used(self, layers: range, donors: Sequence[int | None]) -> int:
        """Bytes of a shard of these layers. Donors in earlier shards are mirrored, so the shard has their state as
        well."""
        mirrors = {donor for donor in donors[layers.start : layers.stop] if donor is not None and donor < layers.start}
        own = sum(self.weights[layers.start : layers.stop]) + sum(self.state[layers.start : layers.stop])
        return own + sum(self.state[donor] for donor in mirrors) + (self.buffers[layers.start] if self.buffers else 0)


#: Cost of a split (bytes that do not fit, layers on devices of last resort, layers that move their experts, scaled
#: used^2 / free), and its ranges.
_Split = tuple[tuple[int, int, int, int], tuple[range, ...]]


def fill_layers(budgets: Sequence[DeviceBudget], donors: Sequence[int | None]) -> tuple[range, ...]:
    """Consecutive ranges of layers by bytes, in proportion to the free memory of the devices, each of at least one.

    The best split has, in this order of importance: the fewest bytes that do not fit (none, if any split fits); the
    fewest layers on devices of last resort; the fewest layers whose experts go to the CPU; the least sum of used^2 /
    free, whose minimum is at used proportional to free. So equal devices get about equal bytes. Of equally good splits,
    the one with more layers on the earlier devices wins.

    `donors`: for each layer, the layer whose keys and values it reads. Raises UsageError if there are more devices than
    layers.
    """
    count = len(donors)
    check_devices(count, len(budgets))
    # Integers: used^2 / free times the product of all free bytes, so that equal splits compare equal.
    scale = math.prod(max(1, budget.free) for budget in budgets)
    best: dict[int, _Split] = {0: ((0, 0, 0, 0), ())}
    for index, budget in enumerate(budgets):
        remaining = len(budgets) - index - 1
        ends = range(count, count + 1) if not remaining else range(index + 1, count - remaining + 1)
        longer: dict[int, _Split] = {}
        for end in ends:
            for start, (cost, ranges) in best.items():
                if start >= end:
                    continue
                layers = range(start, end)
                used, moved = budget.moved(layers, budget.used(layers, donors))
                added = (
                    max(0, used - budget.free),
                    len(layers) if budget.last_resort else 0,
                    moved,
                    used * used * (scale // max(1, budget.free)),
                )
                total = (cost[0] + added[0], cost[1] + added[1], cost[2] + added[2], cost[3] + added[3])
                if end not in longer or total <= longer[end][0]:
                    longer[end] = total, (*ranges, layers)
        best = longer
    return best[count][1]
