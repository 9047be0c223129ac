"""Scores the tokens of a text by the attention that a small model pays them from the text's end.

PFlash scores prompts this way (speculative prefill, arXiv 2502.02789; Luce-Org/lucebox). The model reads a longer text
in segments, each with the text's last tokens behind it: the time grows linearly with the text's length, the memory does
not grow, and no position is beyond the model's context.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from luce.errors import DeviceError, ModelError
from luce.gguf.reader import GGUFFile
from luce.layers.weight_pool import WeightPool
from luce.models.spec import ModelSpec
from luce.runtime.device import Device
from luce.runtime.step import Int32
from luce.shard.layerwise import LayerwiseModel, Reading, ReadingSize, layerwise_bytes

_log = logging.getLogger(__name__)

#: tokens of a text's end that follow each segment but the last one, and most tokens of a segment
TAIL, LONGEST = 64, 1 << 18
#: how a model reads a text by default: all of it, and all layers count
READING = Reading()
#: rows of a text's end whose attention counts, and tokens of the window that smooths it
QUERIES, SMOOTHED = 8, 13


class Retokenized(NamedTuple):
    """A text in another vocabulary."""

    #: int32 [m]
    tokens: Int32
    #: int64 [m]: the first and the last of the known tokens that share text with each token
    first: NDArray[np.int64]
    last: NDArray[np.int64]


#: Takes a text's tokens; returns it in another vocabulary.
Retokenize = Callable[[Int32], Retokenized]


def no_check() -> None:
    """A `check` that ends no work."""


class Scorer(Protocol):
    """Scores the tokens of texts: TextScorer, one in a daemon, or one that several users share."""

    def __call__(
        self,
        tokens: Int32,
        *,
        segment: int = LONGEST,
        rotated: bool = False,
        check: Callable[[], None] = no_check,
    ) -> NDArray[np.float64]:
        """How much a text's end attends to each token, smoothed: int32 [n] -> float64 [n].

        With another vocabulary a token has the largest score of the model's tokens that share its text. `segment`: most
        tokens of a segment. `rotated` and `check`: as in LayerwiseModel.tail_attention. Raises LuceError, and the
        exceptions of `check`.
        """

    def close(self) -> None:
        """Idempotent."""


class TextScorer:
    """A model on a device that scores texts, one at a time. Thread-safe.

    `retokenize`: for a model with another vocabulary. `longest`: most tokens of a segment, for which memory is
    reserved. `weights`: shares the weights with others. A text for which block-sparse attention fails is read again
    with full attention. Raises ModelError if the model has no full attention or a context that is too short.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        device: Device,
        retokenize: Retokenize | None = None,
        *,
        reading: Reading = READING,
        longest: int = LONGEST,
        weights: WeightPool | None = None,
    ) -> None:
        self._retokenize = retokenize
        self._segment = segment_tokens(file, spec, longest)
        self._lock = threading.Lock()
        self._model = LayerwiseModel(file, spec, device, reading, longest=self._segment + TAIL, weights=weights)

    def __call__(
        self,
        tokens: Int32,
        *,
        segment: int = LONGEST,
        rotated: bool = False,
        check: Callable[[], None] = no_check,
    ) -> NDArray[np.float64]:
        return in_own_vocabulary(self._retokenize, tokens, lambda own: self._attention(own, segment, rotated, check))

    def close(self) -> None:
        with self._lock:
            self._model.close()

    def _attention(self, tokens: Int32, segment: int, rotated: bool, check: Callable[[], None]) -> NDArray[np.float64]:
        """The scores of tokens of the model's vocabulary."""
        if not len(tokens):
            return np.zeros(0)
        # Segments of equal size, as a token's attention depends on the number of tokens in its segment.
        longest = min(segment, self._segment)
        size = math.ceil(len(tokens) / math.ceil(len(tokens) / longest))
        scores = []
        with self._lock:
            for begin in range(0, len(tokens), size):
                end = min(begin + size, len(tokens))
                read = np.concatenate([tokens[begin:end], tokens[max(end, len(tokens) - TAIL) :]])
                attention = self._tail_attention(read, rotated, check)
                scores.append(smoothed(attention.mean(axis=0, dtype=np.float64))[: end - begin])
        return np.concatenate(scores)

    def _tail_attention(self, tokens: Int32, rotated: bool, check: Callable[[], None]) -> NDArray[np.float32]:
        model, rows = self._model, min(QUERIES, len(tokens))
        try:
            return model.tail_attention(tokens, rows, rotated=rotated, check=check)
        except DeviceError as error:
            if not model.sparse(len(tokens)):
                raise
            _log.warning("block-sparse attention failed, the text is read again with full attention: %s", error)
        return model.tail_attention(tokens, rows, rotated=rotated, check=check, dense=True)


def in_own_vocabulary(
    retokenize: Retokenize | None, tokens: Int32, scores: Callable[[Int32], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """The scores of known tokens by a function that scores those of the model's vocabulary."""
    if retokenize is None:
        return scores(tokens)
    text = retokenize(tokens)
    return spread(text, scores(text.tokens), len(tokens))


def segment_tokens(file: GGUFFile, spec: ModelSpec, longest: int = LONGEST) -> int:
    """Most tokens of a segment for a model, at most `longest`. Raises ModelError if its context is too short."""
    if spec.context_length < 2 * TAIL:
        raise ModelError(f"{file.paths[0]}: cannot score texts: its context of {spec.context_length} is too short")
    return min(longest, spec.context_length - TAIL)


def scorer_bytes(
    file: GGUFFile, spec: ModelSpec, device: Device, longest: int = LONGEST, reading: Reading = READING
) -> tuple[int, int]:
    """Bytes of a TextScorer's weights on its device, and of the rest while it reads its longest segment. Raises as
    TextScorer."""
    longest = segment_tokens(file, spec, longest) + TAIL
    return layerwise_bytes(file, spec, device, ReadingSize(longest, reading, QUERIES))


def smoothed(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over [j - 6, j + 6], over fewer tokens at both ends: float64 [n] -> float64 [n]."""
    n, reach = len(scores), SMOOTHED // 2
    window = np.ones(SMOOTHED)
    sums = np.convolve(scores, window)[reach : reach + n]
    near: NDArray[np.float64] = np.convolve(np.ones(n), window)[reach : reach + n]
    return sums / near


def spread(text: Retokenized, scores: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Scores of the `count` known tokens of a text, from those in another vocabulary: float64 [m] -> float64 [count].

    A known token has the largest score of the tokens that share its text, and 0 without text.
    """
    result = np.zeros(count)
    for further in range(int((text.last - text.first).max(initial=-1)) + 1):
        reaches = text.first + further <= text.last
        np.maximum.at(result, text.first[reaches] + further, scores[reaches])
    return result
