"""Drafting by the target's own layer for multi-token prediction, which Qwen3.5 and Qwen3.6 files contain.

Row t of the layer reads the target's hidden state of position t, after the last norm, and the embedding of the token at
t + 1; it predicts the token at t + 2. Further tokens come one at a time, from the layer's own state and the token
before (DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from luce.backend.model_work import layer_work
from luce.draft.context import CONTEXT_CHUNK, WARM_UP_ROWS, Context, PageRing, of_few_sizes
from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.draft.feature_drafter import FeatureDrafter
from luce.draft.feature_window import SlotPositions, as_table
from luce.draft.probabilities import draft_one_by_one
from luce.draft.target_head import TargetHead
from luce.errors import UnsupportedError
from luce.gguf.reader import GGUFFile, TensorInfo
from luce.layers.attention import AttentionLayer
from luce.layers.build import LayerBuilder
from luce.layers.decoder_layer import DecoderLayer, Residual
from luce.layers.features import FeatureRing
from luce.layers.state import KVPool, StateOptions
from luce.layers.tensors import placed_bytes, shard_tensors
from luce.models.spec import Attention, ModelSpec
from luce.ops.activation import add
from luce.ops.embedding import embed
from luce.ops.matmul import matmul
from luce.ops.norm import rms_norm
from luce.planner.problem import LayerWork
from luce.runtime.device import Array, Device
from luce.runtime.step import DeviceStep, Int32, Output
from luce.shard.graphs import GraphRunner
from luce.shard.shard_options import ShardOptions

#: most tokens of a proposal: each takes a pass of the head
MTP_BLOCK = 4


def captured(spec: ModelSpec) -> tuple[int, ...]:
    """The layers whose output an MTPModel reads: the last one."""
    return (len(spec.layers) - 1,)


def mtp_bytes(file: GGUFFile, spec: ModelSpec, device: Device, *, slots: int, context: int) -> tuple[int, int]:
    """Bytes of an MTPModel's weights and context."""
    own = f"blk.{len(spec.layers)}."
    infos = [info for name, info in file.tensors.items() if name.startswith(own) or name == "output_norm.weight"]
    like = next(layer.mixer for layer in reversed(spec.layers) if isinstance(layer.mixer, Attention))
    return placed_bytes(infos, device), slots * PageRing(context, CONTEXT_CHUNK).pages * KVPool.page_bytes(device, like)


def mtp_layer(file: GGUFFile, spec: ModelSpec, device: Device) -> tuple[LayerWork, tuple[TensorInfo, ...]]:
    """An MTPModel's layer for predictions, and its weights."""
    whole, index = _with_layer(spec), len(spec.layers)
    names = shard_tensors(file, whole, range(index, index + 1), layers_only=True)
    return layer_work(file, whole, device, ShardOptions(1), index), tuple(file.tensors[name] for name in sorted(names))


def _with_layer(spec: ModelSpec) -> ModelSpec:
    """The model with the layer behind its last one, which is like the last one with attention: leading layers may
    differ from it."""
    like = next(layer for layer in reversed(spec.layers) if isinstance(layer.mixer, Attention))
    return replace(spec, layers=(*spec.layers, like))


