"""Drawing a draft's tokens with the noise of the target's draws (luce.ops.draw), to guess what the target will draw.

A drafter that takes the largest of log q(x) + n, with the Gumbel noise n that the target's draw from p has at the
token's position, draws from q, and mostly the same token where q is near p (coupled draws; the chance is at least
(1 - d) / (1 + d) with d the distance of p and q in total variation).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luce.ops.draw import passes_top_p_min_p, uniform
from luce.runtime.draws import Draw, RowDraws

F64 = NDArray[np.float64]


def gumbel(seeds: NDArray[np.uint64], positions: NDArray[np.int64], ids: NDArray[np.integer]) -> F64:
    """The noise of tokens at positions: seeds uint64, positions and ids any shapes that broadcast -> float64."""
    found: F64 = -np.log(-np.log(uniform(seeds, positions, ids)))
    return found


class Draws:
    """The draws of several texts at once, of which some may be greedy (None).

    ends: where each text's next token stands.
    """

    def __init__(self, draws: Sequence[Draw | None], ends: Sequence[int]) -> None:
        found = RowDraws.of(draws)
        #: whether each text is drawn, bool [texts]
        self.drawn = found.drawn
        self.any = bool(self.drawn.any())
        self._ends = np.array(ends, np.int64)
        self._seeds = found.seed
        self._temperatures = np.where(self.drawn, found.temperature, 1.0)
        self._top_k = np.where(found.top_k > 0, found.top_k, 1 << 30)
        self._top_p, self._min_p = found.top_p, found.min_p

    def choose(self, depth: int, ids: NDArray[np.int32], scores: F64) -> tuple[NDArray[np.intp], F64]:
        """The place of each token among its candidates, and the probability that it had.

        ids int32 and scores float64 [texts, n, k]: candidates, the likeliest first, and their log probabilities, for n
        tokens from `depth` tokens behind the ends on -> [texts, n]. A greedy text takes the first ones.
        """
        logits = (scores - scores[..., :1]) / self._temperatures[:, None, None]
        with np.errstate(over="ignore"):
            mass = np.exp(logits)
        mass *= np.arange(ids.shape[-1]) < self._top_k[:, None, None]
        chosen = passes_top_p_min_p(mass, self._top_p[:, None], self._min_p[:, None]) & (mass > 0)
        noise = self._noise(depth, ids)
        with np.errstate(invalid="ignore"):
            places = np.where(chosen, logits + noise, -np.inf).argmax(axis=-1)
        places[~self.drawn] = 0
        own = np.take_along_axis(mass, places[..., None], -1)[..., 0] / np.where(chosen, mass, 0).sum(axis=-1)
        return places, np.where(self.drawn[:, None], own, np.exp(scores[..., 0]))

    def perturbed(self, text: int, ids: NDArray[np.int32], scores: F64) -> F64:
        """The log probabilities that candidates are drawn, where the noise is known and the distribution is not quite.

        ids int32 [n, k], and scores float64 [n, parents, k], log probabilities behind each parent, of the tokens of a
        text from its end on -> the same shape, of the same mass. Those of a greedy text stay as they are.
        """
        if not self.drawn[text]:
            return scores
        own = slice(text, text + 1)
        noise = gumbel(self._seeds[own, None], (self._ends[text] + np.arange(len(ids)))[:, None], ids)
        found = scores / self._temperatures[text] + noise[:, None]
        result: F64 = found - _log_sum(found) + _log_sum(scores)
        return result

    def _noise(self, depth: int, ids: NDArray[np.int32]) -> F64:
        positions = self._ends[:, None] + depth + np.arange(ids.shape[1])
        return gumbel(self._seeds[:, None, None], positions[..., None], ids)


def _log_sum(scores: F64) -> F64:
    """log sum exp over the last axis, which stays."""
    top = scores.max(axis=-1, keepdims=True)
    found: F64 = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    return found
