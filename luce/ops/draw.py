"""Drawing tokens with a noise that is known beforehand, so that the place where a token is drawn changes nothing, and
drafters can guess it.

A token is drawn as the largest of p(x) / e(seed, position, x), where e = -log(uniform) is exponential noise: that is a
draw from p (an exponential race), and the same token as the largest of log p(x) + n with Gumbel noise n = -log e
(Gumbel, 1954; Maddison et al., "A* sampling", 2014). The bits of the uniform numbers are those of SplitMix64 (Steele et
al., 2014) at a counter made of seed, position and token.

Of the operations here IEEE 754 fixes each result (+ - * / floor in float64, in this order), as in kernels/draw.cu. The
exp and log of libraries differ in the last bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from luce.ops.sample import unpack_candidates
from luce.runtime.device import Array, Device
from luce.runtime.draws import RowDraws
from luce.runtime.step import MAX_CANDIDATES, Int32

F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
# The constants of kernels/draw.cu: log 2 as a number of 32 bits, whose products with small integers are exact, and the
# rest; and the least logarithm of a mass, for exp of which no noise makes up.
_LN2_HIGH, _LN2_LOW = np.array(0.6931471803691238), np.array(1.9082149292705877e-10)
_LOG2_E, _HALF, _ONE, _LEAST = np.array(1 / math.log(2)), np.array(0.5), np.array(1.0), np.array(-700.0)
# Of float64: the bits of sqrt(1 / 2), from where exponents are counted; those of the exponent; the exponent of 1; and
# how many bits lie behind it.
_ROOT = np.array(math.sqrt(0.5)).view(np.int64)
_EXPONENT, _BIAS, _BITS = np.array(-1 << 52), np.array(1023), np.array(52)
# The coefficients of two series, the highest first: of exp, and of log, whose first two are 0. What they leave out is
# below 1e-11.
_SERIES = np.array([[1 / math.factorial(9 - k), 1 / (19 - 2 * k) if k > 1 else 0] for k in range(10)])[..., None, None]


def draw_tokens(device: Device, keys: Array, draws: RowDraws, positions: Int32, ids: Array) -> Array:
    """Draw the tokens of those of m output rows that are drawn, from their candidates.

    keys uint64 [n, k]: of luce.ops.sample.top_k_keys, of the drawn rows; positions int32 [m]: where the rows' tokens
    will stand. Writes the tokens to ids int32 [m] at their rows, and returns them, int32 [n]: -1 where a row's largest
    logit is not finite, whose id stays.
    """
    rows = np.flatnonzero(draws.drawn)
    draws, positions = draws[rows], positions[rows]
    if device.host:
        found = unpack_candidates(keys)
        drawn = draw_among(found.ids, found.logits, draws, positions)
        ids[rows[drawn >= 0]] = drawn[drawn >= 0]
        return drawn
    n, count = keys.shape
    table = np.empty((n, 7), np.uint64)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = rows, draws.seed, positions, draws.top_k
    table[:, 4:].view(np.float64)[:] = np.stack([draws.temperature, draws.top_p, draws.min_p], axis=1)
    drawn = device.empty(n, np.int32)
    if n:
        sizes = np.int32(count), np.int32(keys.strides[0] // 8)
        device.launch("draw", "draw", (n,), (MAX_CANDIDATES,), (keys, device.upload(table), ids, drawn, *sizes))
    return drawn


def with_drawn(ids: Int32, draws: RowDraws, drawn: Int32) -> Int32:
    """Output.ids: `ids` with what `draw_tokens` returned for the rows that are drawn."""
    # A device may still read `ids`, for its next step.
    ids = ids.copy()
    ids[draws.drawn] = drawn
    return ids


def draw_among(ids: NDArray[np.integer], logits: NDArray[np.float32], draws: RowDraws, positions: Int32) -> Int32:
    """The token of each row, from its candidates: ids [n, k], and their logits float32 [n, k], which descend. -1 where
    the first one is not finite.

    Of the first `top_k` candidates, those count that pass top-p and min-p.
    """
    top = logits[:, :1].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.fmax((logits - top) / draws.temperature[:, None], _LEAST)
    mass, log = _exp_and_log(x, uniform(draws.seed[:, None], positions[:, None], ids))
    mass *= np.arange(ids.shape[1]) < draws.top_k[:, None]
    # Each token's noise is -log.
    places = (mass * passes_top_p_min_p(mass, draws.top_p, draws.min_p) / log).argmin(axis=1)
    tokens = ids[np.arange(len(ids)), places].astype(np.int32)
    finite = np.isfinite(top[:, 0])
    return tokens if finite.all() else np.where(finite, tokens, np.int32(-1))


def passes_top_p_min_p(mass: F64, top_p: F64, min_p: F64, total: F64 | None = None) -> NDArray[np.bool_]:
    """Whether each candidate stays: the ones before it have less than `top_p` of the mass together, and its own mass is
    at least `min_p` times the first one's.

    mass float64 [..., k], descending; top_p, min_p and total float64 [...] -> bool [..., k]. `top_p` is a share of
    `total`; None: of the candidates' mass.
    """
    running = np.add.accumulate(mass, axis=-1)
    whole = running[..., -1:] if total is None else total[..., None]
    found = mass >= min_p[..., None] * mass[..., :1]
    found[..., 1:] &= running[..., :-1] < top_p[..., None] * whole
    return found


def place_drawn(mass: F64, draws: RowDraws, position: int, ids: NDArray[np.integer]) -> int:
    """The place of the token that one row's draw takes from tokens int [n] of these masses, float64 [n]."""
    noise = uniform(draws.seed, np.array([position]), ids)
    return int((mass / -np.log(noise)).argmax())


