"""How much memory the ways between shards take, and of which device. Reads sizes; Link and Arena take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.models.spec import ModelSpec
from luce.remote.device import same_daemon
from luce.remote.shared_layout import shared_size
from luce.runtime.device import Device
from luce.runtime.transfer import DEPTH
from luce.shard.sizes import handed_on, handed_widths


@dataclass(frozen=True)
class BoundaryMemory:
    """Bytes for what a shard is handed: on its device, and at most of pinned and shared host memory on the way.

    It is less where GPUs copy to each other. The memory that a daemon shares is counted once, with its first shard.
    """

    device: int = 0
    host: int = 0


def boundary_memory(
    spec: ModelSpec, devices: Sequence[Device], layers: Sequence[range], rows: int
) -> tuple[BoundaryMemory, ...]:
    """Of the shards on `devices`, with steps of up to `rows` rows."""
    found = []
    for number, (device, part) in enumerate(zip(devices, layers, strict=True)):
        before = devices[number - 1] if number else None
        size = DEPTH * rows * handed_on(spec, part.start) if number else 0
        host = 0
        if device.remote and not same_daemon(before, device):
            last = number
            while last + 1 < len(devices) and same_daemon(device, devices[last + 1]):
                last += 1
            host = shared_size(rows, handed_widths(spec, part.start), handed_widths(spec, layers[last].stop))
        elif not (device.host or (before is not None and before.remote and not device.remote)):
            # What comes out of shared memory needs no other on the way.
            host = size
        found.append(BoundaryMemory(size, host))
    return tuple(found)
