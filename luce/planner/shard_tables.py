"""Seconds and bytes of every range of layers on a device.

Arrays are [layers, layers + 1]: by the first layer of the range, and by the layer behind its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.planner.figures import DeviceFigures
from luce.planner.layer_time import ExpertPlace, Pass, Seconds, head_time, layer_time, layer_times
from luce.planner.problem import LayerWork, Load, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def handover_rows(rows: int) -> int:
    """Most rows of an activation between two shards whose prompts come in pieces of `rows` rows: the two places that
    take turns have room for a step whose last piece is half as long again, and for rows of replies."""
    return 2 * (3 * rows // 2 + 128)


def kept_positions(layer: LayerWork, context: int, chunk: int) -> int:
    """Positions of a sequence whose keys and values a layer keeps."""
    return context if layer.window is None else min(context, layer.window + chunk)


def state_bytes(load: Load, layer: LayerWork, device: DeviceFigures) -> float:
    """Bytes of a layer's keys, values and recurrent states on a device, of all sequences."""
    kept = kept_positions(layer, load.context, load.chunk)
    return load.sequences * (layer.kv * kept * device.state_expand + layer.slot)


def buffer_bytes(problem: Problem, device: DeviceFigures, first: int, rows: int) -> int:
    """Bytes of a shard that begins with a layer beside weights and states: arrays of a step, and, behind another shard,
    what that one hands over."""
    return device.workspace + (handover_rows(rows) * problem.model.boundaries[first] if first else 0)


def expert_place(problem: Problem, device: DeviceFigures) -> ExpertPlace | None:
    """Where a device may leave experts."""
    cpu = problem.expert_cpu(device)
    if cpu is None or device.bus is None:
        return None
    return ExpertPlace(cpu, device.bus, 4 * problem.model.hidden)


def passes(problem: Problem, rows: int) -> tuple[Pass, Pass]:
    """A decoding step, and a piece of a prompt of `rows` rows, which sees half the prompt on average."""
    load = problem.load
    depth = load.prompt if load.depth is None else load.depth
    return Pass("decode", load.rows, depth), Pass("prompt", rows, load.prompt / 2)


@dataclass(frozen=True)
class ShardTables:
    """The shards that a device can hold."""

    #: whether the range fits the device
    fits: NDArray[np.bool_]
    #: bytes of the device's memory
    bytes: Floats
    #: layers that leave their experts to the CPU: the last ones of the range that have experts
    offloaded: Ints
    #: seconds of a decoding step
    decode: Floats
    #: seconds of a piece of a prompt
    prompt: Floats
    #: bytes of unpacked weights that each piece unpacks anew
    unpacked: Floats
    #: bytes in the memory of the machine: of a CPU's layers, or of a GPU's offloaded experts
    pooled: Floats
    #: seconds of a piece on the machine's CPU
    busy: Floats


def shard_tables(problem: Problem, device: DeviceFigures, rows: int, *, offloaded: int | None = None) -> ShardTables:
    """All shards of a device, with prompts in pieces of `rows` rows.

    Where a device has a CPU for experts, a range leaves out those of the fewest layers with which it fits (`auto`), or
    those of the last N layers of the model; with `offloaded`, those of so many of its own last layers.
    """
    model = problem.model
    count = len(model.layers)
    away = expert_place(problem, device)
    room = problem.room(device)
    need = _bytes(problem, device, rows)
    # Layers with experts before each layer, and running sums over these layers.
    moe = [layer for layer in model.layers if layer.experts is not None]
    before = _sums([float(layer.experts is not None) for layer in model.layers]).astype(np.int64)
    sizes = _sums([float(layer.experts.bytes) for layer in moe if layer.experts is not None])
    last = np.broadcast_to(before, need.shape)
    if offloaded is None:
        away_of = _offloaded(problem, device, before, (need - room) / device.expand, sizes)
    else:
        present = np.maximum(last - before[:-1, None], 0)
        away_of = np.where((offloaded <= present) & (away is not None or not offloaded), offloaded, -1)
    # The offloaded ones are a range of `moe`, which ends with the last one before `end`.
    first = last - np.maximum(away_of, 0)
    need = need - (sizes[last] - sizes[first]) * device.expand
    fits = (np.arange(count)[:, None] < np.arange(count + 1)) & (away_of >= 0) & (need <= room)
    pooled = need if device.host else (sizes[last] - sizes[first]) * (1.0 if away is None else away.cpu.expand)
    if away is not None:
        fits &= pooled <= problem.pools[device.machine]

    phases, busy = [], np.zeros_like(need)
    for work in passes(problem, rows):
        here = layer_times(device, model.layers, work)
        seconds = device.step * device.ratio(work.phase) + _ranges([second.total for second in here])
        if away is not None:
            there = layer_times(device, moe, work, away)
            kept = [second for second, layer in zip(here, model.layers, strict=True) if layer.experts is not None]
            more = _sums([b.total - a.total for a, b in zip(kept, there, strict=True)])
            seconds = seconds + more[last] - more[first]
            if work.phase == "prompt":
                cpu = _sums([second.cpu_experts for second in there])
                busy = cpu[last] - cpu[first]
        phases.append(seconds)
    decode, prompt = phases
    decode[:, count] += head_time(device, model.head, problem.load.rows).total
    unpacked = np.zeros_like(need)
    if device.unpack is not None:
        unpacked = _unpacked([layer.unpacked for layer in model.layers], (room - need) / 2)
        prompt = prompt + unpacked / device.unpack * device.prompt_ratio
    return ShardTables(fits, need, away_of, decode, prompt, unpacked, pooled, prompt if device.host else busy)


