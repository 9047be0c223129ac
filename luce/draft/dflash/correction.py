"""Correction heads of drafts: they make the token of each position of a block depend on the token before it, as the
draft's forward cannot.

Position by position a head adds a bias to a row's logits, and the next bias depends on the token that is then
likeliest. Only the candidates of each row are corrected: a bias does not lift a token from far below them to the first
place.

    Domino   h <- GRU(embedding of the token before, h);  bias = W2 silu(W1 [z ; h] + b1) + b2
    DSpark   bias = w2 w1[token before];  P(likeliest is right) = sigmoid(weight . [z (; w1[token before])] + bias)
    selector bias = S (A[token before] * W z), for the K likeliest tokens alone, which keep their mass (DFlash2)

z is the draft's row, the input of the target's head. The GRU's gates are in PyTorch's order: reset, update, new.
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
from luce.runtime.step import MAX_CANDIDATES, Int32

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

DOMINO, DSPARK = "dflash.domino.", "dflash.dspark."
#: tensors of the selector: W [R, hidden], A and S [vocab, R]
SELECTOR_HIDDEN, SELECTOR_BEFORE, SELECTOR_NEXT = (
    f"selector_{name}.weight" for name in ("hidden", "predecessor", "successor")
)
#: tensors on the draft's device; of the others a few rows are looked up, on the host
MULTIPLIED = frozenset({f"{DOMINO}gru.weight_ih", f"{DOMINO}gru.weight_hh", f"{DOMINO}head.w1", SELECTOR_HIDDEN})

#: rows of the target's embedding for int32 [n]: float32 [n, hidden] on the draft's device
Embed = Callable[[Int32], Array]
#: luce.draft.coupled_draws.Draws.choose
Choose = Callable[[int, Int32, F64], tuple[NDArray[np.intp], F64]]


@dataclass(frozen=True)
class CorrectionSpec:
    """A head as data."""

    #: domino, dspark or selector
    kind: str
    #: size of the vocabulary
    vocab: int
    #: width of Domino's GRU state, or the rank of DSpark or the selector
    width: int
    #: rows of Domino's W1
    inner: int = 0
    #: columns of DSpark's confidence matrix, 0 for none
    confidence: int = 0
    #: candidates of a row
    top: int = MAX_CANDIDATES


class Correction(Protocol):
    """A head; its state is float32 [texts, n] on the host."""

    #: candidates of a row
    top: int
    #: the candidates together keep their probability; otherwise the other tokens keep theirs before all are normed
    keeps_mass: bool

    def read(self, rows: Array) -> Array:
        """What `step` reads of the rows z, all of them at once, on the draft's device: float32 [n, hidden] -> float32
        [n, width]."""

    def lattice(self, seed: int, z: F32, ids: Int32) -> F32 | None:
        """The biases of each position's candidates behind each candidate of the position before, or behind the seed at
        position 0: z float32 [positions, width], ids int32 [positions, k] -> float32 [positions, k, k], the candidate
        before first. None if a bias depends on more than the token before.
        """

    def begin(self, texts: int) -> F32:
        """The state before the first position."""

    def step(self, state: F32, before: Int32, z: F32, ids: Int32, embedded: Embed) -> tuple[F32, F32, F32 | None]:
        """One position of several texts, with the tokens before it.

        before int32 [texts], z float32 [texts, width] as of `read`, ids int32 [texts, k] -> the next state, the biases
        of `ids` float32 [texts, k], and the probability that the likeliest token is right, float32 [texts], if the head
        computes it.
        """


def open_correction(
    file: GGUFFile, spec: CorrectionSpec, hidden: int, weights: WeightLoader, device: Device
) -> Correction:
    """The head in a draft's file. `weights` takes the matrices that rows are multiplied with to the draft's device.
    Raises UnsupportedError naming the tensor that is missing or of another shape."""
    tables = WeightLoader(file, HostDevice())
    kinds: dict[str, type[_Domino | _DSpark | _Selector]] = {
        "domino": _Domino,
        "dspark": _DSpark,
        "selector": _Selector,
    }
    head = kinds[spec.kind](spec, hidden, weights, tables, device)
    weights.used |= tables.used
    return head


def corrected(
    head: Correction,
    seeds: Int32,
    z: F32,
    ids: Int32,
    scores: F64,
    embedded: Embed,
    choose: Choose | None = None,
) -> tuple[Int32, F64, F64 | None]:
    """Blocks corrected by a head; the biases of each position depend on the likeliest tokens before it.

    seeds int32 [texts]; z float32 [texts, positions, width] as of `read`; ids int32 and scores float64 [texts,
    positions, k]: candidates and their log probabilities by the draft alone -> both corrected, the likeliest first, the
    lower id first among equals, and the probability that the likeliest is right, float64 [texts, positions], if the
    head computes it. What `choose` takes instead comes first.
    """
    ids, scores, confidence = ids.copy(), scores.copy(), np.ones(ids.shape[:2])
    before, state, own_confidence = seeds, head.begin(len(seeds)), None
    for position in range(ids.shape[1]):
        own = ids[:, position]
        state, bias, own_confidence = head.step(state, before, z[:, position], own, embedded)
        biased = _normed(head, scores[:, position], bias)
        order = np.lexsort((own, -biased))
        ids[:, position] = np.take_along_axis(own, order, axis=1)
        scores[:, position] = np.take_along_axis(biased, order, axis=1)
        if choose is not None:
            take_first(ids, scores, slice(position, position + 1), choose)
        before = ids[:, position, 0]
        if own_confidence is not None:
            confidence[:, position] = own_confidence
    return ids, scores, None if own_confidence is None else confidence


def take_first(ids: Int32, scores: F64, positions: slice, choose: Choose) -> None:
    """Exchange the first candidates of some positions, of ids and scores [texts, positions, k], for those that are
    chosen, with the probabilities that they have then."""
    own_ids, own_scores = ids[:, positions], scores[:, positions]
    places, probabilities = choose(positions.start, own_ids, own_scores)
    for values in (own_ids, own_scores):
        chosen = np.take_along_axis(values, places[..., None], -1)
        np.put_along_axis(values, places[..., None], values[..., :1], -1)
        values[..., :1] = chosen
    with np.errstate(divide="ignore"):
        own_scores[..., 0] = np.log(probabilities)


def lattice_scores(head: Correction, seed: int, z: F32, ids: Int32, scores: F64) -> F64 | None:
    """The log probabilities of a text's candidates behind each candidate of the position before, as
    luce.draft.dflash.tree.likeliest takes them: float64 [positions, k, k]. None if the head has no such biases.

    z float32 [positions, width] as of Correction.read; ids int32 and scores float64 [positions, k].
    """
    biases = head.lattice(seed, z, ids)
    return None if biases is None else _normed(head, scores[:, None], biases)


def _normed(head: Correction, scores: F64, bias: F32) -> F64:
    """Log probabilities of candidates (last axis) with biases."""
    mass = np.exp(scores).sum(axis=-1, keepdims=True)
    biased: F64 = scores + bias
    if head.keeps_mass:
        # The largest one is taken out: edges may be larger than what exp holds.
        biased = biased - biased.max(axis=-1, keepdims=True)
        biased += np.log(mass / np.exp(biased).sum(axis=-1, keepdims=True))
        return biased
    # Tokens that are not candidates keep their probability.
    others = np.maximum(0.0, 1 - mass)
    biased -= np.log(np.exp(biased).sum(axis=-1, keepdims=True) + others)
    return biased


def _rows(table: Weight, ids: Int32) -> F32:
    """Rows of a table on the host: float32 [*ids.shape, cols]."""
    found: F32 = embed(_HOST, table, ids.reshape(-1)).reshape(*ids.shape, table.cols)
    return found


_HOST = HostDevice()


class _ReadsRows:
    """Of heads that read z as it is."""

    keeps_mass = False

    def __init__(self, spec: CorrectionSpec) -> None:
        self.top = spec.top

    def read(self, rows: Array) -> Array:
        return rows

    def lattice(self, seed: int, z: F32, ids: Int32) -> F32 | None:
        return None


class _Domino(_ReadsRows):
    def __init__(
        self, spec: CorrectionSpec, hidden: int, weights: WeightLoader, tables: WeightLoader, device: Device
    ) -> None:
        super().__init__(spec)
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
        inputs = device.download(matmul(device, embedded(before), self._input)) + self._biases[0]
        own = self._product(state, self._own) + self._biases[1]
        (reset, update, new), (own_reset, own_update, own_new) = (np.split(x, 3, axis=1) for x in (inputs, own))
        new = np.tanh(new + host_sigmoid(reset + own_reset) * own_new)
        state = new + host_sigmoid(update + own_update) * (state - new)
        inner = self._product(np.concatenate((z, state), axis=1), self._w1) + self._b1
        inner *= host_sigmoid(inner)
        return state, np.einsum("tke,te->tk", _rows(self._w2, ids), inner) + self._b2[ids], None

    def _product(self, rows: F32, weight: Weight) -> F32:
        found: F32 = self._device.download(matmul(self._device, self._device.upload(rows), weight))
        return found


class _DSpark(_ReadsRows):
    def __init__(
        self, spec: CorrectionSpec, hidden: int, weights: WeightLoader, tables: WeightLoader, device: Device
    ) -> None:
        super().__init__(spec)
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


class _Selector:
    keeps_mass = True

    def __init__(
        self, spec: CorrectionSpec, hidden: int, weights: WeightLoader, tables: WeightLoader, device: Device
    ) -> None:
        self.top = spec.top
        self._device = device
        self._hidden = weights.matrix([SELECTOR_HIDDEN], hidden, [spec.width])
        self._before, self._next = (
            tables.table(name, spec.width, spec.vocab) for name in (SELECTOR_BEFORE, SELECTOR_NEXT)
        )

    def read(self, rows: Array) -> Array:
        return matmul(self._device, rows, self._hidden)

    def lattice(self, seed: int, z: F32, ids: Int32) -> F32 | None:
        before = np.concatenate((np.full_like(ids[:1], seed), ids[:-1]))
        first = _rows(self._before, before) * z[:, None]
        return np.asarray(np.matmul(first, _rows(self._next, ids).swapaxes(1, 2)), np.float32)

    def begin(self, texts: int) -> F32:
        return np.empty((texts, 0), np.float32)

    def step(self, state: F32, before: Int32, z: F32, ids: Int32, embedded: Embed) -> tuple[F32, F32, F32 | None]:
        first = _rows(self._before, before) * z
        return state, np.einsum("tkr,tr->tk", _rows(self._next, ids), first), None