class MTPModel:
    """The layer for multi-token prediction on a device, for `slots` sequences. It sees the last `context` positions of
    each, or somewhat more.

    `rows` uint16 [n, hidden], bfloat16: the target's hidden states before its last norm (luce.layers.features). Raises
    UnsupportedError if the file has no such layer, or naming the tensor that is missing.
    """

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, device: Device, *, slots: int, context: int, rows: Array
    ) -> None:
        # Leading layers may differ from the one behind the last.
        like = next((layer for layer in reversed(spec.layers) if isinstance(layer.mixer, Attention)), None)
        if not spec.skipped_layers or like is None:
            raise UnsupportedError(f"{file.paths[0]}: has no layer for multi-token prediction")
        if isinstance(like.mixer, Attention) and like.mixer.latent is not None:
            raise UnsupportedError(f"{file.paths[0]}: multi-token prediction by latent attention is not supported")
        self.device = device
        self._eps, hidden, index = spec.norm_eps, spec.hidden, len(spec.layers)
        self.context = Context([PageRing(context, CONTEXT_CHUNK)], slots)
        builder = LayerBuilder(
            file, _with_layer(spec), range(index, index + 1), device, StateOptions(self.context.pages, slots)
        )
        weights, name = builder.weights, f"blk.{index}.nextn."
        self._mix = weights.matrix([f"{name}eh_proj.weight"], 2 * hidden, [hidden])
        self._token_norm = weights.vector(f"{name}enorm.weight", hidden)
        self._state_norm = weights.vector(f"{name}hnorm.weight", hidden)
        self._target_norm = weights.vector("output_norm.weight", hidden)
        own = f"{name}shared_head_norm.weight"
        self._head_norm = weights.vector(own if own in file.tensors else "output_norm.weight", hidden)
        layer = builder.layer(index)
        assert isinstance(layer, DecoderLayer)
        assert layer.mixer_norm is not None
        self._layer, self._mixer_norm = layer, layer.mixer_norm
        self._captured = as_table(rows)
        #: bytes of the weights, and of the context, on the device
        self.weights = weights.nbytes
        pool = layer.mixer.state
        self.state = pool.nbytes if isinstance(pool, KVPool) else 0
        self._appending = GraphRunner(device, self._append, self.context.pages)
        self._predicting = GraphRunner(device, self._predict, self.context.pages)
        device.warm_up(lambda: self.warm_up(hidden))
        device.synchronize()

    def warm_up(self, hidden: int) -> None:
        """Launch the kernels of later steps on zeros."""
        device = self.device
        for rows in (*WARM_UP_ROWS, CONTEXT_CHUNK):
            x = self._mixed(*(device.zeros((rows, hidden)) for _ in range(2)))
            self._append(self.context.empty(device, rows, 1, rows, 1, attends=False), (x,))
        for rows in (rows for rows in WARM_UP_ROWS if rows <= self.context.slots):
            x = self._mixed(*(device.zeros((rows, hidden)) for _ in range(2)))
            self._predict(self.context.empty(device, rows, rows, 1, rows, attends=True), (x,))

    def states(self, ring_rows: Int32) -> Array:
        """The target's hidden states in rows of the ring, after its last norm: int32 [n] -> float32 [n, hidden]."""
        rows = embed(self.device, self._captured, self.device.upload(ring_rows))
        return rms_norm(self.device, rows, self._target_norm, self._eps)

    def append_context(self, slots: Sequence[int], counts: Sequence[int], tokens: Array, states: Array) -> None:
        """Append rows to the contexts of slots: `states` float32 [n, hidden], n >= sum(counts), as of_few_sizes
        repeats rows, and `tokens` of the same shape, the embeddings of the tokens one position later."""
        step = self.context.append_step(slots, counts, np.zeros(len(states), np.int32))
        self._appending.run(step, (self._mixed(tokens, states),))
        self.context.commit(slots, counts)

    def predict(self, slots: Sequence[int], tokens: Array, states: Array, *, behind: int = 0) -> Array:
        """One row of each slot, `behind` rows behind its context: its state, float32 [len(slots), hidden], which the
        head takes as it is and the next row reads. It is valid until the device runs the next step."""
        counts = [1] * len(slots)
        output_rows = np.arange(len(slots), dtype=np.int32)
        step = self.context.step(slots, counts, _none(counts), output_rows, behind=behind)
        (result,) = self._predicting.run(step, (self._mixed(tokens, states),))
        return result

    def close(self) -> None:
        """Release weights and context. Idempotent."""
        self._appending.close()
        self._predicting.close()

    def _append(self, step: DeviceStep, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        y = self._mixer_norm(self.device, inputs[0])
        assert isinstance(self._layer.mixer, AttentionLayer)
        self._layer.mixer.write_context(y, step)
        return ()

    def _predict(self, step: DeviceStep, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        stream = Residual(self.device, inputs[0])
        self._layer(stream, step)
        return (rms_norm(self.device, stream.settle(), self._head_norm, self._eps),)

    def _mixed(self, tokens: Array, states: Array) -> Array:
        device, (rows, hidden) = self.device, tokens.shape
        both = device.zeros((rows, 2 * hidden))
        add(device, both[:, :hidden], rms_norm(device, tokens, self._token_norm, self._eps))
        add(device, both[:, hidden:], rms_norm(device, states, self._state_norm, self._eps))
        return matmul(device, both, self._mix)


class MTPDrafter(FeatureDrafter):
    """Proposes by an MTPModel that reads `ring`."""

    def __init__(self, model: MTPModel, ring: FeatureRing, head: TargetHead) -> None:
        # The row of a position has read the token one position later.
        super().__init__(model, ring, head, kind="mtp", block=MTP_BLOCK, lookahead=1)
        self._model = model
        self._capture_few(lambda parts: self._append(parts, np.zeros(len(parts[0].positions), np.int32)))

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        ready = [one for one in asked if self._ready(one)]
        drafted = dict(zip((one.slot for one in ready), self._draft(ready), strict=True)) if ready else {}
        return lambda: [drafted.get(one.slot, Proposal()) for one in asked]

    def _draft(self, asked: Sequence[Draftable]) -> list[Proposal]:
        model, slots = self._model, [one.slot for one in asked]
        texts = {one.slot: one.tokens for one in asked}
        # The target has computed all rows before the seed.
        last = [len(one.tokens) - 2 for one in asked]
        for parts in self._missing(slots, last):
            self._append(parts, np.concatenate([texts[part.slot][part.positions + 1] for part in parts]))
        states = model.states(
            self.window.ring_rows(
                [SlotPositions(slot, np.array([end], np.int32)) for slot, end in zip(slots, last, strict=True)]
            )
        )

        def run(depth: int, tokens: Int32) -> Output:
            nonlocal states
            states = model.predict(slots, self._head.embed(tokens), states, behind=depth)
            return self._head.project(states)()

        proposals = draft_one_by_one(asked, self.block, run)
        # The first row read only committed tokens and the target's own state.
        model.context.commit(slots, [1] * len(slots))
        return proposals

    def _append(self, parts: Sequence[SlotPositions], tokens: Int32) -> None:
        """`tokens` int32 [n]: those one position behind the parts' positions."""
        states = self._model.states(of_few_sizes(self.window.ring_rows(parts)))
        embedded, counts = self._head.embed(of_few_sizes(tokens)), [len(part.positions) for part in parts]
        self._model.append_context([part.slot for part in parts], counts, embedded, states)


def _none(counts: Sequence[int]) -> Int32:
    return np.zeros(sum(counts), np.int32)