def shard_seconds(
    problem: Problem, device: DeviceFigures, layers: range, offloaded: int, unpacked: float, rows: int
) -> tuple[Seconds, Seconds]:
    """Seconds of a decoding step and of a piece of a prompt in one shard, by what limits them; the sums are those of
    shard_tables."""
    decode, prompt = (
        pass_seconds(problem, device, layers, offloaded, work, unpacked) for work in passes(problem, rows)
    )
    return decode, prompt


def pass_seconds(
    problem: Problem, device: DeviceFigures, layers: range, offloaded: int, work: Pass, unpacked: float
) -> Seconds:
    """Seconds of a pass through one shard, by what limits them: of replies with the head behind the last layer, of a
    piece of a prompt with so many bytes that are unpacked anew."""
    away = expert_place(problem, device)
    moe = [layer for layer in layers if problem.model.layers[layer].experts is not None]
    gone = set(moe[len(moe) - offloaded :])
    seconds = sum(
        (layer_time(device, problem.model.layers[i], work, away if i in gone else None) for i in layers),
        start=Seconds(step=device.step).times(device.ratio(work.phase)),
    )
    if work.phase == "decode":
        last = layers.stop == len(problem.model.layers)
        return seconds + head_time(device, problem.model.head, work.rows) if last else seconds
    unpacking = Seconds() if device.unpack is None else Seconds(unpacking=unpacked / device.unpack)
    return seconds + unpacking.times(device.prompt_ratio)


def _sums(values: Sequence[float]) -> Floats:
    """[n + 1]: sums of the first values."""
    return np.concatenate([[0.0], np.cumsum(np.array(values, np.float64))])


def _ranges(values: Sequence[float]) -> Floats:
    """[n, n + 1]: sums over ranges."""
    sums = _sums(values)
    return np.asarray(sums[None, :] - sums[:-1, None])


def _bytes(problem: Problem, device: DeviceFigures, rows: int) -> Floats:
    """Bytes of each range with all its experts."""
    model, load = problem.model, problem.load
    sizes = []
    for layer in model.layers:
        experts = 0 if layer.experts is None else layer.experts.bytes
        sizes.append((layer.bytes + experts) * device.expand + state_bytes(load, layer, device))
    need = (
        _ranges(sizes) + np.array([buffer_bytes(problem, device, first, rows) for first in range(len(sizes))])[:, None]
    )
    if not device.host:
        # The host reads the table of embeddings from the file.
        need[0] += model.embedding
    need[:, -1] += model.head.bytes * device.expand
    return np.asarray(need, np.float64)


def _offloaded(problem: Problem, device: DeviceFigures, before: Ints, excess: Floats, sizes: Floats) -> Ints:
    """Layers of each range that leave their experts to the CPU; -1 if no number will do.

    `excess`: bytes of the file that a range has too many. `sizes`: running sums of the experts' bytes over the layers
    that have them.
    """
    last = np.broadcast_to(before, excess.shape)
    present = np.maximum(last - before[:-1, None], 0)
    away = problem.expert_cpu(device) is not None
    if isinstance(problem.offload, int) and not device.host:
        # A machine without a CPU cannot take these layers.
        wanted = np.maximum(last - np.maximum(before[:-1, None], before[-1] - problem.offload), 0)
        return wanted if away else np.where(wanted > 0, -1, 0)
    if not away:
        return np.zeros(excess.shape, np.int64)
    found = np.full(excess.shape, -1, np.int64)
    for number in range(int(before[-1]) + 1):
        saved = sizes[last] - sizes[np.maximum(last - number, 0)]
        found = np.where((found < 0) & (number <= present) & (excess <= saved), number, found)
    return found


def _unpacked(sizes: Sequence[int], spare: Floats) -> Floats:
    """Bytes of unpacked weights that have no room in `spare`, for each range. The first layers stay unpacked, and later
    ones that still fit."""
    spare, packed = spare.copy(), np.zeros_like(spare)
    for layer, size in enumerate(sizes):
        ranges = np.s_[: layer + 1, layer + 1 :]
        stays = size <= spare[ranges]
        spare[ranges] -= np.where(stays, size, 0)
        packed[ranges] += np.where(stays, 0, size)
    return packed
