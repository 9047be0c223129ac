"""A shard in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.backend.plan import state_bytes
from luce.backend.shard import ShardInfo
from luce.errors import BackendError
from luce.gguf.reader import GGUFFile
from luce.layers.block import Residual
from luce.layers.build import LayerBuilder
from luce.layers.state import DeltaState, KVPool
from luce.models.spec import ModelSpec
from luce.ops.embedding import take_rows
from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.sample import argmax
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE, DeviceStep, Output, Step


class LocalShard:
    """Layers `layers` of a file on a device; the first of the model's shards embeds, the last one has the head."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        layers: range,
        device: Device,
        *,
        pages: Sequence[int],
        slots: int,
        kv: KVTypes = AUTO,
    ) -> None:
        self.device = device
        builder = LayerBuilder(file, spec, device, pages=pages, slots=slots, kv=kv)
        self._embedding = builder.embedding() if layers.start == 0 else None
        self._blocks = {index: builder.block(index) for index in layers}
        self._per_layer = builder.per_layer() if spec.per_layer else None
        self._borrowing = {index for index in layers if spec.donor(index) is not None}
        self._head = builder.head() if layers.stop == len(spec.blocks) else None
        device.synchronize()
        sizes = state_bytes(device, spec, layers, kv)
        held = slots * sizes.slot + sum(n * size for n, size in zip(pages, sizes.page, strict=True))
        self.info = ShardInfo(str(device.name), layers, builder.weights.nbytes, held)
        self._groups = {index: spec.group_of(index) for index in layers}

    def forward(self, step: Step, hidden: Array | None) -> Array | Output:
        on_device = DeviceStep(self.device, step)
        if self._embedding is not None:
            handed = self._embedding(on_device)
            if self._per_layer is not None and self._head is None:
                twice = np.tile(np.arange(step.rows, dtype=np.int32), 2)
                handed = take_rows(self.device, handed, self.device.upload(twice))
        elif hidden is None:
            raise BackendError(f"shard {self.info.layers} on {self.info.device}: no activation was handed over")
        else:
            handed = hidden
        stream = Residual(self.device, handed[: step.rows])
        if self._per_layer is not None:
            stream.inputs = self._per_layer(handed[-step.rows :], on_device)
        for block in self._blocks.values():
            block(stream, on_device)
        if self._head is None:
            stream.settle()
            return handed
        if not len(step.wanted):
            return Output(np.empty(0, np.int32), np.empty((0, 0), np.float32))
        logits = self._head(stream, on_device)
        ids = self.device.download(argmax(self.device, logits))
        full = logits if step.full.all() else logits[np.flatnonzero(step.full)]
        return Output(ids, self.device.download(full))

    def save(self, slot: int | None, pages: Sequence[Sequence[int]]) -> dict[str, NDArray[np.generic]]:
        return {name: np.array(self.device.download(array[place])) for name, array, place in self._states(slot, pages)}

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], tensors: Mapping[str, NDArray[np.generic]]
    ) -> None:
        places = []
        for name, array, place in self._states(slot, pages):
            rows = (len(place),) if isinstance(place, np.ndarray) else ()
            given = tensors.get(name)
            if given is None or given.shape != rows + array.shape[1:] or given.dtype != array.dtype:
                raise BackendError(
                    f"{self.info.device}: cannot restore tensor {name}: missing, or another shape or type"
                )
            places.append((array, place, given))
        for array, place, given in places:
            array[place] = self.device.upload(given)

    def close(self) -> None:
        self._embedding = self._head = None
        self._blocks = {}

    def _states(
        self, slot: int | None, pages: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, Array, int | NDArray[np.int64]]]:
        """Name and array of each of a sequence's states, and where in the array's first axis it lies."""
        for index, block in self._blocks.items():
            group, state = self._groups[index], block.mixer.state
            if isinstance(state, DeltaState) and slot is not None:
                yield f"blk.{index}.memory", state.memory, slot
                yield f"blk.{index}.conv", state.conv, slot
            elif isinstance(state, KVPool) and group is not None and pages[group] and index not in self._borrowing:
                first = np.asarray(pages[group], np.int64) * PAGE
                place = (first[:, None] + np.arange(PAGE)).ravel()
                yield f"blk.{index}.k", state.k, place
                yield f"blk.{index}.v", state.v, place
