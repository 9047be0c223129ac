"""A shard in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError, DeviceError
from luce.gguf.reader import GGUFFile
from luce.layers.attention import AttentionLayer
from luce.layers.build import AnyDecoderLayer, LayerBuilder
from luce.layers.decoder_layer import DecoderLayer, Embedding, Head, Residual
from luce.layers.deltanet import DeltaNetLayer
from luce.layers.latent_attention import LatentAttentionLayer
from luce.layers.state import DeltaState, KVPool, StateOptions
from luce.models.spec import ModelSpec
from luce.ops import half_products
from luce.ops.draw import draw_tokens, with_drawn
from luce.ops.embedding import take_rows
from luce.ops.features import capture
from luce.ops.matmul import FEW_ROWS, MANY_ROWS
from luce.ops.sample import argmax, find_candidates, top_k_keys, unpack_candidates
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import (
    MAX_CANDIDATES,
    DeviceStep,
    Int32,
    Output,
    PendingMasks,
    Span,
    SpanArrays,
    Step,
    StepShape,
    branches_of,
)
from luce.shard.device_masks import DeviceMasks
from luce.shard.graphs import MAX_ROWS, GraphRunner
from luce.shard.local_state import LocalState
from luce.shard.page_ranking import PageRanker
from luce.shard.shard import Activation, DeferredOutput, DeviceInfo, Pending, ShardInfo, ShardResult
from luce.shard.shard_options import NO_HOOKS, DeviceLayers, ShardHooks, ShardOptions
from luce.shard.sizes import activation_widths, mirrored, state_bytes
from luce.shard.warm_up import layers_of_each_kind, step_shapes


class LocalShard:
    """See luce.shard.shard.Shard. The first of a model's shards has the token table, the last one has the head."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        own: DeviceLayers,
        options: ShardOptions,
        pages: Sequence[int],
        hooks: ShardHooks = NO_HOOKS,
        *,
        long_graphs: bool = False,
    ) -> None:
        """Read the layers `own` from a file.

        `pages`: pages of each page group. `long_graphs`: whether long steps of one span run as CUDA graphs too; for
        processes that drive several GPUs.
        """
        layers, device = own.layers, own.device
        device.reserve(own.planned_bytes)
        self.device = device
        self._hooks = hooks
        states = StateOptions(pages, options.slots, options.kv, options.verify_rows, options.rank_pages)
        int8 = options.prompt_precision == "int8"
        if int8 and not device.int8_gemm:
            raise DeviceError(
                f"{device.name}: --prompt-precision int8: it has no library for such products; fp16 works everywhere"
            )
        builder = LayerBuilder(file, spec, layers, device, states, own.offload, own.pool, int8=int8)
        self._graphs = GraphRunner(device, self._run, pages, long=long_graphs)
        self._embedding = builder.embedding() if layers.start == 0 else None
        self._streams = spec.streams
        self._split = builder.split() if layers.start == 0 and spec.streams > 1 else None
        self._mirrors = {donor: builder.mirror(donor) for donor in mirrored(spec, layers)}
        self._layers: dict[int, AnyDecoderLayer] = {}
        for index in layers:
            self._layers[index] = builder.layer(index)
            hooks.on_layer()
        self._per_layer = builder.per_layer() if spec.per_layer else None
        self._head = builder.head() if layers.stop == len(spec.layers) else None
        self._replies_invariant = builder.weights.invariant_rows > FEW_ROWS
        self._masks = DeviceMasks(device)
        self._captured = options.captured
        self._borrowed, self._lent = spec.lent(layers.start), spec.lent(layers.stop)
        pools: dict[int, KVPool | DeltaState] = {index: mirror.state for index, mirror in self._mirrors.items()}
        pools |= {index: each.mixer.state for index, each in self._layers.items() if spec.donor(index) is None}
        self.state = LocalState(device, pools, self._mirrors.keys(), {index: spec.group_of(index) for index in pools})
        mixers = [each.mixer for index, each in self._layers.items() if options.ranks(spec, index)]
        self.ranking = PageRanker(
            device, [mixer for mixer in mixers if isinstance(mixer, AttentionLayer | LatentAttentionLayer)]
        )
        self.ends = LocalEnds(device, layers, self._embedding, self._head)
        widths = activation_widths(spec, layers.start, options.captured)

        def warm_up() -> None:
            builder.weights.store_copies(own.unpack_bytes)
            half_products.expect(device, self._half_weights())
            chosen = layers_of_each_kind(file, spec, own, options, builder.weights)
            self._warm_up(step_shapes(len(spec.page_groups), options), chosen, widths)

        device.warm_up(warm_up)
        unpacked = builder.weights.store_copies(own.unpack_bytes)
        half_products.measure(device, self._half_weights())
        held = state_bytes(device, spec, layers, options).total(pages, options.slots)
        self.info = ShardInfo((_device_info(own, builder, held, unpacked),))
        device.synchronize()

    def _half_weights(self) -> list[Weight]:
        """The weights whose products layers may read as halves."""
        layers = [layer for layer in self._layers.values() if isinstance(layer, DecoderLayer)]
        return [weight for layer in layers for weight in layer.half_weights()]

    remote = False

    def lost(self) -> str:
        return ""

    def down(self) -> str:
        return ""

    def announce(self, step: Step, activation: Activation | None) -> None:
        return None

    def stage(self, step: Step) -> None:
        self._graphs.stage(step)

    def forward(self, step: Step, activation: Activation | None) -> ShardResult:
        if activation is None and self._embedding is None:
            raise BackendError(f"shard {self.info.layers} on {self.info.device}: the activation is missing")
        result = self._graphs.run(step, activation or ())
        if self._head is None:
            return result
        # The caller waits for the output, so its copies precede the work on features.
        queue = partial(self._output, step, result)
        output = DeferredOutput(queue) if step.masks_deferred else queue(step.masks)
        if self._captured:
            self._hooks.on_captured(step, [rows.view(np.uint16) for rows in result[-len(self._captured) :]])
        return output

    def _output(self, step: Step, result: Sequence[Array], masks: PendingMasks | None) -> Pending:
        if not len(step.output_rows):
            return lambda: Output(np.empty(0, np.int32), np.empty((0, 0), np.float32))
        ids, logits, *_ = result
        arrays = {"ids": ids, "logits": self._select(logits, step.needs_logits)}
        if masks is not None:
            # The layers are queued: the device works while masks are still being made.
            made = masks.wait()
            if len(made.rows):
                self._masks.apply(logits, made)
                arrays["ids"] = argmax(self.device, logits)
        if step.needs_candidates is not None and step.needs_candidates.any():
            arrays["candidates"] = top_k_keys(self.device, self._select(logits, step.needs_candidates))
        if step.draws is not None:
            keys = top_k_keys(self.device, self._select(logits, step.draws.drawn))
            arrays["drawn"] = draw_tokens(self.device, keys, step.draws, step.next_positions, arrays["ids"])
        places: Sequence[NDArray[Any] | None] = self._hooks.output_memory(step) or (None,) * len(arrays)
        named = zip(arrays.items(), places, strict=True)
        fetched = {name: self.device.fetch(array, place) for (name, array), place in named}
        return QueuedOutput(**fetched, draws=step.draws)

    def _select(self, logits: Array, rows: NDArray[np.bool_]) -> Array:
        if rows.all():
            return logits
        if not rows.any():
            return logits[:0]
        return take_rows(self.device, logits, self.device.upload(np.flatnonzero(rows).astype(np.int32)))

    def _run(self, step: DeviceStep, activation: Activation, layers: Sequence[int] | None = None) -> tuple[Array, ...]:
        """Queue the work on a step. Short prompts in it, and rows of replies, have the bits that each has alone."""
        shape = step.shape
        # Where some products of replies have other bits in company anyway, the others gain nothing by being slower.
        invariant = shape.shortest > FEW_ROWS or self._replies_invariant
        self.device.batch_invariant = invariant and shape.longest <= MANY_ROWS
        try:
            return self._queue(step, activation, layers)
        finally:
            self.device.batch_invariant = False

    def _queue(self, step: DeviceStep, activation: Activation, layers: Sequence[int] | None) -> tuple[Array, ...]:
        """Queue the work on a step, of all layers or of some. The last shard returns ids and logits of the output rows,
        if there are any, and the captured features; the others return the activation for the next shard."""
        if self._embedding is not None:
            activation = embedded = (self._embedding(step),)
            if self._split is not None:
                activation += (self._split.split(*embedded),)
            if self._per_layer is not None:
                # The layers change the stream; the next shard needs the embeddings as well.
                activation += embedded if self._head is not None else (self._embedding(step),)
        x, *others = activation
        stream = Residual(self.device, x, beside=others.pop(0) if self._streams > 1 else None)
        embeddings = others[:1] if self._per_layer is not None else []
        if self._per_layer is not None:
            stream.inputs = self._per_layer(embeddings[0], step)
        lent, captured = (
            others[len(embeddings) :][: len(self._borrowed)],
            others[len(embeddings) + len(self._borrowed) :],
        )
        step.lent.update(zip(self._borrowed, lent, strict=True))
        for mirror in self._mirrors.values():
            mirror(step)
        for index in self._layers if layers is None else layers:
            self._layers[index](stream, step)
            if index in self._captured:
                output = self.device.empty((step.rows, stream.x.shape[1]), np.uint16)
                capture(self.device, stream.x, stream.pending(), output)
                captured.append(output.view(np.float32))
        if self._head is None:
            copies = () if stream.beside is None else (stream.beside,)
            return (stream.settle(), *copies, *embeddings, *(step.lent[donor] for donor in self._lent), *captured)
        if not step.shape.output_rows:
            return tuple(captured)
        logits = self._head(stream, step)
        return argmax(self.device, logits), logits, *captured

    def _warm_up(self, shapes: Sequence[StepShape], layers: Sequence[int], widths: Sequence[int]) -> None:
        """Run steps through some layers. `widths`: columns of the first activation."""
        for shape in shapes:
            activation = (
                () if self._embedding is not None else tuple(self.device.empty((shape.rows, w)) for w in widths)
            )
            result = self._run(
                DeviceStep(self.device, shape, self.device.empty(shape.size, np.int32)), activation, layers
            )
        if self._head is not None:
            ids, logits, *_ = result
            self._masks.warm_up(logits)
            keys, draws = top_k_keys(self.device, logits[:1]), RowDraws.of([Draw(0, 1.0, MAX_CANDIDATES)])
            draw_tokens(self.device, keys, draws, np.zeros(1, np.int32), ids[:1])

    @property
    def replayed(self) -> int:
        """Steps that ran by replaying a captured graph."""
        return self._graphs.replayed

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        upload, path = self.device.upload, tuple(rows)
        table, pending = np.array([[slot, 0, 0, 1]], np.int32), np.array([[len(path), 0]], np.int32)
        branches = None
        if path != tuple(range(len(path))):
            branches = upload(branches_of([Span(slot, 0, 0, 1, len(path), path=path)]))
        spans = SpanArrays(upload(table), upload(np.empty(0, np.int32)), 1, 0, upload(pending), branches)
        for layer in self._layers.values():
            if isinstance(layer.mixer, DeltaNetLayer):
                layer.mixer.accept(spans)

    def close(self) -> None:
        self.state.close()
        self._graphs.close()
        self._masks.close()
        self.ranking.close()
        self.ends.close()
        self._embedding = self._head = self._per_layer = self._split = None
        self._mirrors, self._layers = {}, {}


