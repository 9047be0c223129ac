"""Saves, restores and loads pages and recurrent states of a shard of this process."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError, DeviceError
from luce.layers.state import DeltaState, KVPool
from luce.runtime.device import Array, Device, Event
from luce.runtime.step import PAGE
from luce.shard.saved_state import HostSavedState, SavedState, StatePiece

#: most bytes of a buffer that several saved tensors share
BUFFER_BYTES = 16 << 20
# A saved tensor begins at a multiple of so many bytes of its buffer.
_ALIGNMENT = 256
_MISSING: NDArray[np.generic] = np.empty(0, np.uint8)


class LocalState:
    """See luce.shard.shard.ShardState.

    `layers`: the pages or the recurrent states of each layer that has its own; `mirrors`: those of `layers` that are
    copies of an earlier shard's keys and values; `groups`: the page group of each layer, None for a recurrent one.
    """

    def __init__(
        self,
        device: Device,
        layers: Mapping[int, KVPool | DeltaState],
        mirrors: Container[int],
        groups: Mapping[int, int | None],
    ) -> None:
        self._device = device
        self.layers = layers
        self.mirrors = mirrors
        self.groups = groups
        self._out, self._in = device.copy_stream(), device.copy_stream()
        #: host memory that running copies read or write, with the events that end the copies
        self._copied: deque[tuple[Event, object]] = deque()

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> HostSavedState:
        tensors = list(self._tensors(slot, pages))
        saved = self._buffers([(tensor.shape, tensor.array.dtype) for tensor in tensors])
        self._out.wait_for(self._device.record())
        for tensor, into in zip(tensors, saved, strict=True):
            for here, there in tensor.runs:
                self._out.copy(into[there], tensor.array[here])
        copied = self._out.record()
        self._hold(copied, saved)
        if not held:
            self._device.wait_for(copied)
        return HostSavedState(
            {tensor.name: into for tensor, into in zip(tensors, saved, strict=True)},
            copied,
            frozenset(tensor.name for tensor in tensors if tensor.paged),
            frozenset(tensor.name for tensor in tensors if tensor.layer in self.mirrors),
        )

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], saved: SavedState, first: int = 0) -> None:
        assert isinstance(saved, HostSavedState)
        # The copies that save the state may still run on the other stream.
        self._in.wait_for(saved.copied)
        found = []
        for tensor in self._tensors(slot, pages):
            begin = first * PAGE if tensor.paged else 0
            values = saved.tensors.get(tensor.name, _MISSING)[begin : begin + tensor.shape[0]]
            if values.shape != tensor.shape:
                raise BackendError(
                    f"{self._device.name}: {tensor.name} was saved as {values.shape}, not {tensor.shape}"
                )
            found.append((tensor, values))
        self._copy_in(found)

    def load(self, piece: StatePiece) -> None:
        found = []
        for tensor in self._tensors(piece.slot, piece.pages):
            if tensor.layer not in piece.layers:
                continue
            values = piece.tensors.get(tensor.name)
            if values is not None and values.dtype.kind == tensor.array.dtype.kind == "f":
                # The device that saved the state may store another type of floats.
                values = values.astype(tensor.array.dtype, copy=False)
            if values is None or values.shape != tensor.shape or values.dtype != tensor.array.dtype:
                raise BackendError(
                    f"{self._device.name}: cannot restore tensor {tensor.name}: missing, or another shape or type"
                )
            found.append((tensor, np.ascontiguousarray(values)))
        self._copy_in(found)

    def close(self) -> None:
        """Wait for the copies, which need their host memory, and release the states. Idempotent."""
        with contextlib.suppress(DeviceError):
            for copied, _ in self._copied:
                copied.wait()
        self._copied.clear()
        self.layers = {}

    def _copy_in(self, found: Sequence[tuple[_Tensor, NDArray[np.generic]]]) -> None:
        """Queue copies to the device: after the work queued before, and before the work queued later."""
        self._in.wait_for(self._device.record())
        for tensor, values in found:
            for here, there in tensor.runs:
                self._in.copy(tensor.array[here], values[there])
        done = self._in.record()
        self._device.wait_for(done)
        self._hold(done, found)

    def _hold(self, copied: Event, memory: object) -> None:
        """Hold host memory until the copies that use it are done."""
        self._copied.append((copied, memory))
        while self._copied and self._copied[0][0].done():
            self._copied.popleft()

    def _buffers(self, kinds: Sequence[tuple[tuple[int, ...], np.dtype[np.generic]]]) -> list[NDArray[np.generic]]:
        """Arrays of these shapes and dtypes in host memory, which is pinned if the system allows as much."""
        arrays: list[NDArray[np.generic]] = []
        sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in kinds]
        memory, at = np.empty(0, np.uint8), 0
        for index, ((shape, dtype), size) in enumerate(zip(kinds, sizes, strict=True)):
            if at + size > len(memory):
                memory, at = self._device.staging_buffer(_buffer_size(sizes[index:])), 0
            end = at + math.prod(shape) * dtype.itemsize
            arrays.append(memory[at:end].view(dtype).reshape(shape))
            at += size
        return arrays

    def _tensors(self, slot: int | None, pages: Sequence[Sequence[int]]) -> Iterator[_Tensor]:
        runs = [tuple(_runs(group)) for group in pages]
        for layer, state in self.layers.items():
            group = self.groups[layer]
            if isinstance(state, DeltaState) and slot is not None:
                for name, array in (("memory", state.memory), ("past", state.past)):
                    yield _Tensor(layer, f"blk.{layer}.{name}", array, array.shape[1:], ((slot, ...),), paged=False)
            elif isinstance(state, KVPool) and group is not None and pages[group]:
                rows = len(pages[group]) * PAGE
                for name, array in state.parts.items():
                    shape = (rows, *array.shape[1:])
                    yield _Tensor(layer, f"blk.{layer}.{name}", array, shape, runs[group], paged=True)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a sequence's state."""

    layer: int
    name: str
    #: the keys, the values or the states of all sequences, on the device
    array: Array
    #: shape of the saved tensor
    shape: tuple[int, ...]
    #: pairs of indices: in `array`, and in the saved tensor
    runs: tuple[tuple[Any, Any], ...]
    #: whether it is made of pages
    paged: bool


def _buffer_size(sizes: Sequence[int]) -> int:
    """Bytes of the next buffer, which holds at least the first array."""
    total = 0
    for size in sizes:
        if total and total + size > BUFFER_BYTES:
            break
        total += size
    return total


def _runs(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Ranges of consecutive pages: (rows of the device's array, rows of the saved tensor)."""
    begin = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            first = pages[begin] * PAGE
            yield slice(first, first + (end - begin) * PAGE), slice(begin * PAGE, end * PAGE)
            begin = end
