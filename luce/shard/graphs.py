"""Captures a shard's step as a CUDA graph when its shape occurs again, and replays the graph from then on.

A captured graph fixes every launch: kernel, grid, scalars, addresses. So a shape (StepShape) holds all that launches
may depend on. The kernels read everything else of a step from one array at a fixed address, which is written before
each replay. Page tables are padded to widths that grow by doubling, so a growing context needs few shapes. The first
step of a shape runs eagerly, which also loads its kernels; the second one is captured.

Steps of few rows are replayed. Microbatches of long steps are replayed only where several GPUs share this process: its
threads launch one at a time, and could not keep all GPUs busy with single launches.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np

from luce.errors import DeviceError
from luce.runtime.device import Array, Device, Graph
from luce.runtime.step import DeviceStep, Step, StepShape, write_future_tokens, write_step
from luce.shard.shard import TransientActivation

_log = logging.getLogger(__name__)

#: most rows of a captured step, and of one of its spans: decoding sequences and speculative spans
MAX_ROWS, MAX_SPAN = 64, 16
#: most rows of a captured step that has one of each sequence, if the device can capture a library's matrix products
MAX_REPLIES = 256
#: fewest rows of a long step that is captured
LONG_ROWS = 256
# Entries of the narrowest page table: 512 positions. Thread blocks without a page cost less than more graphs.
_MIN_WIDTH = 8
# Shapes in memory; the least recently used one is evicted. A graph of 1000 kernels takes 2.3 MB of the device and 14 ms
# to capture (27B on an H200).
_MAX_SHAPES = 128

#: Queues the work on a step and its input arrays, and returns the output arrays. It never waits for the device.
Work = Callable[[DeviceStep, tuple[Array, ...]], tuple[Array, ...]]


class GraphRunner:
    """Runs `work` on a device.

    `pages`: pages of each page group, the limit of its table's width. `long`: whether long steps of one span are
    replayed too, if the device can capture their matrix products.
    """

    def __init__(self, device: Device, work: Work, pages: Sequence[int], *, long: bool = False) -> None:
        self._device = device
        self._work = work
        self._pages = pages
        self._long = long and device.captures_gemm
        self._shapes: dict[StepShape, _Replay] = {}
        #: input arrays of the graphs, by position and shape; all graphs share them, as they run one after another
        self._input_memory: dict[tuple[int, tuple[int, ...]], Array] = {}
        #: whether a step of more than MAX_ROWS rows could not be captured
        self._refused_many = False
        #: a step whose arrays are on the device, but for its tokens, and its shape's graph
        self._staged: tuple[Step, _Replay] | None = None
        #: number of replayed steps
        self.replayed = 0

    def stage(self, step: Step) -> None:
        """Copy a step to the device, which `run` may get next: its tokens may change until then, and nothing else.
        Does nothing for a step that is not replayed."""
        replay = self._replay(step)
        if replay is not None and replay.graph is not None:
            replay.write(step)
            self._staged = step, replay

    def run(self, step: Step, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns the result of `work`; for a replayed step, a TransientActivation."""
        staged, self._staged = self._staged, None
        is_staged = staged is not None and staged[0] is step
        replay = staged[1] if staged is not None and is_staged else self._replay(step)
        if replay is None:
            return self._work(DeviceStep.upload(self._device, step), inputs)
        if is_staged:
            self._device.write(replay.tokens, step.tokens)
        else:
            replay.write(step)
        result = replay.run(step, inputs)
        if replay.graph is None:
            return result
        self.replayed += 1
        return TransientActivation(result)

    def _replay(self, step: Step) -> _Replay | None:
        """The graph of a step's shape, captured or not yet; None for steps that are not replayed."""
        widths = [_padded(view.table.shape[1], pages) for view, pages in zip(step.views, self._pages, strict=True)]
        shape = StepShape.of(step, tuple(widths))
        few = shape.rows <= MAX_ROWS and shape.longest <= MAX_SPAN
        replies = shape.longest == 1 and shape.rows <= MAX_REPLIES and self._device.captures_gemm
        long = self._long and shape.spans == 1 and shape.rows >= LONG_ROWS
        if not (self._device.captures and (few or replies or long)):
            return None
        replay = self._shapes.pop(shape, None)
        replay = replay or _Replay(self._device, self._work, shape, self._input_memory, self._log_refusal)
        self._shapes[shape] = replay
        if len(self._shapes) > _MAX_SHAPES:
            del self._shapes[next(iter(self._shapes))]
        return replay

    def _log_refusal(self, rows: int, error: DeviceError) -> None:
        many = rows > MAX_ROWS
        # The CPU runs ops of several families by NumPy. Steps of many rows have many shapes, all of which lack memory.
        quiet = self._device.host or (many and self._refused_many)
        self._refused_many |= many
        _log.log(logging.DEBUG if quiet else logging.WARNING, "steps of %d rows run launch by launch: %s", rows, error)

    def close(self) -> None:
        """Release the graphs and the arrays that they read. Idempotent."""
        self._staged = None
        self._shapes.clear()
        self._input_memory.clear()
        # `work` is a method of the owner. This cycle of references would delay freeing the owner until Python's cycle
        # collector runs.
        self._work = _raise_closed


