"""Sizes of the memory for activations at the boundaries between shards, by device.

This module computes sizes only; Link and Arena allocate the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.models.spec import ModelSpec
from luce.remote.device import same_daemon
from luce.remote.shared_layout import shared_size
from luce.runtime.device import Device
from luce.runtime.transfer import DEPTH
from luce.shard.sizes import activation_bytes, activation_widths


@dataclass(frozen=True)
class BoundaryMemory:
    """The most bytes for the activations that a shard reads.

    GPUs that copy to each other need less. The shared memory of a daemon is counted once, with its first shard.
    """

    #: on the shard's device
    device: int = 0
    #: pinned and shared host memory that the activations pass through
    host: int = 0


def boundary_memory(
    spec: ModelSpec, devices: Sequence[Device], layers: Sequence[range], rows: int, captured: Sequence[int] = ()
) -> tuple[BoundaryMemory, ...]:
    """The memory of each shard, for steps of up to `rows` rows. `captured`: layers whose output a drafter reads."""
    found = []
    for number, (device, own) in enumerate(zip(devices, layers, strict=True)):
        before = devices[number - 1] if number else None
        size = DEPTH * rows * activation_bytes(spec, own.start, captured) if number else 0
        host = 0
        if device.remote and not same_daemon(before, device):
            last = number
            while last + 1 < len(devices) and same_daemon(device, devices[last + 1]):
                last += 1
            widths = [activation_widths(spec, boundary, captured) for boundary in (own.start, layers[last].stop)]
            host = shared_size(rows, *widths)
        elif not (device.host or (before is not None and before.remote and not device.remote)):
            # A remote shard's activation is copied to the device from shared memory.
            host = size
        found.append(BoundaryMemory(size, host))
    return tuple(found)
