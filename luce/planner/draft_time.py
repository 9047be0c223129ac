"""Predicted seconds of the proposals of a decoding step."""

from __future__ import annotations

from dataclasses import dataclass

from luce.planner.figures import DeviceFigures
from luce.planner.layer_time import Pass, Seconds, head_time, layer_time
from luce.planner.problem import HeadWork, LayerWork


@dataclass(frozen=True)
class DraftWork:
    """What a drafter computes for the proposal of a sequence: passes through its layers, and through a head."""

    layers: tuple[LayerWork, ...]
    head: HeadWork
    #: passes one after the other, each of which the host waits for
    passes: int
    #: rows of a pass
    rows: int
    #: most positions that it sees
    context: int


def draft_time(device: DeviceFigures, work: DraftWork, depth: float) -> Seconds:
    """The proposal of a sequence at position `depth`.

    The rows that bring a drafter's context up to the text are few, and most drafters append them while the target
    works; they are left out.
    """
    one = Pass("decode", work.rows, min(depth, work.context))
    step = Seconds(step=device.step).times(device.decode_ratio)
    layers = sum((layer_time(device, layer, one) for layer in work.layers), start=step)
    return sum([layers + head_time(device, work.head, work.rows)] * work.passes, start=Seconds())
