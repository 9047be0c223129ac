"""Which tokens of a scored text are kept: chunks with the best scores, head and tail, anchors, and protected tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.compress.anchors import anchored

#: tokens of a chunk
CHUNK = 32
#: chunks of a text's beginning and end that are kept, fewer where few chunks are kept
HEAD, TAIL = 8, 24
#: a text of fewer tokens is kept whole
SHORTEST = 9
#: a keep ratio is a multiple of 1 / RATIO_UNIT: numbers of chunks are computed in integers
RATIO_UNIT = 10**9

#: most tokens by which a stretch of kept tokens grows at each end, to the best place for a cut
REACH = 8

#: begin and end of kept tokens, ascending and disjoint; adjacent ones are merged
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Keep:
    """How much of a text is kept."""

    #: in (0, 1]
    share: float
    #: whether it is a share of the sum of all scores, instead of a share of the chunks
    mass: bool = False
    #: with `mass` the most chunks, as a share of all, in (0, 1]
    most: float = 1.0


def chunks_to_keep(chunks: int, keep_ratio: float) -> int:
    """The keep ratio's share of a number of chunks, rounded down, at least one."""
    return max(1, chunks * round(keep_ratio * RATIO_UNIT) // RATIO_UNIT)


def head_and_tail(kept: int) -> tuple[int, int]:
    """Chunks of head and tail among `kept` kept chunks: the scores choose at least one, unless `kept` is 1."""
    if kept > HEAD + TAIL:
        return HEAD, TAIL
    budget = max(1, kept - 1)
    head = HEAD * budget // (HEAD + TAIL)
    return head, budget - head


def chunk_scores(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean score of each chunk's tokens; the last chunk may be short: float64 [n] -> float64 [chunks]."""
    starts = np.arange(0, len(scores), CHUNK)
    counts = np.minimum(CHUNK, len(scores) - starts)
    means: NDArray[np.float64] = np.add.reduceat(scores, starts) / counts
    return means


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt, and what may happen to them."""

    #: int32 [n]
    ids: NDArray[np.int32]
    #: bool [n]: tokens that are always kept
    protected: NDArray[np.bool_]
    #: int8 [n + 1]: how well the place before each token, and the end, suits a cut; a larger number suits better
    cut_ranks: NDArray[np.int8]
    #: bool [n]: control tokens, which say nothing about contents
    control: NDArray[np.bool_]

    @classmethod
    def plain(cls, ids: NDArray[np.int32]) -> PromptTokens:
        """Tokens of which none is protected, and that may be cut anywhere."""
        return cls(ids, np.zeros(len(ids), np.bool_), np.zeros(len(ids) + 1, np.int8), np.zeros(len(ids), np.bool_))

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, begin: int, end: int) -> PromptTokens:
        """The tokens from `begin` to `end`, of which none is protected."""
        own = slice(begin, end)
        free = np.zeros(end - begin, np.bool_)
        return PromptTokens(self.ids[own], free, self.cut_ranks[begin : end + 1], self.control[own])


class Selection:
    """The kept tokens of one prompt with scores float64 [n], for any number of chunks."""

    def __init__(self, prompt: PromptTokens, scores: NDArray[np.float64]) -> None:
        self._prompt = prompt
        self._scores = scores
        self._n = len(prompt)
        self.chunks = -(-self._n // CHUNK)
        self._anchors = anchored(prompt.ids, prompt.control, CHUNK)
        means = chunk_scores(scores) if self._n else np.empty(0)
        # Descending; among equals the lower number comes first.
        self._best = np.argsort(-means, kind="stable")
        # The sum of each chunk's scores.
        self._mass = means * np.minimum(CHUNK, self._n - CHUNK * np.arange(self.chunks))

    def count(self, keep: Keep) -> int:
        """The number of chunks for `spans`: with `mass` the smallest one whose chunks have that share of the scores, at
        most that of `most`.

        Head, tail and anchors count as well. If head and tail still grow with the number, a smaller one may do.
        """
        if not keep.mass:
            return chunks_to_keep(self.chunks, keep.share)
        wanted = keep.share * self._mass.sum()
        low, high = 1, max(1, chunks_to_keep(self.chunks, keep.most))
        while low < high:
            middle = (low + high) // 2
            covers = self._mass[self._kept(middle, anchors=True)].sum() >= wanted
            low, high = (low, middle) if covers else (middle + 1, high)
        return low

    def spans(self, count: int, *, anchors: bool = True) -> Spans:
        """The kept tokens with `count` chunks. `anchors`: anchors are kept even beyond `count` chunks."""
        if self._n < SHORTEST or count >= self.chunks:
            return ((0, self._n),) if self._n else ()
        kept = self._kept(count, anchors=anchors)
        return self._cut(np.repeat(kept, CHUNK)[: self._n] | self._prompt.protected)

    def covered(self, spans: Spans) -> float:
        """The share of the sum of all scores that the tokens in spans have; 1 without any score."""
        total = self._scores.sum()
        return float(sum(self._scores[begin:end].sum() for begin, end in spans) / total) if total else 1.0

    def _kept(self, count: int, *, anchors: bool) -> NDArray[np.bool_]:
        """Whether each chunk is kept: head, tail, anchors, and the best ones up to `count`."""
        head, tail = head_and_tail(count)
        kept = self._anchors.copy() if anchors else np.zeros(self.chunks, np.bool_)
        kept[:head] = True
        kept[self.chunks - tail :] = True
        rest = self._best[~kept[self._best]]
        kept[rest[: max(0, count - int(kept.sum()))]] = True
        return kept

    def _cut(self, kept: NDArray[np.bool_]) -> Spans:
        """The spans of kept tokens bool [n], each grown at both ends by at most REACH tokens to the best place.

        Among equal places the nearest one counts.
        """
        places = np.array(spans_of(kept), np.int64).reshape(-1, 2)
        for begin, end in zip(self._best_cuts(places[:, 0], -1), self._best_cuts(places[:, 1], 1), strict=True):
            kept[begin:end] = True
        return spans_of(kept)

    def _best_cuts(self, places: NDArray[np.int64], direction: int) -> list[int]:
        near = np.clip(places[:, None] + direction * np.arange(REACH + 1), 0, self._n)
        ranks = self._prompt.cut_ranks[near]
        # Of equal ranks argmax takes the first.
        return near[np.arange(len(places)), ranks.argmax(axis=1)].tolist()  # type: ignore[no-any-return]

    def largest(self, most: int) -> Spans:
        """The kept tokens with as many chunks as give at most `most` tokens, without anchors if these alone are more.

        If one chunk and the protected tokens are more than `most`, these are returned.
        """
        anchors = count_tokens(self.spans(1)) <= most
        low, high = 1, self.chunks
        while low < high:
            middle = (low + high + 1) // 2
            fits = count_tokens(self.spans(middle, anchors=anchors)) <= most
            low, high = (middle, high) if fits else (low, middle - 1)
        return self.spans(low, anchors=anchors)


def count_tokens(spans: Spans) -> int:
    """The number of tokens in spans."""
    return sum(end - begin for begin, end in spans)


def gather(tokens: NDArray[np.int32], spans: Spans) -> list[int]:
    """The tokens in spans, in their order."""
    return [token for begin, end in spans for token in tokens[begin:end].tolist()]


def positions_in(spans: Spans) -> NDArray[np.int32]:
    """The positions of the tokens in spans: int32 [n]."""
    return np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in spans])


def spans_of(kept: NDArray[np.bool_]) -> Spans:
    """The spans of kept tokens: bool [n]."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    return tuple((int(begin), int(end)) for begin, end in changes.reshape(-1, 2))
