"""Correction heads of drafts: what the token of one place says of the next one's, which a block is filled without.

Place after place a head adds a bias to a row's logits, and the likeliest token then is what the next bias follows from.
Of each row only the candidates are corrected: what is far below them is not what a bias puts first.

    Domino   h <- GRU(embedding of the token before, h);  bias = W2 silu(W1 [z ; h] + b1) + b2
    DSpark   bias = w2 w1[token before];  it is right with a chance of sigmoid(weight . [z (; w1[token before])] + bias)

z is the draft's row as the target's head takes it. The GRU's gates are in PyTorch's order: reset, update, new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luce.gguf.reader import GGUFFile
from luce.layers.weights import WeightLoader
from luce.ops.activation import host_sigmoid
from luce.ops.embedding import embed
from luce.ops.matmul import matmul
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device
from luce.runtime.host import HostDevice
from luce.runtime.step import Int32

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

DOMINO, DSPARK = "dflash.domino.", "dflash.dspark."
#: what goes to the draft's device; of the others few rows are looked up, on the host
MULTIPLIED = frozenset({f"{DOMINO}gru.weight_ih", f"{DOMINO}gru.weight_hh", f"{DOMINO}head.w1"})

#: rows of the target's embedding for int32 [n]: float32 [n, hidden] on the draft's device
Embed = Callable[[Int32], Array]


@dataclass(frozen=True)
class CorrectionSpec:
    """A head as data. kind: domino or dspark; vocab: tokens that it knows; width: of the GRU's state, or DSpark's rank;
    inner: rows of Domino's W1; confidence: columns of DSpark's confidence matrix, 0 for none."""

    kind: str
    vocab: int
    width: int
    inner: int = 0
    confidence: int = 0


class Correction(Protocol):
    """A head; its state is float32 [texts, n] on the host."""

    def begin(self, texts: int) -> F32:
        """The state before the first place."""

    def step(self, state: F32, before: Int32, z: F32, ids: Int32, embedded: Embed) -> tuple[F32, F32, F32 | None]:
        """A place of several texts, with the tokens before it.

        before int32 [texts], z float32 [texts, hidden], ids int32 [texts, k] -> the next state, the biases of `ids`
        float32 [texts, k], and the chance that the place is right, float32 [texts], if the head has one to tell.
        """


def open_correction(
    file: GGUFFile, spec: CorrectionSpec, hidden: int, weights: WeightLoader, device: Device
) -> Correction:
    """The head in a draft's file; matrices that rows are multiplied with go to the draft's device, by `weights`. Raises
    UnsupportedError naming the tensor that is missing or of another shape."""
    tables = WeightLoader(file, HostDevice())
    made = _Domino if spec.kind == "domino" else _DSpark
    head = made(spec, hidden, weights, tables, device)
    weights.used |= tables.used
    return head


def corrected(
    head: Correction, seeds: Int32, z: F32, ids: Int32, scores: F64, embedded: Embed
) -> tuple[Int32, F64, F64 | None]:
    """What a head makes of blocks, each place's biases following from the likeliest tokens before it.

    seeds int32 [texts]; z float32 [texts, places, hidden]; ids int32 and scores float64 [texts, places, k]: candidates
    and their log probabilities by the draft alone -> both anew, the likeliest first, and the chance that the likeliest
    is right, float64 [texts, places], if the head has one to tell.
    """
    ids, scores, right = ids.copy(), scores.copy(), np.ones(ids.shape[:2])
    before, state, sure = seeds, head.begin(len(seeds)), None
    for place in range(ids.shape[1]):
        own, mass = ids[:, place], np.exp(scores[:, place])
        state, bias, sure = head.step(state, before, z[:, place], own, embedded)
        # What is no candidate keeps its part.
        others = np.maximum(0.0, 1 - mass.sum(axis=1, keepdims=True))
        biased = scores[:, place] + bias
        biased -= np.log(np.exp(biased).sum(axis=1, keepdims=True) + others)
        order = np.argsort(-biased, axis=1, kind="stable")
        ids[:, place] = np.take_along_axis(own, order, axis=1)
        scores[:, place] = np.take_along_axis(biased, order, axis=1)
        before = ids[:, place, 0]
        if sure is not None:
            right[:, place] = sure
    return ids, scores, None if sure is None else right


def _rows(table: Weight, ids: Int32) -> F32:
    """float32, the shape of the ids and a row's behind it."""
    found: F32 = embed(_HOST, table, ids.reshape(-1)).reshape(*ids.shape, table.cols)
    return found


