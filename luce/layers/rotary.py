"""Rotary angles of one Rope spec on one device, computed once per step for all layers that share it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from luce.models.spec import Rope, Yarn
from luce.ops.qkv import Rotation
from luce.ops.rope import rope_table
from luce.runtime.device import Device
from luce.runtime.step import DeviceStep


def frequencies(spec: Rope, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """theta^(-2i/dims) / f_i / linear for each pair, with YaRN's ramp: float64 [dims / 2]."""
    pairs = np.arange(spec.dims // 2, dtype=np.float64)
    result = spec.base ** (-2 * pairs / spec.dims) / spec.linear
    if factors is not None:
        result /= factors.astype(np.float64)
    return result if spec.yarn is None else _stretched(result, pairs, spec, spec.yarn)


def _stretched(fast: NDArray[np.float64], pairs: NDArray[np.float64], spec: Rope, yarn: Yarn) -> NDArray[np.float64]:
    """Frequencies of pairs that turn more than beta_fast times in the original context stay the same; those of pairs
    that turn less than beta_slow times are divided by the factor; a linear ramp covers the pairs in between."""

    def pair_of(turns: float) -> float:
        return spec.dims * math.log(yarn.original_context / (2 * math.pi * turns)) / (2 * math.log(spec.base))

    first, last = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.rounded:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(0, first), min(spec.dims - 1, last)
    ramp = np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    return fast * (1 - ramp) + fast / yarn.factor * ramp


def magnitude(spec: Rope) -> float:
    """What cos and sin are multiplied by."""
    if spec.yarn is None:
        return spec.magnitude
    longer = 0.1 * math.log(spec.yarn.factor)
    return spec.magnitude * (longer + 1) / (longer * spec.yarn.log_multiplier + 1)


def axes(spec: Rope) -> NDArray[np.int32]:
    """The position axis (time, height, width) that each pair follows, interleaved as in Qwen3.5: int32 [dims / 2]."""
    result = np.zeros(spec.dims // 2, np.int32)
    for axis, section in enumerate(spec.sections[1:3], start=1):
        pairs = np.arange(axis, min(3 * section, len(result)), 3)
        result[pairs] = axis
    return result


class Rotary:
    """The rotation of query and key heads."""

    def __init__(
        self,
        device: Device,
        spec: Rope,
        factors: NDArray[np.float32] | None,
        long_factors: NDArray[np.float32] | None = None,
    ) -> None:
        self._device = device
        self._adjacent = spec.adjacent
        self._magnitude = magnitude(spec)
        both = frequencies(spec, factors)
        if long_factors is not None:
            both = np.stack((both, frequencies(spec, long_factors)))
        self._frequencies = device.upload(both)
        self._axes = device.upload(axes(spec))

    def __call__(self, step: DeviceStep) -> Rotation:
        """The rotation to the positions of the step's rows."""
        if self not in step.ropes:
            step.ropes[self] = rope_table(
                self._device, step.position_ids, self._frequencies, self._axes, magnitude=self._magnitude
            )
        return Rotation(step.ropes[self], self._adjacent)
