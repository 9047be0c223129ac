"""Which pages of a text matter to its end: a small model reads the text, and its attention tells.

As PFlash scores prompts (speculative prefill, arXiv 2502.02789; Luce-Org/lucebox). The text is read in segments, each
with the text's last tokens behind it, so time grows with the text's length alone, memory not at all, and no key is far
from the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luce.errors import ModelError
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.runtime.device import Device
from luce.runtime.step import PAGE, Int32, PageView, Span, Step
from luce.shard.local import LocalShard

#: most tokens of a segment without what is put behind it, and how many these are
_SEGMENT, _TAIL = 2048, 64
# Rows that ask, tokens over which their attention is smoothed, rows of a step.
_QUERIES, _SMOOTHED, _PIECE = 8, 13, 512

#: Gets a text's tokens, and returns those that another vocabulary has for it, with the number of the token in which the
#: middle of each lies.
Retokenizer = Callable[[Int32], tuple[Int32, NDArray[np.int64]]]


class Scorer:
    """A model on a device, which scores the pages of texts. `bridge`: to its tokens, if texts have others.

    Raises ModelError if it attends to nothing, or was made for texts shorter than the end of one.
    """

    def __init__(self, file: GGUFFile, spec: ModelSpec, device: Device, bridge: Retokenizer | None = None) -> None:
        self._bridge = bridge
        self._segment = min(_SEGMENT, spec.context_length - _TAIL)
        spec = replace(spec, ranked=True)
        layers = range(len(spec.layers))
        if self._segment < _TAIL or not any(map(spec.ranks, layers)):
            raise ModelError(f"{file.paths[0]}: cannot score pages: no full attention, or too short a context")
        self._pages = -(-(self._segment + _TAIL) // PAGE)
        self._groups = len(spec.page_groups)
        self._shard = LocalShard(file, spec, layers, device, pages=[self._pages] * self._groups, slots=1)

    def __call__(self, tokens: Int32) -> NDArray[np.float32]:
        """int32 [n] -> float32 [n // PAGE]: the mean attention to a full page's tokens, of the head that gives most."""
        count = len(tokens) // PAGE
        own, places = (tokens, np.arange(len(tokens))) if self._bridge is None else self._bridge(tokens)
        if not count or not len(own):
            return np.zeros(count, np.float32)
        pages = places // PAGE
        sums = np.bincount(pages, self._attention(own), minlength=count + 1)[:count]
        # Pages without text are of no interest.
        return (sums / np.maximum(1, np.bincount(pages, minlength=count + 1)[:count])).astype(np.float32)

    def close(self) -> None:
        """Idempotent."""
        self._shard.close()

    def _attention(self, tokens: Int32) -> NDArray[np.float64]:
        """float64 [n]: what the last rows give to each token, smoothed."""
        # Of one size, as what a segment's tokens get depends on how many share it.
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

    def _read(self, tokens: Int32) -> NDArray[np.float64]:
        """float64 [n]: what the last rows give to each token, by the head that gives most; the mean over the rows."""
        for begin in range(0, len(tokens), _PIECE):
            rows = tokens[begin : begin + _PIECE]
            entries = np.arange(-(-(begin + len(rows)) // PAGE), dtype=np.int32)[None]
            # Page i of each pool holds page i of the text, so a row lies at its own position.
            place = np.arange(begin, begin + len(rows), dtype=np.int32)
            view = PageView(entries, entries * PAGE, np.array([entries.size], np.int32), place)
            views = (view,) * self._groups
            self._shard.forward(Step.of_spans([Span(0, 0, len(rows), begin)], rows, views), None)
        rows_that_ask = min(_QUERIES, len(tokens))
        mean: NDArray[np.float64] = self._shard.attended(0, len(tokens), rows_that_ask).mean(axis=0, dtype=np.float64)
        return mean
