"""A shard in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.backend.plan import mirrored, state_bytes
from luce.backend.replay import Replayer
from luce.backend.shard import Activation, Pending, ShardInfo
from luce.errors import BackendError
from luce.gguf.reader import GGUFFile
from luce.layers.block import Residual
from luce.layers.build import LayerBuilder
from luce.layers.state import KVPool
from luce.models.spec import Attention, ModelSpec
from luce.ops.embedding import take_rows
from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.matmul import FEW_ROWS
from luce.ops.sample import argmax, candidates, top
from luce.runtime.device import Array, Device
from luce.runtime.step import PAGE, DeviceStep, Output, Step, StepShape

# Rows of a prompt that are enough to take the kernels of long ones.
_PROMPT_ROWS = 512


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
        builder = LayerBuilder(file, spec, layers, device, pages=pages, slots=slots, kv=kv)
        self._replayer = Replayer(device, self._run, pages)
        self._embedding = builder.embedding() if layers.start == 0 else None
        self._mirrors = {donor: builder.mirror(donor) for donor in mirrored(spec, layers)}
        self._blocks = {index: builder.block(index) for index in layers}
        self._per_layer = builder.per_layer() if spec.per_layer else None
        self._borrowing = {index for index in layers if spec.donor(index) is not None}
        self._head = builder.head() if layers.stop == len(spec.blocks) else None
        sizes = state_bytes(device, spec, layers, kv)
        held = slots * sizes.slot + sum(n * size for n, size in zip(pages, sizes.page, strict=True))
        self.info = ShardInfo(str(device.name), layers, builder.weights.nbytes, held)
        self._groups = {index: spec.group_of(index) for index in (*self._mirrors, *layers)}
        self._taken, self._lent = spec.lent(layers.start), spec.lent(layers.stop)
        device.rehearse(lambda: self._rehearse(spec, slots))
        device.synchronize()

    @property
    def parts(self) -> tuple[ShardInfo, ...]:
        return (self.info,)

    def lost(self) -> bool:
        return False

    def announce(self, step: Step) -> None:
        pass

    def forward(self, step: Step, handed: Activation | None) -> Activation | Pending:
        if handed is None and self._embedding is None:
            raise BackendError(f"shard {self.info.layers} on {self.info.device}: no activation was handed over")
        left = self._replayer.run(step, handed or ())
        if self._head is None:
            return left
        if not len(step.wanted):
            return lambda: Output(np.empty(0, np.int32), np.empty((0, 0), np.float32))
        ids, logits = left
        full = self._picked(logits, step.full)
        if step.top is None or not step.top.any():
            return lambda: Output(self.device.download(ids), self.device.download(full))
        keys = top(self.device, self._picked(logits, step.top))
        return lambda: Output(
            self.device.download(ids), self.device.download(full), candidates(self.device.download(keys))
        )

    def _picked(self, logits: Array, rows: NDArray[np.bool_]) -> Array:
        if rows.all():
            return logits
        return take_rows(self.device, logits, self.device.upload(np.flatnonzero(rows).astype(np.int32)))

    def _run(self, step: DeviceStep, handed: Activation) -> tuple[Array, ...]:
        """Queue a step's work: what is handed on, or (ids, logits) of the wanted rows if there are any."""
        if self._embedding is not None:
            handed = (self._embedding(step),)
            if self._per_layer is not None:
                # The blocks change the stream; the next shard needs the embeddings as well.
                handed += handed if self._head is not None else (self._embedding(step),)
        x, *others = handed
        stream = Residual(self.device, x)
        embeddings = others[:1] if self._per_layer is not None else []
        if self._per_layer is not None:
            stream.inputs = self._per_layer(embeddings[0], step)
        step.lent.update(zip(self._taken, others[len(embeddings) :], strict=True))
        for mirror in self._mirrors.values():
            mirror(step)
        for block in self._blocks.values():
            block(stream, step)
        if self._head is None:
            return (stream.settle(), *embeddings, *(step.lent[donor] for donor in self._lent))
        if not step.shape.wanted:
            return ()
        logits = self._head(stream, step)
        return argmax(self.device, logits), logits

    def _rehearse(self, spec: ModelSpec, slots: int) -> None:
        """Run a prompt's rows, and the next row of one to all sequences, as far as kernels differ between them."""
        mixers = [spec.blocks[donor].mixer for donor in self._taken]
        widths = [spec.hidden] * (2 if spec.per_layer else 1)
        widths += [2 * mixer.kv_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, Attention)]
        tables = (1,) * len(spec.page_groups)
        shapes = [StepShape(_PROMPT_ROWS, 1, _PROMPT_ROWS, 1, tables)]
        shapes += [StepShape(n, n, 1, n, tables) for n in range(1, min(slots, FEW_ROWS) + 1)]
        for shape in shapes:
            handed = () if self._embedding is not None else tuple(self.device.empty((shape.rows, w)) for w in widths)
            self._run(DeviceStep(self.device, shape, self.device.empty(shape.size, np.int32)), handed)

    @property
    def replayed(self) -> int:
        """Steps that ran by replaying a captured graph."""
        return self._replayer.replayed

    def save(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, NDArray[np.generic]]:
        # Indexing is work of the device that is current.
        self.device.synchronize()
        return {
            name: np.array(self.device.download(array[self._place(index, slot, pages)]))
            for index, name, array in self._states()
            if index not in self._mirrors
        }

    def restore(self, slot: int, pages: Sequence[Sequence[int]], tensors: Mapping[str, NDArray[np.generic]]) -> None:
        places = []
        for index, name, array in self._states():
            place = self._place(index, slot, pages)
            rows = (len(place),) if isinstance(place, np.ndarray) else ()
            given = tensors.get(name)
            if given is not None and index in self._mirrors and given.dtype.kind == array.dtype.kind == "f":
                # The donor's device may keep other floats than this one.
                given = given.astype(array.dtype, copy=False)
            if given is None or given.shape != rows + array.shape[1:] or given.dtype != array.dtype:
                raise BackendError(
                    f"{self.info.device}: cannot restore tensor {name}: missing, or another shape or type"
                )
            places.append((array, place, given))
        for array, place, given in places:
            array[place] = self.device.upload(given)

    def close(self) -> None:
        self._replayer.close()
        self._embedding = self._head = self._per_layer = None
        self._mirrors, self._blocks = {}, {}

    def _states(self) -> Iterator[tuple[int, str, Array]]:
        own = {index: block.mixer for index, block in self._blocks.items() if index not in self._borrowing}
        for index, layer in (self._mirrors | own).items():
            state = layer.state
            if isinstance(state, KVPool):
                yield index, f"blk.{index}.k", state.k
                yield index, f"blk.{index}.v", state.v
            else:
                yield index, f"blk.{index}.memory", state.memory
                yield index, f"blk.{index}.past", state.past

    def _place(self, index: int, slot: int, pages: Sequence[Sequence[int]]) -> int | NDArray[np.int64]:
        """Where a layer's state of a sequence lies along the first axis of its array."""
        group = self._groups[index]
        if group is None:
            return slot
        first = np.asarray(pages[group], np.int64) * PAGE
        return (first[:, None] + np.arange(PAGE)).ravel()
