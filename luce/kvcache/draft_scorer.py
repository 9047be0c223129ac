"""Scores the pages of a text by the attention that a small model pays them from the text's end.

PFlash scores prompts this way (speculative prefill, arXiv 2502.02789; Luce-Org/lucebox). The model reads the text in
segments, each with the text's last tokens behind it: the time grows linearly with the text's length, the memory does
not grow, and no key is far from the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from luce.errors import ModelError
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.runtime.device import Device
from luce.runtime.step import PAGE, Int32, PageView, Span, Step
from luce.shard.local import LocalShard
from luce.shard.shard_options import DeviceLayers, ShardOptions

#: most tokens of a segment, and the last tokens of the text that follow each segment
_SEGMENT, _TAIL = 2048, 64
#: rows whose attention counts, tokens over which it is smoothed, rows in a step
_QUERIES, _SMOOTHED, _PIECE = 8, 13, 512

#: Takes a text's tokens; returns its tokens in another vocabulary, and for each the number of the original token in
#: which its middle lies.
Retokenize = Callable[[Int32], tuple[Int32, NDArray[np.int64]]]


class DraftScorer:
    """A model on a device that scores the pages of texts. `retokenize`: for a model with another vocabulary.

    Raises ModelError if the model has no full attention or a too short context.
    """

    def __init__(self, file: GGUFFile, spec: ModelSpec, device: Device, retokenize: Retokenize | None = None) -> None:
        self._retokenize = retokenize
        self._segment = min(_SEGMENT, spec.context_length - _TAIL)
        layers = range(len(spec.layers))
        if self._segment < _TAIL or not any(map(spec.owns_full_pages, layers)):
            raise ModelError(f"{file.paths[0]}: cannot score pages: no full attention, or too short a context")
        self._pages = -(-(self._segment + _TAIL) // PAGE)
        self._groups = len(spec.page_groups)
        options = ShardOptions(slots=1, rank_pages=True)
        self._shard = LocalShard(file, spec, DeviceLayers(device, layers), options, [self._pages] * self._groups)

    def __call__(self, tokens: Int32) -> NDArray[np.float32]:
        """int32 [n] -> float32 [n // PAGE]: the mean attention to the tokens of each full page, by the head with
        most."""
        count = len(tokens) // PAGE
        own, places = (tokens, np.arange(len(tokens))) if self._retokenize is None else self._retokenize(tokens)
        if not count or not len(own):
            return np.zeros(count, np.float32)
        pages = places // PAGE
        sums = np.bincount(pages, self.attention(own), minlength=count + 1)[:count]
        # A page without a token of the model scores 0.
        return (sums / np.maximum(1, np.bincount(pages, minlength=count + 1)[:count])).astype(np.float32)

    def attention(self, tokens: Int32) -> NDArray[np.float64]:
        """float64 [n]: the last rows' attention to each token, smoothed. `tokens`: int32 [n], of the model."""
        # Segments of equal size, as a token's attention depends on the number of tokens in its segment.
        size = math.ceil(len(tokens) / math.ceil(len(tokens) / self._segment))
        scores = []
        for begin in range(0, len(tokens), size):
            end = min(begin + size, len(tokens))
            tail = tokens[max(end, len(tokens) - _TAIL) :]
            attention = self._read(np.concatenate([tokens[begin:end], tail]))[: end - begin]
            window = np.ones(min(_SMOOTHED, end - begin))
            near = np.convolve(np.ones(len(attention)), window, "same")
            scores.append(np.convolve(attention, window, "same") / near)
        return np.concatenate(scores)

    def close(self) -> None:
        """Idempotent."""
        self._shard.close()

    def _read(self, tokens: Int32) -> NDArray[np.float64]:
        """float64 [n]: the last rows' attention to each token, by the head with most; the mean over these rows."""
        for begin in range(0, len(tokens), _PIECE):
            rows = tokens[begin : begin + _PIECE]
            entries = np.arange(-(-(begin + len(rows)) // PAGE), dtype=np.int32)[None]
            # Page i of each pool holds page i of the text, so a row lies at its own position.
            place = np.arange(begin, begin + len(rows), dtype=np.int32)
            view = PageView(entries, entries * PAGE, np.array([entries.size], np.int32), place)
            views = (view,) * self._groups
            self._shard.forward(Step.of_spans([Span(0, 0, len(rows), begin)], rows, views), None)
        query_rows = min(_QUERIES, len(tokens))
        mean: NDArray[np.float64] = self._shard.attended(0, len(tokens), query_rows).mean(axis=0, dtype=np.float64)
        return mean
