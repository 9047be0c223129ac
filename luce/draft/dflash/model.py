"""A DFlash draft on one device: its layers, its context, and the forward that computes a block.

The keys and values of a committed position never change: they are computed once, from the feature that the target's
captured rows are fused to, and cached (luce.draft.context). Rows of a block write theirs behind these, where the next
context rows overwrite them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luce.backend.model_work import layer_work
from luce.draft.context import CONTEXT_CHUNK, WARM_UP_ROWS, Context, PageRing, of_few_sizes
from luce.draft.dflash.correction import DOMINO, DSPARK, MULTIPLIED, Correction, open_correction
from luce.draft.dflash.spec import FINAL_NORM, FUSION, FUSION_NORM, MASK_EMBEDDING, DFlashSpec, capture_norm, stored
from luce.draft.feature_window import as_table
from luce.errors import UnsupportedError
from luce.gguf.reader import GGUFFile, TensorInfo
from luce.layers.attention import AttentionLayer
from luce.layers.build import LayerBuilder
from luce.layers.decoder_layer import DecoderLayer, Embedding, Residual
from luce.layers.rotary import Rotary
from luce.layers.state import KVPool, StateOptions
from luce.layers.tensors import placed_bytes
from luce.models.keys import Source
from luce.models.spec import Attention
from luce.ops.activation import scale
from luce.ops.embedding import embed, take_rows
from luce.ops.matmul import int8_group, matmul
from luce.ops.norm import head_rms_norm, rms_norm
from luce.ops.quantise import Quantised, quantise
from luce.planner.problem import LayerWork
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep, Int32
from luce.shard.graphs import GraphRunner
from luce.shard.shard_options import ShardOptions


class DFlashModel:
    """Weights and context of a draft for `slots` sequences, which see at most the last `context` positions, or up to 63
    more in layers without a window.

    `rows` uint16 (bfloat16) or float32 [n, captures * hidden] on the device: the captured rows, those of a position
    side by side, layers ascending (luce.layers.features). `mask` float32 [hidden]: the input of the rows behind the
    seed, unless the draft has its own. `embedding`: the target's, if it is on the device; without it seeds come
    embedded.

    Raises UnsupportedError naming the tensor that is missing, of another shape or unknown.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: DFlashSpec,
        device: Device,
        *,
        slots: int,
        context: int,
        rows: Array,
        mask: NDArray[np.float32],
        embedding: Embedding | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        model, hidden = spec.model, spec.hidden
        source = Source(spec.path, file.metadata, file.tensors)
        self.context = Context(_rings(spec, context), slots)
        pages = self.context.pages
        builder = LayerBuilder(file, model, range(len(spec.layers)), device, StateOptions(pages, slots))
        weights = builder.weights
        self._fusion = weights.matrix([stored(source, FUSION)], spec.count * hidden, [hidden])
        self._fusion_norm = weights.vector(stored(source, FUSION_NORM), hidden)
        norms = range(spec.count if spec.capture_norms else 0)
        self._capture_norms = [weights.vector(capture_norm(source, index), hidden) for index in norms]
        self._norm = weights.vector(FINAL_NORM, hidden)
        # Row 0 is the mask, the others are seeds.
        self._inputs = device.zeros((1 + slots, hidden))
        own = weights.vector(MASK_EMBEDDING, hidden) if spec.mask_embedding else device.upload(mask)
        device.copy(self._inputs[0], own)
        self._embedding = embedding
        #: by the number of texts, which of `_inputs` the rows of their blocks begin with
        self._places: dict[int, Array] = {}
        self._layers: list[DecoderLayer] = []
        for index in range(len(spec.layers)):
            layer = builder.layer(index)
            assert isinstance(layer, DecoderLayer)
            self._layers.append(layer)
        #: None also if the file has a head that is switched off
        self.correction: Correction | None = None
        if spec.correction is not None:
            self.correction = open_correction(file, spec.correction, hidden, weights, device)
        unknown = sorted(_needed(file, spec).keys() - weights.used)
        if unknown:
            raise UnsupportedError(f"{spec.path}: tensor {unknown[0]} is unknown: the draft may need it")
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, Attention)
        self._context_rotary = None
        if spec.context_base is not None:
            assert mixer.rope is not None
            self._context_rotary = Rotary(device, replace(mixer.rope, base=spec.context_base), None)
        self._captured = as_table(rows)
        #: bytes of the weights, and of the context, on the device
        self.weights = weights.nbytes
        pools = [layer.mixer.state for layer in self._layers]
        self.state = sum(pool.nbytes for pool in pools if isinstance(pool, KVPool))
        self._appending = GraphRunner(device, self._append, pages)
        self._drafting = GraphRunner(device, self._draft, pages)
        device.warm_up(self.warm_up)
        device.synchronize()

    def warm_up(self) -> None:
        """Launch the kernels of later steps on zeros."""
        block = self.spec.block
        for rows in (*WARM_UP_ROWS, CONTEXT_CHUNK):
            self._append(self.context.empty(self.device, rows, 1, rows, 1, attends=False), ())
        for count in range(1, min(self.context.slots, 2) + 1):
            step = self.context.empty(self.device, count * block, count, block, count * (block - 1), attends=True)
            self._draft(step, ())

    def append_context(self, slots: Sequence[int], counts: Sequence[int], rows: Int32) -> None:
        """Append the target's captured rows of their next positions to the contexts of slots.

        rows int32 [sum(counts)], at most CONTEXT_CHUNK: where the captured rows are found, counts[i] of them for
        slots[i].
        """
        self._appending.run(self.context.append_step(slots, counts, of_few_sizes(rows)), ())
        self.context.commit(slots, counts)

    def draft_block(self, slots: Sequence[int], seeds: Array) -> Array:
        """Compute a block of each slot behind its context.

        `seeds`: the tokens that the blocks begin with, int32 [len(slots)] on the host; where this does not embed, the
        target's embeddings of them, float32 [len(slots), hidden] on the device -> float32 [len(slots) * (block - 1),
        hidden]: the rows behind the seeds, inputs of the target's head, valid until the device runs the next step.
        """
        block, texts = self.spec.block, len(slots)
        tokens = np.zeros(block * texts, np.int32)
        if self.embeds:
            tokens[:texts] = seeds
        else:
            self.device.copy(self._inputs[1 : 1 + texts], seeds)
        step = self.context.step(slots, [block] * texts, tokens, _output_rows(block, texts))
        (result,) = self._drafting.run(step, ())
        return result

    @property
    def embeds(self) -> bool:
        """Whether `draft_block` takes tokens: their embedding is one of its step's launches then, and they reach the
        device with the step."""
        return self._embedding is not None

    def close(self) -> None:
        """Release weights and context. Idempotent."""
        self._appending.close()
        self._drafting.close()
        self._layers, self._embedding = [], None

    def fuse(self, rows: Array) -> Array:
        """One feature for each position: float32 [n, captures * hidden], overwritten -> float32 [n, hidden]."""
        device, spec = self.device, self.spec
        slices = rows.reshape(len(rows), spec.count, 1, spec.hidden)
        for index, weight in enumerate(self._capture_norms):
            head_rms_norm(device, slices[:, index], weight, spec.norm_eps)
        return rms_norm(device, matmul(device, rows, self._fusion), self._fusion_norm, spec.norm_eps)

    def _append(self, step: DeviceStep, _: tuple[Array, ...]) -> tuple[Array, ...]:
        """Fuse captured rows, and write every layer's keys and values of them."""
        device, spec = self.device, self.spec
        features = self.fuse(embed(device, self._captured, step.tokens))
        whole: Array | Quantised = features
        group = 0 if spec.context_norm else int8_group(device, len(features), self._layers[0].mixer.input_weight)
        if group:
            whole = quantise(device, features, group)
        for layer in self._layers:
            assert isinstance(layer.mixer, AttentionLayer)
            assert layer.mixer_norm is not None
            y = layer.mixer_norm(device, features) if spec.context_norm else whole
            layer.mixer.write_context(y, step, self._context_rotary)
        return ()

    def _draft(self, step: DeviceStep, _: tuple[Array, ...]) -> tuple[Array, ...]:
        device, spec = self.device, self.spec
        texts = step.shape.spans
        if self._embedding is not None:
            # The first `texts` tokens are the seeds; the others mean nothing.
            self._embedding.rows(step.tokens[:texts], self._inputs[1 : 1 + texts])
        if texts not in self._places:
            # No step is captured before one of its shape has run.
            self._places[texts] = device.upload(_input_places(spec.block, texts))
        stream = Residual(device, take_rows(device, self._inputs, self._places[texts]))
        if spec.embedding_scale != 1:
            scale(device, stream.x, spec.embedding_scale)
        for layer in self._layers:
            layer(stream, step)
        return (rms_norm(device, take_rows(device, stream.settle(), step.output_rows), self._norm, spec.norm_eps),)


