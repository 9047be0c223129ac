"""Where the layers of a file go on the devices, and how much memory they take there. Reads sizes, no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from luce.backend.boundary_memory import boundary_memory
from luce.backend.expert_placement import ExpertBytes
from luce.backend.kvflash_size import (
    DeviceShare,
    auto_size,
    describe_shares,
    resident_size,
    smallest_size,
    tail_pages,
)
from luce.backend.layer_assignment import DeviceBudget, align, check_devices, fill_layers, plan_layers
from luce.backend.microbatch import default_microbatch_rows, max_microbatch_rows
from luce.backend.serving_options import Claim, ServingOptions
from luce.errors import OutOfMemoryError, UsageError
from luce.gguf.reader import GGUFFile
from luce.layers.kept_weights import KeptWeights
from luce.layers.tensors import tensor_bytes
from luce.models.spec import ModelSpec
from luce.remote.device import is_remote
from luce.runtime.device import Device
from luce.runtime.step import PAGE
from luce.runtime.transfer import DEPTH
from luce.shard.sizes import activation_bytes, pages_for, state_bytes

#: Share of a device's free memory that is reserved for the arrays of a step and for other programs. On an H200 a model
#: of 27 B parameters with a context of 2 x 8192 tokens took 0.31 GB beside weights and state.
RESERVE = 0.06
# Default of --chunk: prompt rows in a step. Each step of a GPU unpacks all weights: on an H200 that takes 21 of the
# 234 ms of 2048 rows of a 27B model in one step, 82 ms in four. A CPU has no such cost, and other sequences wait for a
# step.
_GPU_CHUNK, _CPU_CHUNK = 2048, 512
# Experts share the rows of a step, and products of more rows leave fewer multiprocessors idle: an H200 reads 8192
# tokens of 35B-A3B in 173 ms, in four steps in 197, and of a dense 27B in 748 and 767. The arrays of such a step are
# four times as large, and on a slow card others would wait for seconds: for GPUs with as much memory as those of data
# centres have.
_LARGE_CHUNK, _LARGE_CHUNK_MEMORY = 8192, 70 << 30
#: most positions of the default of --max-ctx
_DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class ShardPlan:
    """Layers for one device, in bytes."""

    device: str
    layers: range
    weights: int
    #: pages and recurrent states of all sequences
    state: int
    #: free memory for weights, state and buffers; for a device of the host: the host's free memory without `pinned` and
    #: without the needs of the host devices before this one
    free: int
    #: memory of a GPU for unpacked matrices: half of the rest, as other programs may start later
    unpack_bytes: int
    #: the activation to the next shard, per token; 0 for the last shard
    activation: int
    #: reserved for something other than layers, and not part of `free`
    claimed: int = 0
    #: buffers for the activations from the previous shard
    buffers: int = 0
    #: most host memory that these activations pass through
    pinned: int = 0
    #: bytes of routed experts among the weights
    experts: int = 0
    #: layers whose routed experts lie on the CPU of the device's machine, ascending
    offloaded: tuple[int, ...] = ()
    #: bytes of these experts there
    offloaded_bytes: int = 0
    #: free memory of that machine for them, without the needs of the shards before this one
    offload_free: int = 0

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.weights + self.state + self.buffers

    @property
    def fits(self) -> bool:
        """Whether the device has as many bytes as needed, and its machine as many as the offloaded experts need."""
        return self.needed <= self.free and self.offloaded_bytes <= self.offload_free


def default_context(spec: ModelSpec, asked: int) -> int:
    """Positions of one sequence for --max-ctx `asked`; 0: the default.

    Raises UsageError if `asked` is more than the trained length.
    """
    if asked > spec.longest_context:
        raise UsageError(f"--max-ctx {asked}: the model was trained for {spec.longest_context} tokens", param="max_ctx")
    return asked or min(spec.context_length, _DEFAULT_CONTEXT)


def default_chunk(devices: Sequence[Device], asked: int) -> int:
    """Prompt rows in a step for --chunk `asked`; 0: the default."""
    if asked:
        return asked
    if any(device.host for device in devices):
        return _CPU_CHUNK
    large = all(device.memory().total >= _LARGE_CHUNK_MEMORY for device in devices)
    return _LARGE_CHUNK if large else _GPU_CHUNK


def group_pages(spec: ModelSpec, options: ServingOptions, max_resident_pages: int | None = None) -> tuple[int, ...]:
    """Pages of each page group for all sequences, without branch pages.

    `max_resident_pages`: most pages of full attention of a sequence on the devices, None for all.
    """
    counts = []
    for group in spec.page_groups:
        pages = pages_for(group.window, options.context, options.chunk)
        limited = max_resident_pages is not None and group.window is None
        counts.append(options.slots * (min(pages, max_resident_pages or 0) if limited else pages))
    return tuple(counts)


def free_bytes(device: Device, kept: KeptWeights | None = None) -> int:
    """Free bytes of a device, and those of weights that stay on it until the next load, which uses them or lets go of
    them first. `kept`: those of this process."""
    free = device.memory().free
    if is_remote(device):
        return free + device.kept
    return free + (0 if kept is None else kept.free_bytes(device))


def usable_bytes(device: Device, kept: KeptWeights | None = None) -> int:
    """Bytes of a device that weights and states may take now: without the device's margin, or without 6 %. `kept`: as
    for free_bytes."""
    free = free_bytes(device, kept)
    return max(0, free - device.margin) if device.margin is not None else int(free * (1 - RESERVE))


def plan_shards(
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    options: ServingOptions,
    *,
    max_resident_pages: int | None = None,
) -> tuple[ShardPlan, ...]:
    """The shards of a model, one for each device, whether they fit or not.

    `options.layers` are taken as they are; `options.layer_split` divides the layers (plan_layers). Without both, bytes
    and free memory do (fill_layers): the CPU gets only the layers that the GPUs cannot hold, and the boundary of two
    devices is aligned if their layers still fit. `max_resident_pages` as in group_pages. Claimed memory stays free.
    Raises UsageError if there are more devices than layers, if the numbers of weights and devices differ, and if the
    heads do not support a type of `options.kv`.
    """
    check_devices(len(spec.layers), len(devices))
    sizes = _Sizes(file, spec, devices, options, max_resident_pages)
    if options.layers:
        return sizes.shards(options.layers)
    if options.layer_split:
        return sizes.shards(plan_layers(spec, len(devices), options.layer_split))
    ranges = fill_layers(sizes.budgets(), [spec.donor(layer) for layer in range(len(spec.layers))])
    # More devices would need mirrors after the aligned boundary anyway. Between a GPU and the CPU, aligning could move
    # layers to the CPU.
    if len(devices) == 2 and devices[0].host == devices[1].host:
        aligned = sizes.shards(align(spec, ranges))
        if all(shard.fits for shard in aligned):
            return aligned
    return sizes.shards(ranges)


@dataclass(frozen=True)
class KVFlashPlan:
    """How much of a sequence is resident."""

    #: most pages of full attention of a sequence on the devices; None: all
    max_resident_pages: int | None = None
    #: the decision as a text for logs; empty without --kvflash
    reason: str = ""


def plan_kvflash(file: GGUFFile, spec: ModelSpec, devices: Sequence[Device], options: ServingOptions) -> KVFlashPlan:
    """The resident pages for `options.kvflash` with this model and these devices.

    For `auto`, a plan with the fewest resident pages (plan_shards) gives the free memory. Raises UsageError as
    plan_shards.
    """
    request, context = options.kvflash, options.context
    if request is None:
        return KVFlashPlan()
    full = [group for group, kind in enumerate(spec.page_groups) if kind.window is None]
    if not full:
        return KVFlashPlan(None, "off: no layer attends to the whole context")
    tail = tail_pages(spec.tail)
    size, why = request.size, ""
    if request.auto:
        least = smallest_size(tail) // PAGE
        pages = group_pages(spec, options, least)
        shares = []
        for shard, device in zip(
            plan_shards(file, spec, devices, options, max_resident_pages=least), devices, strict=True
        ):
            page = state_bytes(device, spec, shard.layers, options).page
            taken = sum(pages[group] * page[group] for group in full)
            position = -(-sum(page[group] for group in full) // PAGE)
            shares.append(DeviceShare(shard.device, shard.free - shard.needed + taken, position))
        size = auto_size(shares, options.slots, request.size)
        why = f" ({describe_shares(shares, options.slots)}; at most {request.size})"
    chosen = resident_size(size, tail, context)
    if chosen is None:
        return KVFlashPlan(
            None,
            f"off: the context of {context} tokens is too short for {smallest_size(tail)} resident tokens, the minimum",
        )
    return KVFlashPlan(chosen // PAGE, f"{chosen} resident tokens of each sequence of up to {context}{why}")


@dataclass(frozen=True)
class ModelPlan:
    """The placement of a model on devices."""

    devices: tuple[Device, ...]
    #: one for each device, whether they fit or not
    shards: tuple[ShardPlan, ...]
    kvflash: KVFlashPlan
    #: pages of each page group for all sequences, without branch pages
    pages: tuple[int, ...]
    #: bytes of host memory for a saved page of full attention, by device
    page_bytes: Mapping[Device, int]
    #: the most bytes of host memory for the rest of a checkpoint: recurrent states, windows and a page that is not full
    checkpoint_bytes: int


def plan_model(file: GGUFFile, spec: ModelSpec, devices: Sequence[Device], options: ServingOptions) -> ModelPlan:
    """The resident pages (plan_kvflash) and the shards (plan_shards). Raises UsageError as these."""
    kvflash = plan_kvflash(file, spec, devices, options)
    resident = kvflash.max_resident_pages
    shards = plan_shards(file, spec, devices, options, max_resident_pages=resident)
    page_bytes: Counter[Device] = Counter()
    checkpoint_bytes = 0
    for device, shard in zip(devices, shards, strict=True):
        sizes = state_bytes(device, spec, shard.layers, options)
        checkpoint_bytes += sizes.slot
        for size, group in zip(sizes.page, spec.page_groups, strict=True):
            page_bytes[device] += size if group.window is None else 0
            checkpoint_bytes += size * pages_for(group.window or 1, options.context, PAGE)
    pages = group_pages(spec, options, resident)
    return ModelPlan(tuple(devices), shards, kvflash, pages, page_bytes, checkpoint_bytes)


def check_memory(spec: ModelSpec, plan: ModelPlan, options: ServingOptions) -> None:
    """Raises OutOfMemoryError, naming a context that would fit, if a device cannot hold its layers."""
    resident = plan.kvflash.max_resident_pages
    for number, (shard, device) in enumerate(zip(plan.shards, plan.devices, strict=True)):
        if shard.fits:
            continue
        if shard.needed <= shard.free:
            raise OutOfMemoryError(
                f"{shard_name(number, shard)}: the experts of {len(shard.offloaded)} layers need "
                f"{shard.offloaded_bytes} bytes on the CPU, {shard.offload_free} are free",
                param="experts_on",
            )
        # A longer context does not add pages to windows.
        page = state_bytes(device, spec, shard.layers, options).page
        full = [group for group, kind in enumerate(spec.page_groups) if kind.window is None and resident is None]
        free = shard.free - shard.needed + sum(plan.pages[group] * page[group] for group in full)
        per_page = options.slots * sum(page[group] for group in full)
        fits = free // per_page * PAGE if per_page and free > 0 else 0
        advice = f"--max-ctx {fits} would fit" if fits else "not even one page of context would fit"
        if resident is not None:
            advice = "a smaller --kvflash may fit"
        if options.experts is None and not device.host and 0 < shard.needed - shard.free <= shard.experts:
            advice += "; --experts-on auto may fit"
        draft = f" beside {shard.claimed} for the draft" if shard.claimed else ""
        buffers = f", {shard.buffers} of activations" if shard.buffers else ""
        raise OutOfMemoryError(
            f"{shard_name(number, shard)} need {shard.needed} bytes ({shard.weights} of weights, "
            f"{shard.state} of context state{buffers}), {shard.free} are free{draft}; {advice}",
            param="max_ctx" if resident is None else "kvflash",
        )


def fits_beside(
    file: GGUFFile, spec: ModelSpec, devices: Sequence[Device], options: ServingOptions, claims: Sequence[Claim]
) -> bool:
    """Whether a model fits beside further claims. Raises UsageError as plan_model."""
    options = replace(options, claims=(*options.claims, *claims))
    try:
        check_memory(spec, plan_model(file, spec, devices, options), options)
    except OutOfMemoryError:
        return False
    return True


def shard_name(number: int, shard: ShardPlan) -> str:
    """The shard's number, device and layers, for error messages."""
    return f"shard {number} ({shard.device}): layers {shard.layers.start}..{shard.layers.stop - 1}"


