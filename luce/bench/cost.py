"""The bytes that a step must move and the operations that it must do. Pure: computed from a file's directory and a
spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luce.gguf.reader import GGUFFile, TensorInfo
from luce.layers.state import DeltaState, KVPool
from luce.layers.tensors import EMBEDDING, shard_tensors
from luce.models.spec import Attention, ModelSpec, ShortConv
from luce.ops.kvtype import KVTypes
from luce.ops.weight import stored_bytes
from luce.runtime.device import Device
from luce.runtime.step import PAGE


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating-point operations done; a multiply-add counts as two operations."""

    bytes: float = 0
    flops: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Rows:
    """The part of a span that its cost depends on."""

    rows: int
    #: position of the first row
    position: int


class ShardCost:
    """The cost of the layers of one shard.

    Weights count as the device holds them: in the file's types, or as float32 with `--cpu-weights float32`.
    `max_resident`: the most positions of a sequence that layers with full attention see; None for all.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        layers: range,
        device: Device,
        kv: KVTypes,
        max_resident: int | None = None,
    ) -> None:
        self._spec = spec
        self._layers = layers
        self._device = device
        self._kv = kv
        self._max_resident = max_resident or spec.context_length
        self._tensors = [file.tensors[name] for name in sorted(shard_tensors(file, spec, layers, layers_only=True))]
        head = EMBEDDING if spec.tied_head else "output.weight"
        self._head = file.tensors[head] if layers.stop == len(spec.layers) else None

    def step(self, spans: Sequence[Rows], wanted: int) -> Cost:
        """The cost of one step whose logits are wanted for `wanted` rows.

        Every weight counts once; of the experts, as many count as the rows choose on average if all experts are equally
        likely. Keys, values and recurrent states of the spans count, and the head if `wanted` is not 0. Activations and
        the few rows of the embedding do not count.
        """
        rows = sum(span.rows for span in spans)
        total = Cost()
        for tensor in self._tensors:
            total += self._weight(tensor, rows)
        if self._head is not None and wanted:
            total += Cost(self._bytes(self._head), 2 * wanted * self._head.rows * self._head.cols)
        for layer in self._layers:
            for span in spans:
                total += self._mixing(layer, span)
        return total

    def _bytes(self, tensor: TensorInfo) -> float:
        return stored_bytes(tensor) if self._device.packed else 4 * tensor.rows * tensor.cols

    def _weight(self, tensor: TensorInfo, rows: int) -> Cost:
        size, flops = self._bytes(tensor), 2.0 * tensor.rows * tensor.cols * rows
        moe = self._spec.mixture(int(tensor.name.split(".")[1]))
        if moe is not None and "_exps." in tensor.name:
            share = moe.used / moe.experts
            return Cost(size * (1 - (1 - share) ** rows), flops * share)
        return Cost(size, flops)

    def _mixing(self, layer: int, span: Rows) -> Cost:
        mixer = self._spec.layers[layer].mixer
        if isinstance(mixer, Attention):
            window = mixer.window or self._max_resident
            # Each row has a window of its own; all rows share the resident positions.
            keys = min(span.position + span.rows, window + (span.rows - 1 if mixer.window else 0))
            # Each row sees one key more than the row before, until the window is full.
            seen = int(np.minimum(np.arange(1, span.rows + 1) + span.position, window).sum())
            pages = KVPool.page_bytes(self._device, mixer, self._kv) / PAGE
            return Cost(pages * keys, 4.0 * mixer.heads * mixer.head_dim * seen)
        if isinstance(mixer, ShortConv):
            size = KVPool.page_bytes(self._device, mixer, hidden=self._spec.hidden) / PAGE
            return Cost(size * (span.rows + mixer.kernel), 2.0 * mixer.kernel * self._spec.hidden * span.rows)
        # The decay, S^T k, k u^T and S^T q: each reads the whole state.
        flops = 7.0 * mixer.value_heads * mixer.head_dim**2 * span.rows
        return Cost(2 * DeltaState.slot_bytes(mixer), flops)
