"""Rotary angles of one Rope spec on one device, computed once per step for all layers that share it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.models.spec import Rope
from luce.ops.rope import rope, rope_table
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep


def frequencies(spec: Rope, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """theta^(-2i/dims) / f_i / linear for each pair: float64 [dims / 2]."""
    pairs = np.arange(spec.dims // 2, dtype=np.float64)
    result = spec.base ** (-2 * pairs / spec.dims) / spec.linear
    return result if factors is None else result / factors.astype(np.float64)


def axes(spec: Rope) -> NDArray[np.int32]:
    """The position axis (time, height, width) that each pair follows, interleaved as in Qwen3.5: int32 [dims / 2]."""
    result = np.zeros(spec.dims // 2, np.int32)
    for axis, section in enumerate(spec.sections[1:3], start=1):
        pairs = np.arange(axis, min(3 * section, len(result)), 3)
        result[pairs] = axis
    return result


class Rotary:
    """Rotates query and key heads."""

    def __init__(self, device: Device, spec: Rope, factors: NDArray[np.float32] | None) -> None:
        self._device = device
        self._adjacent = spec.adjacent
        self._frequencies = device.upload(frequencies(spec, factors))
        self._axes = device.upload(axes(spec))

    def __call__(self, step: DeviceStep, *heads: Array) -> None:
        """Rotate each float32 [rows, heads, head_dim] in place to the positions of the step's rows."""
        if self not in step.ropes:
            step.ropes[self] = rope_table(self._device, step.positions, self._frequencies, self._axes)
        for x in heads:
            rope(self._device, x, step.ropes[self], adjacent=self._adjacent)
