"""Predicted seconds of a layer on a device, by what they are spent on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.problem import ExpertWork, HeadWork, LayerWork


@dataclass(frozen=True)
class Seconds:
    """Seconds by what limits them."""

    launches: float = 0.0
    #: reading weights, keys, values and states
    memory: float = 0.0
    arithmetic: float = 0.0
    unpacking: float = 0.0
    #: products with experts on the CPU
    cpu_experts: float = 0.0
    #: activations on their way to the CPU's experts and back
    bus: float = 0.0
    #: a step's fixed cost
    step: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.launches + other.launches,
            self.memory + other.memory,
            self.arithmetic + other.arithmetic,
            self.unpacking + other.unpacking,
            self.cpu_experts + other.cpu_experts,
            self.bus + other.bus,
            self.step + other.step,
        )

    def times(self, ratio: float) -> Seconds:
        """All of them by a ratio."""
        return self if ratio == 1.0 else Seconds(*(ratio * seconds for seconds in astuple(self)))

    @property
    def total(self) -> float:
        """All of them."""
        return self.launches + self.memory + self.arithmetic + self.unpacking + self.cpu_experts + self.bus + self.step


@dataclass(frozen=True)
class Pass:
    """The rows of a pass through the layers."""

    phase: Literal["decode", "prompt"]
    rows: int
    #: positions that a row sees without a window
    depth: float


@dataclass(frozen=True)
class ExpertPlace:
    """Where a GPU leaves the routed experts of a layer."""

    cpu: DeviceFigures
    bus: LinkFigures
    #: bytes per row that go there, and as many that come back
    row_bytes: int


def at_rows(table: Sequence[tuple[int, float]], rows: int) -> float:
    """The value of a table for `rows` rows: linear in the logarithms between measured rows, constant outside them."""
    first, last = table[0], table[-1]
    if rows <= first[0]:
        return first[1]
    for (fewer, low), (more, high) in itertools.pairwise(table):
        if rows <= more:
            share = math.log(rows / fewer) / math.log(more / fewer)
            return low * math.exp(share * math.log(high / low))
    return last[1]


def arithmetic_rate(device: DeviceFigures, rows: int) -> float:
    """Operations per second of a product with `rows` rows."""
    return at_rows(device.rates, rows)


def product_time(device: DeviceFigures, rows: int, size: float, macs: float) -> Seconds:
    """A product of `rows` rows with weights of `size` bytes in the file, `macs` multiply-adds a row: the longer one of
    reading the weights and of the arithmetic."""
    memory = size * device.expand / device.read
    arithmetic = 2 * macs * rows / arithmetic_rate(device, rows)
    return Seconds(memory=memory) if memory >= arithmetic else Seconds(arithmetic=arithmetic)


def expert_time(device: DeviceFigures, experts: ExpertWork, rows: int) -> Seconds:
    """The routed experts of `rows` rows that choose experts independently, all equally likely: a row leaves an expert
    out with probability 1 - used / count."""
    touched = 1 - (1 - experts.used / experts.count) ** rows
    slower = 1 / at_rows(device.gather, rows) if device.gather else 1.0
    product = product_time(device, rows, touched * experts.bytes * slower, experts.used * experts.macs * slower)
    return product + Seconds(launches=device.launch * experts.launches + device.routing)


def layer_time(device: DeviceFigures, layer: LayerWork, work: Pass, away: ExpertPlace | None = None) -> Seconds:
    """A layer on a device, its routed experts on the device too or `away`.

    A row of a reply reads all keys and values that it sees. The rows of a prompt share them, so there the arithmetic
    counts, as it does in recurrent layers. What servers observed of a device in this phase corrects its times.
    """
    ratio = device.ratio(work.phase)
    seen = min(work.depth, layer.window or work.depth)
    seconds = Seconds(launches=device.launch * layer.launches)
    seconds += product_time(device, work.rows, layer.bytes, layer.macs)
    if work.phase == "prompt":
        attention = 2 * layer.attention * work.rows * seen / (device.attention or arithmetic_rate(device, work.rows))
        recurrence = work.rows * layer.slot_moved / device.recurrence if device.recurrence else 0.0
        between = work.rows * layer.activations / device.elementwise if device.elementwise else 0.0
        seconds += Seconds(arithmetic=attention + recurrence, memory=between)
    else:
        kv = layer.kv * device.state_expand
        states = layer.slot_moved / (device.recurrence_row or device.read)
        moved = work.rows * (kv * seen / (device.state_read or device.read) + states)
        seconds += Seconds(memory=moved, launches=device.layer)
    if layer.experts is None:
        return seconds.times(ratio)
    if away is None:
        return (seconds + expert_time(device, layer.experts, work.rows)).times(ratio)
    return seconds.times(ratio) + Seconds(
        cpu_experts=expert_time(away.cpu, layer.experts, work.rows).total * away.cpu.ratio(work.phase),
        bus=2 * away.bus.seconds(away.row_bytes * work.rows),
    )


def layer_times(
    device: DeviceFigures, layers: Sequence[LayerWork], work: Pass, away: ExpertPlace | None = None
) -> list[Seconds]:
    """layer_time of each layer. Most layers of a model are equal, so that few are computed."""
    known = {layer: layer_time(device, layer, work, away) for layer in set(layers)}
    return [known[layer] for layer in layers]


def head_time(device: DeviceFigures, head: HeadWork, rows: int) -> Seconds:
    """The head on `rows` rows of a decoding step."""
    seconds = product_time(device, rows, head.bytes, head.macs) + Seconds(launches=device.launch * head.launches)
    return seconds.times(device.decode_ratio)
