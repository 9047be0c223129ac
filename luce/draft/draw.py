"""Drawing tokens with a noise that is known beforehand, so that a drafter can guess what will be drawn.

A token is drawn as the largest of log p(x) + n(seed, position, x), where n is Gumbel noise: that is a draw from p
(Gumbel, 1954; Maddison et al., "A* sampling", 2014). The noise depends on nothing else, neither on p nor on the draft.
A drafter that takes the largest of log q(x) + n draws from q, and mostly the same token where q is near p (coupled
draws; the chance is at least (1 - d) / (1 + d) with d the distance of p and q in total variation).

The bits of the noise are those of SplitMix64 (Steele et al., 2014) at a counter made of seed, position and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def gumbel(seeds: NDArray[np.uint64], positions: NDArray[np.int64], ids: NDArray[np.integer]) -> F64:
    """The noise of tokens at positions: seeds uint64, positions and ids any shapes that broadcast -> float64."""
    begin = _mixed(_mixed(seeds) + positions.astype(np.uint64) * _GOLDEN)
    bits = _mixed(begin + (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    found: F64 = -np.log(-np.log(uniform))
    return found


def keep_count(mass: F64, total: float, share: float, floor: float) -> int:
    """How many of the leading entries the cuts of Draw keep, at least one; `mass` float64 [n] descends."""
    keep = len(mass)
    if share < 1:
        keep = min(keep, int(np.searchsorted(np.cumsum(mass), share * total)) + 1)
    if floor > 0:
        keep = min(keep, int(np.count_nonzero(mass >= floor * mass[0])))
    return max(keep, 1)


@dataclass(frozen=True)
class Draw:
    """How the tokens of a reply are drawn; temperature > 0."""

    #: below 2**64
    seed: int
    temperature: float
    #: only so many tokens, the likeliest ones; 0 for all
    most: int = 0
    #: only the likeliest ones that have this share of the mass
    share: float = 1.0
    #: only those with at least this part of the likeliest one's mass
    floor: float = 0.0

    def noise(self, position: int, ids: NDArray[np.integer]) -> F64:
        """The noise of tokens int [n] at a position: float64 [n]."""
        return gumbel(np.array([self.seed], np.uint64), np.array([position]), ids)


class Draws:
    """The draws of several texts at once, of which some may be greedy (None).

    ends: where each text's next token stands.
    """

    def __init__(self, draws: Sequence[Draw | None], ends: Sequence[int]) -> None:
        found = [Draw(0, 1.0) if draw is None else draw for draw in draws]
        #: whether each text is drawn, bool [texts]
        self.drawn = np.array([draw is not None for draw in draws], np.bool_)
        self.any = bool(self.drawn.any())
        self._ends = np.array(ends, np.int64)
        self._seeds = np.array([draw.seed for draw in found], np.uint64)
        self._temperatures = np.array([draw.temperature for draw in found], np.float64)
        self._most = np.array([draw.most or 1 << 30 for draw in found], np.int64)
        self._share = np.array([draw.share for draw in found], np.float64)
        self._floor = np.array([draw.floor for draw in found], np.float64)

    def choose(self, depth: int, ids: NDArray[np.int32], scores: F64) -> tuple[NDArray[np.intp], F64]:
        """The place of each token among its candidates, and the probability that it had.

        ids int32 and scores float64 [texts, n, k]: candidates, the likeliest first, and their log probabilities, for n
        tokens from `depth` tokens behind the ends on -> [texts, n]. A greedy text takes the first ones.
        """
        logits = (scores - scores[..., :1]) / self._temperatures[:, None, None]
        with np.errstate(over="ignore"):
            mass = np.exp(logits)
        mass *= np.arange(ids.shape[-1]) < self._most[:, None, None]
        running = np.cumsum(mass, axis=-1)
        kept = (running - mass < self._share[:, None, None] * running[..., -1:]) & (mass > 0)
        kept &= mass >= self._floor[:, None, None] * mass[..., :1]
        kept[..., 0] = True
        noise = self._noise(depth, ids)
        with np.errstate(invalid="ignore"):
            places = np.where(kept, logits + noise, -np.inf).argmax(axis=-1)
        places[~self.drawn] = 0
        own = np.take_along_axis(mass, places[..., None], -1)[..., 0] / np.where(kept, mass, 0).sum(axis=-1)
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


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIERS[1]
    return bits ^ (bits >> np.uint64(31))
