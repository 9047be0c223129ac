"""A whole text through a model's layers, one layer at a time: only one layer's keys and values take memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from luce.errors import ModelError
from luce.gguf.reader import GGUFFile
from luce.layers.attention import AttentionLayer
from luce.layers.build import AnyDecoderLayer, LayerBuilder
from luce.layers.decoder_layer import Embedding, Residual
from luce.layers.latent_attention import LatentAttentionLayer
from luce.layers.rotary import Rotary
from luce.layers.state import DeltaState, KVPool, StateOptions
from luce.layers.tensors import tensor_bytes
from luce.layers.weight_pool import WeightPool
from luce.models.spec import Attention, GatedDeltaNet, ModelSpec, Rope
from luce.ops.block_sparse import BLOCK, BlockSparse, block_sparse_bytes, is_dense
from luce.ops.page_ranking import NEWEST_QUERIES
from luce.ops.qkv import Rotation
from luce.ops.tail_attention import TailAttention, tail_attention_bytes
from luce.runtime.device import Device
from luce.runtime.step import PAGE, DeviceStep, Int32, PageView, Span, Step


@dataclass(frozen=True)
class Reading:
    """How a model reads texts for their scores."""

    #: tokens that pass a layer together
    rows: int = 512
    #: 0, or that of luce.ops.block_sparse, by which layers with full attention read some blocks of a long text
    alpha: float = 0.0
    #: only the first `layers` layers read the text, and only the last `scored` of their layers with full attention
    #: count; 0: all
    layers: int = 0
    scored: int = 0
    #: the weights of one layer after the other come to the device while a text is read, and leave it
    parked: bool = False

    @property
    def step(self) -> int:
        """`rows`, in whole blocks if some are not read."""
        return -(-self.rows // BLOCK) * BLOCK if self.alpha else self.rows


class LayerwiseModel:
    """The layers of a model up to its last one with full attention, for texts of up to `longest` tokens.

    Layers with pages of the same form share one pool. `weights`: shares the weights with others, unless they are
    parked: then a text finds what is wrong with them. Raises ModelError if no layer that reads has full attention.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        device: Device,
        reading: Reading,
        *,
        longest: int,
        weights: WeightPool | None = None,
    ) -> None:
        layers = _read_layers(file, spec, reading)
        scored = [index for index in layers if spec.owns_full_pages(index)]
        self._scored = frozenset(scored[-reading.scored :] if reading.scored else scored)
        self._device = device
        self._alpha = reading.alpha
        self._rows = reading.step
        self._groups = len(spec.page_groups)
        self._pages = -(-longest // PAGE)
        states = StateOptions([self._pages] * self._groups, slots=1, rank_pages=True, one_layer_at_a_time=True)
        self._builder = LayerBuilder(file, spec, layers, device, states, pool=None if reading.parked else weights)
        self._indices = layers
        self._embedding = None if reading.parked and not spec.per_layer else self._builder.embedding()
        self._per_layer = self._builder.per_layer() if spec.per_layer else None
        self._layers = None if reading.parked else [self._builder.layer(index) for index in layers]
        self._split = self._builder.split() if spec.streams > 1 else None
        self._hidden, self._streams = spec.hidden, spec.streams
        device.synchronize()

    def tail_attention(
        self,
        tokens: Int32,
        rows: int,
        *,
        rotated: bool,
        check: Callable[[], None] = lambda: None,
        dense: bool = False,
    ) -> NDArray[np.float32]:
        """The attention of the last `rows` tokens, at most NEWEST_QUERIES, to each token of a text: float32 [rows, n].

        It is the largest attention weight by any head of a layer with full attention. `tokens`: int32 [n] with 0 < n <=
        `longest`. `rotated`: queries and keys as the layers use them; otherwise without their rotary embedding, whose
        decay over distance hides early text. `check` is called before each layer; an exception that it raises ends the
        work. `dense`: all blocks are read.
        """
        device, n = self._device, len(tokens)
        steps = self._steps(tokens, sparse=not dense and self.sparse(n))
        x, beside = device.empty((n, self._hidden)), device.empty((n, self._hidden * (self._streams - 1)))
        embedding: Embedding | None = self._load_embedding()
        assert embedding is not None
        for step, at in zip(steps, self._ranges(n), strict=True):
            own = x[at.start : at.stop]
            device.copy(own, embedding(step))
            if self._split is not None:
                device.copy(beside[at.start : at.stop], self._split.split(own))
        if self._per_layer is None:
            # Parked, it makes room for the layers.
            embedding = None
        attention = TailAttention(device, rows, n)
        rotations: dict[Rotary, Rotation] = {}
        for index, layer in enumerate(self._each_layer()):
            check()
            for step, at in zip(steps, self._ranges(n), strict=True):
                stream = Residual(device, x[at.start : at.stop], beside=beside[at.start : at.stop])
                if self._per_layer is not None:
                    assert embedding is not None
                    stream.inputs = self._per_layer(embedding(step), step)
                layer(stream, step)
                stream.settle()
            mixer = layer.mixer
            if not isinstance(mixer, AttentionLayer | LatentAttentionLayer) or mixer.queries is None:
                continue
            if index not in self._scored:
                continue
            newest = device.download(mixer.queries[0])[np.arange(n - rows, n) % NEWEST_QUERIES]
            rotation = None
            if mixer.rotary is not None and not rotated:
                if mixer.rotary not in rotations:
                    rotations[mixer.rotary] = self._whole_rotation(mixer.rotary, steps)
                rotation = rotations[mixer.rotary]
            attention.add(newest, mixer.state.k, mixer.scale, rotation)
        return attention.result()

    def sparse(self, length: int) -> bool:
        """Whether the layers read some blocks of a text of `length` tokens."""
        return self._alpha > 0 and not is_dense(length)

    def close(self) -> None:
        """Release weights and states. Idempotent."""
        self._layers = []
        self._embedding = self._per_layer = self._split = None

    def _load_embedding(self) -> Embedding:
        return self._embedding or self._builder.embedding()

    def _each_layer(self) -> Iterator[AnyDecoderLayer]:
        """The layers in order. Parked weights of two are on the device at most: those in use, and the next ones."""
        if self._layers is not None:
            yield from self._layers
            return
        weights = self._builder.weights
        for index in self._indices:
            # What was queued reads the weights whose memory these ones may take; what follows reads these ones.
            self._device.synchronize()
            weights.forget()
            layer = self._builder.layer(index)
            self._device.synchronize()
            weights.forget()
            yield layer

    def _ranges(self, n: int) -> list[range]:
        return [range(begin, min(begin + self._rows, n)) for begin in range(0, n, self._rows)]

    def _steps(self, tokens: Int32, *, sparse: bool) -> list[DeviceStep]:
        """The text in steps. Page i of each pool holds page i of the text, so a row lies at its own position."""
        steps = []
        for at in self._ranges(len(tokens)):
            entries = np.arange(-(-at.stop // PAGE), dtype=np.int32)[None]
            place = np.arange(at.start, at.stop, dtype=np.int32)
            view = PageView(entries, entries * PAGE, np.array([entries.size], np.int32), place)
            step = Step.of_spans([Span(0, 0, len(at), at.start)], tokens[at.start : at.stop], (view,) * self._groups)
            steps.append(DeviceStep.upload(self._device, step))
        if sparse:
            text = BlockSparse(self._device, self._alpha, len(tokens))
            for each, at in zip(steps, self._ranges(len(tokens)), strict=True):
                each.sparse = text.step(at.start, len(at))
        return steps

    def _whole_rotation(self, rotary: Rotary, steps: Sequence[DeviceStep]) -> Rotation:
        """The rotation to all positions of a text. The steps' own tables become parts of it."""
        parts = [rotary(step) for step in steps]
        table = self._device.empty((sum(step.rows for step in steps), *parts[0].table.shape[1:]))
        at = 0
        for step, part in zip(steps, parts, strict=True):
            own = table[at : at + step.rows]
            self._device.copy(own, part.table)
            step.ropes[rotary] = own
            at += step.rows
        return replace(parts[0], table=table)


@dataclass(frozen=True)
class ReadingSize:
    """What the memory of a LayerwiseModel depends on beside the model."""

    #: most tokens of a text
    longest: int
    reading: Reading
    #: rows of tail_attention
    queries: int = 8


def layerwise_bytes(file: GGUFFile, spec: ModelSpec, device: Device, size: ReadingSize) -> tuple[int, int]:
    """Bytes of a LayerwiseModel's weights, and of its states and arrays while it reads its longest text.

    The weights include a head if the model's last layer is read. Parked ones are those on the device at once. Raises
    as LayerwiseModel.
    """
    longest, reading = size.longest, size.reading
    layers = _read_layers(file, spec, reading)
    donors = {spec.donor(index) for index in range(len(spec.layers))}
    pools: dict[object, int] = {}
    tables: dict[Rope, int] = {}
    sparse: dict[object, int] = {}
    slots = scores = 0
    for index in layers:
        mixer = spec.layers[index].mixer
        if isinstance(mixer, GatedDeltaNet):
            slots += DeltaState.slot_bytes(mixer)
        elif spec.donor(index) is None:
            key = index if index in donors else KVPool.form(device, mixer, hidden=spec.hidden)
            pools[key] = KVPool.page_bytes(device, mixer, hidden=spec.hidden)
        if isinstance(mixer, Attention):
            scores = max(scores, tail_attention_bytes(size.queries, mixer.heads, longest))
            if reading.alpha and _may_be_sparse(mixer):
                each = KVPool.page_bytes(device, mixer) // PAGE
                facts = mixer.heads, each, mixer.kv_heads, mixer.head_dim
                sparse[facts] = block_sparse_bytes(longest, reading.step, *facts)
            if mixer.rope is not None:
                tables[mixer.rope] = 4 * longest * mixer.rope.dims
    states = slots + -(-longest // PAGE) * sum(pools.values())
    arrays = 4 * longest * spec.hidden * spec.streams + scores + sum(tables.values()) + sum(sparse.values())
    weights = tensor_bytes(file, spec, layers, device)
    if reading.parked:
        owned = [tensor_bytes(file, spec, range(index, index + 1), device, layers_only=True) for index in layers]
        ends, two = weights - sum(owned), max(before + own for before, own in pairwise([0, *owned]))
        # Inputs of each layer need the embedding.
        weights = ends + two if spec.per_layer else max(ends, two)
    return weights, states + arrays


def _may_be_sparse(mixer: Attention) -> bool:
    return mixer.window is None and not mixer.softcap and mixer.donor is None and mixer.latent is None


def _read_layers(file: GGUFFile, spec: ModelSpec, reading: Reading) -> range:
    """The layers up to the last one with full attention of its own. Raises ModelError if there is none."""
    count = min(len(spec.layers), reading.layers or len(spec.layers))
    last = max((index for index in range(count) if spec.owns_full_pages(index)), default=None)
    if last is None:
        which = f"of its first {count} layers none" if reading.layers else "no layer"
        raise ModelError(f"{file.paths[0]}: cannot score texts: {which} has full attention")
    return range(last + 1)