def _device_info(own: DeviceLayers, builder: LayerBuilder, held: int, unpacked: int) -> DeviceInfo:
    """`held`: bytes of states. `unpacked`: bytes of unpacked matrices."""
    device, weights = own.device, builder.weights
    part = DeviceInfo(str(device.name), own.layers, weights.nbytes, held, unpacked)
    if builder.offloaded is not None:
        return replace(part, offloaded=own.offloaded, offloaded_bytes=builder.offloaded.nbytes)
    # Steps with drafts of more rows run launch by launch. A CPU takes as long for each row of prompts: eight of 100
    # tokens ended together and no sooner (135M, 2 cores).
    return replace(part, invariant_rows=min(MAX_ROWS, weights.invariant_rows), shares_prompts=not device.host)


@dataclass(frozen=True)
class QueuedOutput:
    """The output of a step that the device may still compute. A call waits for it."""

    ids: Callable[[], NDArray[Any]]
    logits: Callable[[], NDArray[Any]]
    #: the keys of candidates, if there are any
    candidates: Callable[[], NDArray[Any]] | None = None
    #: what was drawn, and for which rows, if any were
    drawn: Callable[[], NDArray[Any]] | None = None
    draws: RowDraws | None = None

    def __call__(self) -> Output:
        found = None if self.candidates is None else unpack_candidates(self.candidates())
        ids = self.ids()
        if self.draws is not None and self.drawn is not None:
            ids = with_drawn(ids, self.draws, self.drawn())
        return Output(ids, self.logits(), found)