_HOST = HostDevice()


class _Domino:
    def __init__(
        self, spec: CorrectionSpec, hidden: int, weights: WeightLoader, tables: WeightLoader, device: Device
    ) -> None:
        width, gates = spec.width, 3 * spec.width
        self._device = device
        self._input = weights.matrix([f"{DOMINO}gru.weight_ih"], hidden, [gates])
        self._own = weights.matrix([f"{DOMINO}gru.weight_hh"], width, [gates])
        self._w1 = weights.matrix([f"{DOMINO}head.w1"], hidden + width, [spec.inner])
        self._w2 = tables.table(f"{DOMINO}head.w2", spec.inner, spec.vocab)
        self._start: F32 = tables.vector(f"{DOMINO}start", width)
        self._biases: list[F32] = [tables.vector(f"{DOMINO}gru.bias_{part}", gates) for part in ("ih", "hh")]
        self._b1: F32 = tables.vector(f"{DOMINO}head.b1", spec.inner)
        self._b2: F32 = tables.vector(f"{DOMINO}head.b2", spec.vocab)

    def begin(self, texts: int) -> F32:
        return np.repeat(self._start[None], texts, axis=0)

    def step(self, state: F32, before: Int32, z: F32, ids: Int32, embedded: Embed) -> tuple[F32, F32, F32 | None]:
        device = self._device
        given = device.download(matmul(device, embedded(before), self._input)) + self._biases[0]
        own = self._product(state, self._own) + self._biases[1]
        (reset, update, new), (own_reset, own_update, own_new) = (np.split(x, 3, axis=1) for x in (given, own))
        new = np.tanh(new + host_sigmoid(reset + own_reset) * own_new)
        state = new + host_sigmoid(update + own_update) * (state - new)
        inner = self._product(np.concatenate((z, state), axis=1), self._w1) + self._b1
        inner *= host_sigmoid(inner)
        return state, np.einsum("tke,te->tk", _rows(self._w2, ids), inner) + self._b2[ids], None

    def _product(self, rows: F32, weight: Weight) -> F32:
        found: F32 = self._device.download(matmul(self._device, self._device.upload(rows), weight))
        return found


class _DSpark:
    def __init__(
        self, spec: CorrectionSpec, hidden: int, weights: WeightLoader, tables: WeightLoader, device: Device
    ) -> None:
        self._w1, self._w2 = (tables.table(f"{DSPARK}markov.{name}", spec.width, spec.vocab) for name in ("w1", "w2"))
        self._confidence: F32 | None = None
        if spec.confidence:
            self._confidence = tables.vector(f"{DSPARK}confidence.weight", spec.confidence)
            self._bias: F32 = tables.vector(f"{DSPARK}confidence.bias", 1)

    def begin(self, texts: int) -> F32:
        return np.empty((texts, 0), np.float32)

    def step(self, state: F32, before: Int32, z: F32, ids: Int32, embedded: Embed) -> tuple[F32, F32, F32 | None]:
        first = _rows(self._w1, before)
        bias = np.einsum("tkr,tr->tk", _rows(self._w2, ids), first)
        if self._confidence is None:
            return state, bias, None
        seen = np.concatenate((z, first), axis=1)[:, : len(self._confidence)]
        return state, bias, host_sigmoid(seen @ self._confidence + self._bias)
