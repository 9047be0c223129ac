"""Where the layers of a file go on the devices at hand, and what they take there. Reads sizes, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.backend.plan import (
    Room,
    align,
    check_devices,
    fill_layers,
    handed_on,
    pages_for,
    plan_layers,
    state_bytes,
)
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile
from luce.layers.build import tensor_bytes
from luce.models.spec import ModelSpec
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Device

#: of a device's free memory, what is left to activations and to other programs
_RESERVE = 0.06
#: context when --max-ctx is not given and the model was trained for more
_DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class ShardPlan:
    """Layers for a device, and bytes.

    weights, state: what the layers and the context take there. free: what the device has for both. handed_on: per token
    to the next shard, 0 for the last one.
    """

    device: str
    layers: range
    weights: int
    state: int
    free: int
    handed_on: int

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.weights + self.state <= self.free


def served_context(spec: ModelSpec, asked: int) -> int:
    """Positions of one sequence for the --max-ctx `asked`, 0 for none. Raises UsageError beyond the trained length."""
    if asked > spec.context_length:
        raise UsageError(f"--max-ctx {asked}: the model was trained for {spec.context_length} tokens", param="max_ctx")
    return asked or min(spec.context_length, _DEFAULT_CONTEXT)


def usable(device: Device) -> int:
    """Bytes of a device that weights and states may take now."""
    return int(device.memory().free * (1 - _RESERVE))


def plan_shards(
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    weights: Sequence[float] = (),
    slots: int = 1,
    context: int = 4096,
    chunk: int = 512,
    kv: KVTypes = AUTO,
) -> tuple[ShardPlan, ...]:
    """The shards of a model, one for each device, whether they fit or not.

    `weights` decide (plan_layers), or without them bytes and free memory (fill_layers), where the CPU gets only what
    the GPUs cannot hold; the boundary of two devices is aligned if both then hold their part. There is room for `slots`
    sequences of `context` positions, in steps of up to `chunk` rows. Raises UsageError for more devices than layers,
    for another number of weights than of devices, and if the heads do not take a type of `kv`.
    """
    check_devices(len(spec.blocks), len(devices))
    pages = [slots * pages_for(group.window, context, chunk) for group in spec.page_groups]
    # Devices of the host share its memory: one reading, or they would differ by what other programs do meanwhile.
    hosts = [device for device in devices if device.host]
    share = usable(hosts[0]) // len(hosts) if hosts else 0
    free = [share if device.host else usable(device) for device in devices]

    def state(device: Device, layers: range) -> int:
        size = state_bytes(device, spec, layers, kv)
        return slots * size.slot + sum(n * page for n, page in zip(pages, size.page, strict=True))

    def planned(ranges: Sequence[range]) -> tuple[ShardPlan, ...]:
        return tuple(
            ShardPlan(
                str(device.name),
                layers,
                tensor_bytes(file, spec, layers, device),
                state(device, layers),
                memory,
                handed_on(spec, layers.stop),
            )
            for device, layers, memory in zip(devices, ranges, free, strict=True)
        )

    if weights:
        return planned(plan_layers(spec, len(devices), weights))
    layers = [range(layer, layer + 1) for layer in range(len(spec.blocks))]
    rooms = []
    for index, device in enumerate(devices):
        own = tuple(tensor_bytes(file, spec, layer, device, ends=False) for layer in layers)
        # The first device has the embedding, the last one the head; one in between is like any that has neither.
        last = index == len(devices) - 1
        first = 0 if index == 0 else layers[-1].start if last else 1
        some = range(first, len(layers) if last else first + 1)
        fixed = tensor_bytes(file, spec, some, device) - sum(own[some.start : some.stop])
        # A borrowing layer keeps nothing itself; its mirror is counted where the layer is not with its donor.
        kept = tuple(state(device, layer) if spec.donor(layer.start) is None else 0 for layer in layers)
        rooms.append(Room(free[index] - fixed, own, kept, spare=device.host))
    ranges = fill_layers(rooms, [spec.donor(layer.start) for layer in layers])
    shards = planned(ranges)
    # More devices would need mirrors behind the aligned boundary all the same; and no layer shall move to the CPU.
    if len(devices) == 2 and len(hosts) != 1:
        aligned = planned(align(spec, ranges))
        if all(shard.fits for shard in aligned):
            return aligned
    return shards
