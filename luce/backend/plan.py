"""Layers to devices. Pure: sizes in, ranges out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luce.errors import UsageError
from luce.layers.state import DeltaState, KVPool
from luce.models.spec import Attention, ModelSpec, PageGroup
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Device
from luce.runtime.step import PAGE


def split_layers(layers: int, devices: int, weights: Sequence[float] = ()) -> tuple[range, ...]:
    """Consecutive ranges of layers in proportion to `weights` (default: equal), each at least one layer long.

    Raises UsageError if that is impossible.
    """
    weights = tuple(weights) or (1.0,) * devices
    total = sum(weights)
    if layers <= 0 or not 0 < devices <= layers or len(weights) != devices or not total > 0:
        shares = ",".join(f"{w:g}" for w in weights)
        raise UsageError(
            f"--target-layer-split {shares}: bad layer split for {devices} devices and {layers} layers",
            param="target_layer_split",
        )
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


def plan_layers(spec: ModelSpec, devices: int, weights: Sequence[float] = ()) -> tuple[range, ...]:
    """The layers of each device. Any boundary will do: a shard mirrors keys and values that it borrows from others."""
    return split_layers(len(spec.blocks), devices, weights)


def mirrored(spec: ModelSpec, layers: range) -> tuple[int, ...]:
    """The blocks of earlier shards whose keys and values `layers` read: their shard keeps a mirror of these."""
    donors = {spec.donor(layer) for layer in layers}
    return tuple(sorted(donor for donor in donors if donor is not None and donor < layers.start))


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a device needs beside weights: of one page in each page group, and of one sequence's slot."""

    page: tuple[int, ...]
    slot: int


def state_bytes(device: Device, spec: ModelSpec, layers: range, kv: KVTypes = AUTO) -> StateBytes:
    """What the layers of a shard keep on a device. Raises UsageError if their heads do not take a type of `kv`."""
    page = [0] * len(spec.page_groups)
    slot = 0
    for layer in (*mirrored(spec, layers), *layers):
        mixer = spec.blocks[layer].mixer
        if spec.donor(layer) is not None:
            continue
        if isinstance(mixer, Attention):
            page[spec.page_groups.index(PageGroup(mixer.window))] += KVPool.page_bytes(device, mixer, kv)
        else:
            slot += DeltaState.slot_bytes(mixer)
    return StateBytes(tuple(page), slot)


def pages_for(window: int | None, context: int, chunk: int) -> int:
    """Pages of one group that a sequence of `context` positions needs at most, with steps of up to `chunk` rows.

    A windowed group holds what the oldest row of a chunk still sees, and the chunk itself.
    """
    full = -(-context // PAGE)
    if window is None:
        return full
    return min(full, -(-(window + chunk) // PAGE) + 1)
