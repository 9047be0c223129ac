"""Runs a shard's steps, once their shape has occurred before, by replaying a captured graph.

A captured graph fixes every launch: kernel, grid, scalars, addresses. So a shape (StepShape) holds all that launches
may depend on, and everything else of a step is read from one array at a fixed address, filled anew before each replay.
Page tables are padded to widths that grow by doubling, so that a growing context meets few shapes. The first step of a
shape runs eagerly, which also loads its kernels; the second one is captured.

Steps of few rows are replayed, and pieces of long ones where several GPUs share this process: its threads take turns at
launching, and cannot keep them all busy.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from luce.errors import DeviceError
from luce.runtime.device import Array, Device, Graph
from luce.runtime.step import DeviceStep, Step, StepShape, write_step
from luce.shard.shard import TransientActivation

_log = logging.getLogger(__name__)

#: Most rows of a step, and of one of its spans, that is captured: decoding sequences, verified drafts.
MAX_ROWS, MAX_SPAN = 64, 16
#: fewest rows of a long step that is captured
_LONG = 256
# Width of the narrowest page table: 512 positions. Blocks of a grid that find no page cost less than other graphs.
_NARROWEST = 8
# Shapes that are kept, the least recently used ones going first. A graph of 1000 kernels takes 2.3 MB of the device and
# 14 ms to capture (27B on an H200).
_KEPT = 128

#: What a shard does with a step and the activations handed to it; it never waits for the device.
Work = Callable[[DeviceStep, tuple[Array, ...]], tuple[Array, ...]]


class GraphRunner:
    """Runs `work` on a device. `pages` of each page group: no table is wider. `long`: whether long steps of one span
    are replayed too, where the device can capture what they consist of."""

    def __init__(self, device: Device, work: Work, pages: Sequence[int], *, long: bool = False) -> None:
        self._device = device
        self._work = work
        self._pages = pages
        self._long = long and device.captures_gemm
        self._shapes: dict[StepShape, _Replay] = {}
        #: what graphs read of what is handed over: one runs after another
        self._handed: dict[tuple[int, tuple[int, ...]], Array] = {}
        #: steps that were replayed
        self.replayed = 0

    def run(self, step: Step, handed: tuple[Array, ...]) -> tuple[Array, ...]:
        """What `work` returns; of a replayed step a TransientActivation."""
        shape = StepShape.of(step)
        few = shape.rows <= MAX_ROWS and shape.longest <= MAX_SPAN
        if not (self._device.captures and (few or (self._long and shape.spans == 1 and shape.rows >= _LONG))):
            return self._work(DeviceStep.upload(self._device, step), handed)
        shape = replace(shape, widths=tuple(map(_padded, shape.widths, self._pages)))
        replay = self._shapes.pop(shape, None) or _Replay(self._device, self._work, shape, self._handed)
        self._shapes[shape] = replay
        if len(self._shapes) > _KEPT:
            del self._shapes[next(iter(self._shapes))]
        result = replay.run(step, handed)
        if replay.graph is None:
            return result
        self.replayed += 1
        return TransientActivation(result)

    def close(self) -> None:
        """Release graphs and the arrays they read. Idempotent."""
        self._shapes.clear()
        self._handed.clear()
        # A method of the owner, which would be freed no sooner than cycles of references are looked for.
        self._work = _closed


class _Replay:
    """Steps of one shape: eager the first time, captured the second time, replayed from then on. `memory`: arrays that
    all shapes read what is handed over from, by number and shape."""

    def __init__(
        self, device: Device, work: Work, shape: StepShape, memory: dict[tuple[int, tuple[int, ...]], Array]
    ) -> None:
        self._device = device
        self._work = work
        self._shape = shape
        self._staged = np.zeros(shape.size, np.int32)
        self._arrays = shape.cut(self._staged)
        self._inputs = device.empty(shape.size, np.int32)
        self._memory = memory
        self._handed: tuple[Array, ...] = ()
        self._known = self._refused = False
        self.graph: Graph | None = None
        self._result: tuple[Array, ...] = ()

    def run(self, step: Step, handed: tuple[Array, ...]) -> tuple[Array, ...]:
        write_step(step, self._arrays)
        self._device.write(self._inputs, self._staged)
        if not self._known:
            self._handed = tuple(itertools.starmap(self._like, enumerate(handed)))
        for own, array in zip(self._handed, handed, strict=True):
            self._device.copy(own, array)
        if self._known and not self._refused and self.graph is None:
            self._capture()
        self._known = True
        if self.graph is None:
            return self._call()
        self.graph.launch()
        return self._result

    def _like(self, number: int, array: Array) -> Array:
        key = number, array.shape
        if key not in self._memory:
            self._memory[key] = self._device.empty(array.shape, array.dtype)
        return self._memory[key]

    def _call(self) -> tuple[Array, ...]:
        return self._work(DeviceStep(self._device, self._shape, self._inputs), self._handed)

    def _capture(self) -> None:
        try:
            if self._shape.rows > MAX_ROWS:
                # A graph takes as much as eager steps, whose memory is the pool's now, and something must be left.
                memory = self._device.memory()
                if memory.free - memory.cached < 2 * memory.cached:
                    raise DeviceError(f"{self._device.name}: {memory.free - memory.cached} bytes free")
            self.graph, self._result = self._device.capture(self._call)
        except DeviceError as error:
            self._refused = True
            _log.warning("steps of %d rows run launch by launch: %s", self._shape.rows, error)


def _closed(step: DeviceStep, handed: tuple[Array, ...]) -> tuple[Array, ...]:
    raise DeviceError("a step of a model that is closed")


def _padded(width: int, pages: int) -> int:
    """The width of a page table that has `width` entries in use, out of a pool of `pages`."""
    return max(width, min(pages, _NARROWEST << max(0, -(-width // _NARROWEST) - 1).bit_length()))
