"""Where the layers of a file go on the devices at hand, and what they take there. Reads sizes, no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luce.backend.boundary_memory import boundary_memory
from luce.backend.kvflash_size import Share, Wanted, auto_pool, explained, pool_size, smallest_pool, tail_pages
from luce.backend.layer_assignment import Room, align, check_devices, fill_layers, plan_layers
from luce.backend.microbatch import default_microbatch_rows, max_microbatch_rows
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile
from luce.layers.build import tensor_bytes
from luce.models.spec import ModelSpec
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Device
from luce.runtime.step import PAGE
from luce.runtime.transfer import DEPTH
from luce.shard.sizes import handed_on, pages_for, state_bytes

#: Of a device's free memory, what is left to activations and to other programs. On an H200 a model of 27 B parameters
#: with a context of 2 x 8192 tokens took 0.31 GB beside weights and state.
_RESERVE = 0.06
# Prompt rows in a step when --chunk is not given. Each step of a GPU unpacks all weights: on an H200 that takes 21 of
# the 234 ms of 2048 rows of a 27B model in one step, 82 ms in four. A CPU has no such cost, and others wait for a step.
_GPU_CHUNK, _CPU_CHUNK = 2048, 512
#: context when --max-ctx is not given and the model was trained for more
_DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Claim:
    """Bytes that something else than layers is going to take on a device."""

    device: Device
    bytes: int


@dataclass(frozen=True)
class ShardPlan:
    """Layers for a device, and bytes.

    weights, state: what the layers and the context take there. buffers: what is handed over lies there. free: what the
    device has for all of these; devices of the host have what those before them, and `pinned`, leave of its memory.
    spare: what may be taken of a GPU beyond what is needed: half of what is left, as other programs come later.
    handed_on: per token to the next shard, 0 for the last one. claimed: what is not free because something else is
    going to take it. pinned: host memory on the way of what is handed over, at most.
    """

    device: str
    layers: range
    weights: int
    state: int
    free: int
    spare: int
    handed_on: int
    claimed: int = 0
    buffers: int = 0
    pinned: int = 0

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.weights + self.state + self.buffers

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.needed <= self.free


def served_context(spec: ModelSpec, asked: int) -> int:
    """Positions of one sequence for the --max-ctx `asked`, 0 for none. Raises UsageError beyond the trained length."""
    if asked > spec.context_length:
        raise UsageError(f"--max-ctx {asked}: the model was trained for {spec.context_length} tokens", param="max_ctx")
    return asked or min(spec.context_length, _DEFAULT_CONTEXT)


def served_chunk(devices: Sequence[Device], asked: int) -> int:
    """Prompt rows in a step for the --chunk `asked`, 0 for none."""
    return asked or (_CPU_CHUNK if any(device.host for device in devices) else _GPU_CHUNK)


def group_pages(spec: ModelSpec, slots: int, context: int, chunk: int, bound: int | None = None) -> tuple[int, ...]:
    """Pages of each page group for `slots` sequences of `context` positions; see plan_shards."""
    counts = []
    for group in spec.page_groups:
        pages = pages_for(group.window, context, chunk)
        counts.append(slots * (pages if bound is None or group.window is not None else min(pages, bound)))
    return tuple(counts)


@dataclass(frozen=True)
class Pool:
    """Most pages of full attention of a sequence, None for as many as it is long, and why, for people."""

    bound: int | None = None
    reason: str = ""


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
    verify: int = 0,
    branch_pages: int = 0,
    claims: Sequence[Claim] = (),
    bound: int | None = None,
    piece: int = 0,
) -> tuple[ShardPlan, ...]:
    """The shards of a model, one for each device, whether they fit or not.

    `weights` decide (plan_layers), or without them bytes and free memory (fill_layers), where the CPU gets only what
    the GPUs cannot hold; the boundary of two devices is aligned if both then hold their part. There is room for `slots`
    sequences of `context` positions, in steps of up to `chunk` rows and speculative spans of up to `verify`, which go
    through the shards in pieces of about `piece` rows (0: as many as usual), where a sequence has `bound` pages of full
    attention at most, and for `branch_pages` pages of each group beside theirs; what is claimed is left free. Raises
    UsageError for more devices than layers, for another number of weights than of devices, and if the heads do not take
    a type of `kv`.
    """
    check_devices(len(spec.layers), len(devices))
    pages = [count + branch_pages for count in group_pages(spec, slots, context, chunk, bound)]
    sizes = _Sizes(
        file,
        spec,
        devices,
        slots,
        pages,
        kv,
        verify,
        claims,
        max_microbatch_rows(piece or default_microbatch_rows(len(devices))),
    )
    if weights:
        return sizes.shards(plan_layers(spec, len(devices), weights))
    ranges = fill_layers(sizes.rooms(), [spec.donor(layer) for layer in range(len(spec.layers))])
    # More devices would need mirrors behind the aligned boundary all the same; and no layer shall move to the CPU.
    if len(devices) == 2 and devices[0].host == devices[1].host:
        aligned = sizes.shards(align(spec, ranges))
        if all(shard.fits for shard in aligned):
            return aligned
    return sizes.shards(ranges)


def plan_pool(
    wanted: Wanted | None,
    plan: Callable[..., tuple[ShardPlan, ...]],
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    slots: int,
    context: int,
    chunk: int,
    kv: KVTypes,
) -> Pool:
    """The pool that is asked for, as this model and these devices can have it.

    `plan` is plan_shards with everything but `bound`, which is asked what the smallest pool would leave free.
    """
    if wanted is None:
        return Pool()
    full = [group for group, kind in enumerate(spec.page_groups) if kind.window is None]
    if not full:
        return Pool(None, "no pool, as no layer attends to the whole context")
    tail = tail_pages(spec.tail)
    size, why = wanted.size, ""
    if wanted.auto:
        least = smallest_pool(tail) // PAGE
        pages = group_pages(spec, slots, context, chunk, least)
        shares = []
        for shard, device in zip(plan(bound=least), devices, strict=True):
            page = state_bytes(device, spec, shard.layers, kv).page
            taken = sum(pages[group] * page[group] for group in full)
            position = -(-sum(page[group] for group in full) // PAGE)
            shares.append(Share(shard.device, shard.free - shard.needed + taken, position))
        size = auto_pool(shares, slots, wanted.size)
        why = f" ({explained(shares, slots)}; at most {wanted.size})"
    chosen = pool_size(size, tail, context)
    if chosen is None:
        return Pool(None, f"no pool, as the smallest has {smallest_pool(tail)} tokens and the context {context}")
    return Pool(chosen // PAGE, f"a pool of {chosen} tokens for sequences of up to {context}{why}")


class _Sizes:
    """What layers take on each of the devices, and what these have."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        devices: Sequence[Device],
        slots: int,
        pages: Sequence[int],
        kv: KVTypes,
        verify: int,
        claims: Sequence[Claim],
        rows: int,
    ) -> None:
        self._file = file
        self._spec = spec
        self._devices = devices
        self._slots = slots
        self._pages = pages
        self._kv = kv
        self._verify = verify
        self._rows = rows
        # One reading of the host's memory: its devices would differ by what other programs do meanwhile.
        host = next((usable(device) for device in devices if device.host), 0)
        self._claimed = [
            sum(c.bytes for c in claims if (c.device.host if device.host else c.device.name == device.name))
            for device in devices
        ]
        free = [host if device.host else usable(device) for device in devices]
        self._free = [max(0, own - claimed) for own, claimed in zip(free, self._claimed, strict=True)]

    def shards(self, ranges: Sequence[range]) -> tuple[ShardPlan, ...]:
        """The plan with these layers on the devices."""
        ways = boundary_memory(self._spec, self._devices, ranges, self._rows)
        shards, on_host = [], sum(way.host for way in ways)
        placed = zip(self._devices, ranges, self._free, self._claimed, ways, strict=True)
        for device, layers, free, claimed, way in placed:
            weights, state = tensor_bytes(self._file, self._spec, layers, device), self._state(device, layers)
            needed = weights + state + way.device
            if device.host:
                free -= on_host
                on_host += needed
            spare = 0 if device.host else max(0, free - needed) // 2
            given = handed_on(self._spec, layers.stop)
            sizes = weights, state, max(0, free), spare, given, claimed, way.device, way.host
            shards.append(ShardPlan(str(device.name), layers, *sizes))
        return tuple(shards)

    def rooms(self) -> list[Room]:
        """The devices as fill_layers wants them; those of the host have equal parts of its memory."""
        count, hosts = len(self._spec.layers), sum(device.host for device in self._devices)
        buffers = tuple(DEPTH * self._rows * handed_on(self._spec, layer) if layer else 0 for layer in range(count))
        rooms = []
        for index, (device, free) in enumerate(zip(self._devices, self._free, strict=True)):
            one = [range(layer, layer + 1) for layer in range(count)]
            weights = tuple(tensor_bytes(self._file, self._spec, layer, device, layers_only=True) for layer in one)
            # The first device has the embedding, the last one the head; one in between is like any that has neither.
            last = index == len(self._devices) - 1
            start = 0 if index == 0 else count - 1 if last else 1
            some = range(start, count if last else start + 1)
            ends = tensor_bytes(self._file, self._spec, some, device) - sum(weights[some.start : some.stop])
            # A borrowing layer keeps nothing itself.
            keeping = [layer if self._spec.donor(layer.start) is None else range(0) for layer in one]
            state = tuple(self._state(device, layer) for layer in keeping)
            free = free // (hosts if device.host else 1) - ends
            rooms.append(Room(free, weights, state, spare=device.host, buffers=buffers))
        return rooms

    def _state(self, device: Device, layers: range) -> int:
        size = state_bytes(device, self._spec, layers, self._kv, self._verify)
        return self._slots * size.slot + sum(n * page for n, page in zip(self._pages, size.page, strict=True))