class _Sizes:
    """Bytes of layers on each device, and the free memory of each device."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        devices: Sequence[Device],
        options: ServingOptions,
        max_resident_pages: int | None,
    ) -> None:
        self._file = file
        self._spec = spec
        self._devices = devices
        self._options = options
        self._pages = [count + options.branch_pages for count in group_pages(spec, options, max_resident_pages)]
        self._rows = max_microbatch_rows(options.microbatch or default_microbatch_rows(len(devices)))
        self._experts = ExpertBytes(file, spec, options.experts)
        # The host's memory is read once for all its devices, as other programs change it meanwhile.
        hosts = [device for device in devices if device.host] + ([options.experts.device] if options.experts else [])
        self._host = host = usable_bytes(hosts[0], options.weights) if hosts else 0
        self._claimed = [
            sum(c.bytes for c in options.claims if (c.device.host if device.host else c.device.name == device.name))
            for device in devices
        ]
        self._host_claims = sum(claim.bytes for claim in options.claims if claim.device.host)
        free = [host if device.host else usable_bytes(device, options.weights) for device in devices]
        self._free = [max(0, own - claimed) for own, claimed in zip(free, self._claimed, strict=True)]

    def shards(self, ranges: Sequence[range]) -> tuple[ShardPlan, ...]:
        """The plan for these ranges of layers, one for each device."""
        captured = self._options.captured
        boundaries = boundary_memory(self._spec, self._devices, ranges, self._rows, captured)
        pinned = sum(boundary.host for boundary in boundaries)
        buffers = [boundary.device for boundary in boundaries]
        away = list(map(self._away, self._devices, ranges, self._free, buffers))
        # Machines of daemons at tcp:// have memory of their own, of which nothing is known here.
        offloaded = [self._experts.on_cpu(own) for own in away]
        here = [0 if device.name.place else size for device, size in zip(self._devices, offloaded, strict=True)]
        shards, on_host = list[ShardPlan](), pinned + sum(here)
        for number, (device, layers) in enumerate(zip(self._devices, ranges, strict=True)):
            weights, state = self._weights(device, layers, away[number]), self._state(device, layers)
            free, boundary = self._free[number], boundaries[number]
            needed = weights + state + boundary.device
            if device.host:
                free -= on_host
                on_host += needed
            known = self._host - self._host_claims - pinned - sum(here[:number])
            shards.append(
                ShardPlan(
                    str(device.name),
                    layers,
                    weights,
                    state,
                    max(0, free),
                    0 if device.host else max(0, free - needed) // 2,
                    activation_bytes(self._spec, layers.stop, captured),
                    self._claimed[number],
                    boundary.device,
                    boundary.host,
                    self._experts.placed([layer for layer in layers if layer not in away[number]], device),
                    away[number],
                    offloaded[number],
                    offloaded[number] if device.name.place else max(0, known),
                )
            )
        return tuple(shards)

    def _weights(self, device: Device, layers: range, away: Sequence[int]) -> int:
        """Bytes of a shard's weights without the experts of the layers `away`."""
        return tensor_bytes(self._file, self._spec, layers, device) - self._experts.placed(away, device)

    def _away(self, device: Device, layers: range, free: int, buffers: int) -> tuple[int, ...]:
        """The layers of a shard that leave their experts to the CPU."""
        weights = self._weights(device, layers, self._experts.fixed(layers))
        return self._experts.away(device, layers, weights + self._state(device, layers) + buffers - free)

    def budgets(self) -> list[DeviceBudget]:
        """The input of fill_layers. Devices of the host get equal parts of its memory."""
        count, hosts = len(self._spec.layers), sum(device.host for device in self._devices)
        buffers = tuple(
            DEPTH * self._rows * activation_bytes(self._spec, layer, self._options.captured) if layer else 0
            for layer in range(count)
        )
        budgets = []
        for index, (device, free) in enumerate(zip(self._devices, self._free, strict=True)):
            one = [range(layer, layer + 1) for layer in range(count)]
            whole = [tensor_bytes(self._file, self._spec, layer, device, layers_only=True) for layer in one]
            fixed = (self._experts.placed(self._experts.fixed(layer), device) for layer in one)
            weights = tuple(size - away for size, away in zip(whole, fixed, strict=True))
            movable = tuple(self._experts.movable(device, layer) for layer in range(count))
            # The first device has the embedding, the last one the head; a device between them has neither.
            last = index == len(self._devices) - 1
            start = 0 if index == 0 else count - 1 if last else 1
            some = range(start, count if last else start + 1)
            ends = tensor_bytes(self._file, self._spec, some, device) - sum(whole[some.start : some.stop])
            # A layer that reads a donor's keys and values has none of its own.
            stateful = [layer if self._spec.donor(layer.start) is None else range(0) for layer in one]
            state = tuple(self._state(device, layer) for layer in stateful)
            if device.host:
                free = (free - self._experts.on_cpu(self._experts.fixed(range(count)))) // hosts
            budgets.append(
                DeviceBudget(free - ends, weights, state, last_resort=device.host, buffers=buffers, movable=movable)
            )
        return budgets

    def _state(self, device: Device, layers: range) -> int:
        return state_bytes(device, self._spec, layers, self._options).total(self._pages, self._options.slots)