class LocalEnds:
    """See luce.shard.shard.ShardEnds. Only the first shard has `embedding`, and only the last one `head`."""

    def __init__(self, device: Device, layers: range, embedding: Embedding | None, head: Head | None) -> None:
        self.device = device
        self._layers = f"{layers.start}..{layers.stop - 1}"
        self.embedding = embedding
        self._head = head

    def embed(self, tokens: Int32) -> Array:
        if self.embedding is None:
            raise BackendError(f"{self.device.name}: only the first shard embeds, this one has layers {self._layers}")
        return self.embedding.rows(self.device.upload(tokens))

    def project(
        self, hidden: Array, *, top: int = 0, logits: bool = False, scale: float = 0.0, softcap: float = 0.0
    ) -> Pending:
        if self._head is None:
            raise BackendError(f"{self.device.name}: only the last shard projects, this one has layers {self._layers}")
        device = self.device
        rows = self._head.project(device.upload(hidden) if isinstance(hidden, np.ndarray) else hidden)
        found, whole = find_candidates(device, rows, top, scale, softcap), device.fetch(rows if logits else rows[:0])

        def wait() -> Output:
            ids, best = found()
            return Output(ids, whole(), best)

        return wait

    def close(self) -> None:
        """Release the weights. Idempotent."""
        self.embedding = self._head = None