def draft_bytes(file: GGUFFile, spec: DFlashSpec, device: Device, *, slots: int, context: int) -> tuple[int, int]:
    """Bytes of a DFlashModel's weights and context."""
    model = spec.model
    pages = {
        group.window: slots * ring.pages for group, ring in zip(model.page_groups, _rings(spec, context), strict=True)
    }
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    state = sum(pages[mixer.window] * KVPool.page_bytes(device, mixer) for mixer in mixers)
    placed = [info for name, info in _needed(file, spec).items() if not _of_head(name) or name in MULTIPLIED]
    return placed_bytes(placed, device), state


def draft_layers(file: GGUFFile, spec: DFlashSpec, device: Device) -> tuple[LayerWork, ...]:
    """A DFlashModel's layers for predictions; that of a correction head comes last."""
    layers = [layer_work(file, spec.model, device, ShardOptions(1), layer) for layer in range(len(spec.layers))]
    head = [info for name, info in _needed(file, spec).items() if _of_head(name) and name in MULTIPLIED]
    if head:
        macs = sum(info.rows * info.cols for info in head)
        layers.append(LayerWork(placed_bytes(head, device), macs, len(head), kv=0, attention=0))
    return tuple(layers)


def _input_places(block: int, texts: int) -> Int32:
    """The inputs of the blocks' rows: 0 for the mask, 1 + text for its seed."""
    places = np.arange(block * texts, dtype=np.int32)
    return np.where(places % block == 0, places // block + 1, 0).astype(np.int32)


@functools.lru_cache
def _output_rows(block: int, texts: int) -> Int32:
    """The rows of the blocks behind the seeds. Shared; never written to."""
    places = np.arange(block * texts, dtype=np.int32)
    return places[places % block > 0]


def _needed(file: GGUFFile, spec: DFlashSpec) -> Mapping[str, TensorInfo]:
    """The file's tensors without those of a correction head that is switched off."""
    if spec.correction is not None:
        return file.tensors
    return {name: info for name, info in file.tensors.items() if not _of_head(name)}


def _of_head(name: str) -> bool:
    return name.startswith((DOMINO, DSPARK, "selector_"))


def _rings(spec: DFlashSpec, context: int) -> list[PageRing]:
    """Of each page group."""
    return [_ring(spec, group.window, context) for group in spec.model.page_groups]


def _ring(spec: DFlashSpec, window: int | None, context: int) -> PageRing:
    mixers = [layer.mixer for layer in spec.layers]
    (both,) = {m.bidirectional for m in mixers if isinstance(m, Attention) and m.window == window}
    return PageRing(context if window is None else min(window, context), max(CONTEXT_CHUNK, spec.block), both)