class _Replay:
    """Steps of one shape: eager the first time, captured the second time, replayed from then on.

    `input_memory`: the input arrays that all shapes share, by position and shape. `on_refused` gets the number of rows
    and the reason if the shape cannot be captured.
    """

    def __init__(
        self,
        device: Device,
        work: Work,
        shape: StepShape,
        input_memory: dict[tuple[int, tuple[int, ...]], Array],
        on_refused: Callable[[int, DeviceError], None],
    ) -> None:
        self._device = device
        self._work = work
        self._shape = shape
        self._host_memory = np.zeros(shape.size, np.int32)
        self._arrays = shape.cut(self._host_memory)
        self._step_memory = device.empty(shape.size, np.int32)
        #: int32 [rows] on the device
        self.tokens = shape.cut(self._step_memory)[0]
        self._input_memory = input_memory
        self._on_refused = on_refused
        self._inputs: tuple[Array, ...] = ()
        self._has_run = self._refused = False
        self.graph: Graph | None = None
        self._result: tuple[Array, ...] = ()

    def write(self, step: Step) -> None:
        """Queue the copy of a step's arrays to the device."""
        write_step(step, self._arrays)
        self._device.write(self._step_memory, self._host_memory)

    def run(self, step: Step, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Run a step that was written."""
        write_future_tokens(self._device, step, self.tokens)
        if not self._has_run:
            self._inputs = tuple(itertools.starmap(self._shared_input, enumerate(inputs)))
        for own, array in zip(self._inputs, inputs, strict=True):
            self._device.copy(own, array)
        if self._has_run and not self._refused and self.graph is None:
            self._capture()
        self._has_run = True
        if self.graph is None:
            return self._call()
        self.graph.launch()
        return self._result

    def _shared_input(self, number: int, array: Array) -> Array:
        key = number, array.shape
        if key not in self._input_memory:
            self._input_memory[key] = self._device.empty(array.shape, array.dtype)
        return self._input_memory[key]

    def _call(self) -> tuple[Array, ...]:
        return self._work(DeviceStep(self._device, self._shape, self._step_memory), self._inputs)

    def _capture(self) -> None:
        try:
            if self._shape.rows > MAX_ROWS:
                # A graph needs as much memory as eager steps, which the device's memory pool caches. As much again must
                # stay free.
                memory = self._device.memory()
                if memory.free - memory.cached < 2 * memory.cached:
                    raise DeviceError(f"{self._device.name}: {memory.free - memory.cached} bytes free")
            self.graph, self._result = self._device.capture(self._call)
        except DeviceError as error:
            self._refused = True
            self._on_refused(self._shape.rows, error)


def _raise_closed(step: DeviceStep, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    raise DeviceError("the model is closed")


def _padded(width: int, pages: int) -> int:
    """The padded width of a page table with `width` entries in use, of a page group of `pages` pages."""
    return max(width, min(pages, _MIN_WIDTH << max(0, -(-width // _MIN_WIDTH) - 1).bit_length()))