def uniform(seeds: U64, positions: NDArray[np.integer], ids: NDArray[np.integer]) -> F64:
    """The uniform numbers of tokens at positions, in (0, 1): seeds uint64, positions and ids of any shapes that
    broadcast -> float64."""
    begin = _mixed(_mixed(seeds) + positions.astype(np.uint64) * _GOLDEN)
    bits = _mixed(begin + (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mixed(bits: U64) -> U64:
    """The output function of SplitMix64."""
    bits = (bits ^ bits >> _SHIFTS[0]) * _MULTIPLIERS[0]
    bits = (bits ^ bits >> _SHIFTS[1]) * _MULTIPLIERS[1]
    return bits ^ bits >> _SHIFTS[2]


def _exp_and_log(x: F64, y: F64) -> tuple[F64, F64]:
    """exp(x) for _LEAST <= x <= 0, and log(y) of normal numbers, of one shape [n, k].

    exp: 2^n times the Taylor series of the rest r. log: with y = 2^e m, sqrt(1 / 2) <= m < sqrt(2) and
    s = (m - 1) / (m + 1), e log 2 + 2 (s + s^3 / 3 + s^5 / 5 ...).
    """
    n = np.floor(x * _LOG2_E + _HALF)
    bits = y.view(np.int64)
    from_root = bits - _ROOT
    m = (bits - (from_root & _EXPONENT)).view(np.float64)
    exponent = (from_root >> _BITS).astype(np.float64)
    s = (m - _ONE) / (m + _ONE)
    powers = np.empty((2, *x.shape))
    np.subtract(x - n * _LN2_HIGH, n * _LN2_LOW, out=powers[0])
    np.multiply(s, s, out=powers[1])
    # Horner's form.
    found = powers * _SERIES[0] + _SERIES[1]
    for coefficients in _SERIES[2:]:
        found *= powers
        found += coefficients
    scale = (n.astype(np.int64) + _BIAS << _BITS).view(np.float64)
    return found[0] * scale, exponent * _LN2_HIGH + ((s + s) * found[1] + exponent * _LN2_LOW)
