"""A shard in this process."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError, DeviceError
from luce.gguf.reader import GGUFFile
from luce.layers.attention import AttentionLayer
from luce.layers.build import LayerBuilder
from luce.layers.decoder_layer import PreNormDecoderLayer, Residual, SandwichDecoderLayer
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.state import DeltaState, KVPool
from luce.models.spec import Attention, ModelSpec
from luce.ops.embedding import take_rows
from luce.ops.features import capture
from luce.ops.kvtype import AUTO, KVTypes
from luce.ops.matmul import FEW_ROWS
from luce.ops.sample import argmax, find_candidates, top_k_keys, unpack_candidates
from luce.runtime.device import Array, Device, Event
from luce.runtime.step import PAGE, DeviceStep, Int32, Output, Span, SpanArrays, Step, StepShape, branches_of
from luce.shard.graphs import GraphRunner
from luce.shard.page_ranking import PageRanker
from luce.shard.saved_state import HostSavedState, Piece, SavedState
from luce.shard.shard import Activation, Captured, Pending, ShardInfo
from luce.shard.sizes import mirrored, state_bytes

# Rows of a short prompt and of a long one, as far as kernels differ between them.
_PROMPT_ROWS = (64, 512)

#: saved tensors share pieces of host memory of so many bytes, and begin at multiples of the second number there
_LANDING, _ALIGNED = 16 << 20, 256
_NOTHING: NDArray[np.generic] = np.empty(0, np.uint8)


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
        verify: int = 0,
        spare: int = 0,
        pieces: bool = False,
        on_layer: Callable[[], None] = lambda: None,
        on_captured: Captured = lambda step, outputs: None,
        places: Callable[[Step], Sequence[NDArray[Any]] | None] = lambda step: None,
    ) -> None:
        """`verify`: most rows of a speculative span. `spare`: bytes in which matrices may be kept unpacked. `pieces`:
        whether long steps come in pieces, while other GPUs of this process work on others. `on_layer` is called when
        a layer is read, `on_captured` by the last shard where layers are captured. `places`: host memory for the ids,
        the logits and, if there are any, the keys of the candidates of a step, which its output is in then; None: new
        arrays.
        """
        self.device = device
        self._places = places
        self._out, self._in = device.copy_stream(), device.copy_stream()
        #: host memory that copies still read or write
        self._copied: deque[tuple[Event, object]] = deque()
        builder = LayerBuilder(file, spec, layers, device, pages=pages, slots=slots, kv=kv, verify=verify)
        self._ranker = PageRanker(device)
        self._replayer = GraphRunner(device, self._run, pages, long=pieces)
        self._embedding = builder.embedding() if layers.start == 0 else None
        self._mirrors = {donor: builder.mirror(donor) for donor in mirrored(spec, layers)}
        self._blocks: dict[int, PreNormDecoderLayer | SandwichDecoderLayer] = {}
        for index in layers:
            block = self._blocks[index] = builder.layer(index)
            if isinstance(block.mixer, AttentionLayer) and spec.ranks(index):
                self._ranker.add(block.mixer)
            on_layer()
        self._per_layer = builder.per_layer() if spec.per_layer else None
        self._borrowing = {index for index in layers if spec.donor(index) is not None}
        self._head = builder.head() if layers.stop == len(spec.layers) else None
        sizes = state_bytes(device, spec, layers, kv, verify)
        held = slots * sizes.slot + sum(n * size for n, size in zip(pages, sizes.page, strict=True))
        self._groups = {index: spec.group_of(index) for index in (*self._mirrors, *layers)}
        self._taken, self._lent = spec.lent(layers.start), spec.lent(layers.stop)
        self._captured, self._on_captured = spec.captured, on_captured
        self._before = sum(layer < layers.start for layer in spec.captured)

        def warm_up() -> None:
            builder.weights.store_fp16(spare)
            self._rehearse(spec, slots)

        device.warm_up(warm_up)
        unpacked = builder.weights.store_fp16(spare)
        self.info = ShardInfo(str(device.name), layers, builder.weights.nbytes, held, unpacked)
        device.synchronize()

    apart = False

    @property
    def reuses(self) -> bool:
        return self._replayer.reuses

    @property
    def parts(self) -> tuple[ShardInfo, ...]:
        return (self.info,)

    def lost(self) -> str:
        return ""

    def down(self) -> str:
        return ""

    def announce(self, step: Step, handed: Activation | None) -> None:
        pass

    def forward(self, step: Step, handed: Activation | None) -> Activation | Pending:
        if handed is None and self._embedding is None:
            raise BackendError(f"shard {self.info.layers} on {self.info.device}: no activation was handed over")
        left = self._replayer.run(step, handed or ())
        if self._head is None:
            return left
        # The output is waited for: it is copied before what else there is to do.
        output = self._output(step, left)
        if self._captured:
            self._on_captured(step, [rows.view(np.uint16) for rows in left[-len(self._captured) :]])
        return output

    def _output(self, step: Step, left: Sequence[Array]) -> Pending:
        if not len(step.output_rows):
            return lambda: Output(np.empty(0, np.int32), np.empty((0, 0), np.float32))
        ids, logits, *_ = left
        arrays = [ids, self._picked(logits, step.needs_logits)]
        if step.needs_candidates is not None and step.needs_candidates.any():
            arrays.append(top_k_keys(self.device, self._picked(logits, step.needs_candidates)))
        return self._fetched(arrays, self._places(step))

    def _fetched(self, arrays: Sequence[Array], places: Sequence[NDArray[Any]] | None = None) -> Pending:
        """What is returned of ids, logits and candidates' keys, whose copies to the host are queued here."""
        into: Sequence[NDArray[Any] | None] = (None,) * len(arrays) if places is None else places
        ids, logits, *top = [self.device.fetch(array, place) for array, place in zip(arrays, into, strict=True)]
        return lambda: Output(ids(), logits(), unpack_candidates(*(part() for part in top)) if top else None)

    def embed(self, tokens: Int32) -> Array:
        if self._embedding is None:
            raise BackendError(f"{self.info.device}: only the first shard embeds, this one has layers {self._shown}")
        return self._embedding.rows(self.device.upload(tokens))

    def project(
        self, hidden: Array, *, top: int = 0, logits: bool = False, scale: float = 0.0, softcap: float = 0.0
    ) -> Pending:
        if self._head is None:
            raise BackendError(f"{self.info.device}: only the last shard projects, this one has layers {self._shown}")
        device = self.device
        rows = self._head.project(device.upload(hidden) if isinstance(hidden, np.ndarray) else hidden)
        found, whole = find_candidates(device, rows, top, scale, softcap), device.fetch(rows if logits else rows[:0])

        def wait() -> Output:
            ids, best = found()
            return Output(ids, whole(), best)

        return wait

    @property
    def _shown(self) -> str:
        return f"{self.info.layers.start}..{self.info.layers.stop - 1}"

    def _picked(self, logits: Array, rows: NDArray[np.bool_]) -> Array:
        if rows.all():
            return logits
        if not rows.any():
            return logits[:0]
        return take_rows(self.device, logits, self.device.upload(np.flatnonzero(rows).astype(np.int32)))

    def _run(self, step: DeviceStep, handed: Activation) -> tuple[Array, ...]:
        """Queue a step's work: what is handed on, or (ids, logits) of the wanted rows if there are any, and what was
        captured."""
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
        lent, captured = others[len(embeddings) :][: len(self._taken)], others[len(embeddings) + len(self._taken) :]
        step.lent.update(zip(self._taken, lent, strict=True))
        for mirror in self._mirrors.values():
            mirror(step)
        for index, block in self._blocks.items():
            block(stream, step)
            if index in self._captured:
                output = self.device.empty((step.rows, stream.x.shape[1]), np.uint16)
                capture(self.device, stream.x, stream.delta, output)
                captured.append(output.view(np.float32))
        if self._head is None:
            return (stream.settle(), *embeddings, *(step.lent[donor] for donor in self._lent), *captured)
        if not step.shape.output_rows:
            return tuple(captured)
        logits = self._head(stream, step)
        return argmax(self.device, logits), logits, *captured

    def _rehearse(self, spec: ModelSpec, slots: int) -> None:
        """Run prompts, and the next row of one to all sequences."""
        mixers = [spec.layers[donor].mixer for donor in self._taken]
        widths = [spec.hidden] * (2 if spec.per_layer else 1)
        widths += [2 * mixer.kv_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, Attention)]
        widths += [spec.hidden // 2] * self._before
        tables, seen = (1,) * len(spec.page_groups), (False,) * len(spec.page_groups)
        shapes = [StepShape(n, 1, n, 1, tables, seen) for n in _PROMPT_ROWS]
        shapes += [StepShape(n, n, 1, n, tables, seen) for n in range(1, min(slots, FEW_ROWS) + 1)]
        for shape in shapes:
            handed = () if self._embedding is not None else tuple(self.device.empty((shape.rows, w)) for w in widths)
            self._run(DeviceStep(self.device, shape, self.device.empty(shape.size, np.int32)), handed)

    @property
    def replayed(self) -> int:
        """Steps that ran by replaying a captured graph."""
        return self._replayer.replayed

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        upload, path = self.device.upload, tuple(rows)
        table, pending = np.array([[slot, 0, 0, 1]], np.int32), np.array([[len(path), 0]], np.int32)
        branches = None
        if path != tuple(range(len(path))):
            branches = upload(branches_of([Span(slot, 0, 0, 1, len(path), path=path)]))
        spans = SpanArrays(upload(table), upload(np.empty(0, np.int32)), 1, 0, upload(pending), branches)
        for block in self._blocks.values():
            if isinstance(block.mixer, DeltaNetLayer):
                block.mixer.accept(spans)

    def seal(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        self._ranker.seal(slot, entries, pages)

    def unseal(self, slot: int) -> None:
        self._ranker.unseal(slot)

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        return self._ranker.rank(slot, position, entries)

    def attended(self, slot: int, end: int, rows: int) -> NDArray[np.float32]:
        """What the slot's last `rows` rows, at most NEWEST_QUERIES, attend to: float32 [rows, end].

        For each of the sequence's `end` keys, which lie in pages 0, 1, ... of the pools, the largest share that a head
        of a layer that ranks gives to it.
        """
        return self._ranker.attended(slot, end, rows)

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> HostSavedState:
        states = list(self._states(slot, pages))
        saved = self._staging([(state.shape, state.array.dtype) for state in states])
        self._out.wait_for(self.device.record())
        for state, into in zip(states, saved, strict=True):
            for here, there in state.runs:
                self._out.copy(into[there], state.array[here])
        copied = self._out.record()
        self._hold(copied, saved)
        if not held:
            self.device.wait_for(copied)
        return HostSavedState(
            {state.name: into for state, into in zip(states, saved, strict=True)},
            copied,
            frozenset(state.name for state in states if state.paged),
            frozenset(state.name for state in states if state.layer in self._mirrors),
        )

    def restore(self, slot: int | None, pages: Sequence[Sequence[int]], kept: SavedState, first: int = 0) -> None:
        assert isinstance(kept, HostSavedState)
        # The copies out may still run; they are on another stream.
        self._in.wait_for(kept.copied)
        found = []
        for state in self._states(slot, pages):
            begin = first * PAGE if state.paged else 0
            given = kept.tensors.get(state.name, _NOTHING)[begin : begin + state.shape[0]]
            if given.shape != state.shape:
                raise BackendError(f"{self.info.device}: {state.name} was saved as {given.shape}, not {state.shape}")
            found.append((state, given))
        self._take_in(found)

    def fill(self, piece: Piece) -> None:
        found = []
        for state in self._states(piece.slot, piece.pages):
            if state.layer not in piece.layers:
                continue
            given = piece.tensors.get(state.name)
            if given is not None and given.dtype.kind == state.array.dtype.kind == "f":
                # The device that it was saved on may keep other floats than this one.
                given = given.astype(state.array.dtype, copy=False)
            if given is None or given.shape != state.shape or given.dtype != state.array.dtype:
                raise BackendError(
                    f"{self.info.device}: cannot restore tensor {state.name}: missing, or another shape or type"
                )
            found.append((state, np.ascontiguousarray(given)))
        self._take_in(found)

    def close(self) -> None:
        with contextlib.suppress(DeviceError):
            # Host memory must not go while copies use it.
            for copied, _ in self._copied:
                copied.wait()
        self._replayer.close()
        self._ranker.close()
        self._embedding = self._head = self._per_layer = None
        self._mirrors, self._blocks = {}, {}
        self._copied.clear()

    def _take_in(self, found: Sequence[tuple[_State, NDArray[np.generic]]]) -> None:
        """Copy to the device behind the work that is queued; work that is queued from now on comes after it."""
        self._in.wait_for(self.device.record())
        for state, given in found:
            for here, there in state.runs:
                self._in.copy(state.array[here], given[there])
        done = self._in.record()
        self.device.wait_for(done)
        self._hold(done, found)

    def _hold(self, copied: Event, memory: object) -> None:
        self._copied.append((copied, memory))
        while self._copied and self._copied[0][0].done():
            self._copied.popleft()

    def _staging(self, kinds: Sequence[tuple[tuple[int, ...], np.dtype[np.generic]]]) -> list[NDArray[np.generic]]:
        """Arrays of these shapes and dtypes in host memory, pinned if the system has so much of it."""
        arrays: list[NDArray[np.generic]] = []
        sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for shape, dtype in kinds]
        memory, at = np.empty(0, np.uint8), 0
        for index, ((shape, dtype), size) in enumerate(zip(kinds, sizes, strict=True)):
            if at + size > len(memory):
                memory, at = self.device.staging_buffer(_together(sizes[index:])), 0
            end = at + math.prod(shape) * dtype.itemsize
            arrays.append(memory[at:end].view(dtype).reshape(shape))
            at += size
        return arrays

    def _states(self, slot: int | None, pages: Sequence[Sequence[int]]) -> Iterator[_State]:
        own = {index: block.mixer for index, block in self._blocks.items() if index not in self._borrowing}
        runs = [tuple(_runs(group)) for group in pages]
        for index, layer in (self._mirrors | own).items():
            group, state = self._groups[index], layer.state
            if isinstance(state, DeltaState) and slot is not None:
                for name, array in (("memory", state.memory), ("past", state.past)):
                    yield _State(index, f"blk.{index}.{name}", array, array.shape[1:], ((slot, ...),), paged=False)
            elif isinstance(state, KVPool) and group is not None and pages[group]:
                rows = len(pages[group]) * PAGE
                for name, array in (("k", state.k), ("v", state.v)):
                    shape = (rows, *array.shape[1:])
                    yield _State(index, f"blk.{index}.{name}", array, shape, runs[group], paged=True)


@dataclass(frozen=True)
class _State:
    """One of a sequence's states: `shape` of it lies in `array`, by `runs` of (there, in what is saved)."""

    layer: int
    name: str
    array: Array
    shape: tuple[int, ...]
    runs: tuple[tuple[Any, Any], ...]
    paged: bool


def _together(sizes: Sequence[int]) -> int:
    """Bytes of the first arrays that share a piece of host memory: at least one."""
    total = 0
    for size in sizes:
        if total and total + size > _LANDING:
            break
        total += size
    return total


def _runs(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """(rows of the pool, rows of what is saved) of pages that lie side by side."""
    begin = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            first = pages[begin] * PAGE
            yield slice(first, first + (end - begin) * PAGE), slice(begin * PAGE, end * PAGE)
            begin = end
