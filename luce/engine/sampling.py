"""Logits to a token, and log probabilities.

Order: the constraint's mask, logit bias, penalties, then (temperature 0: argmax, lowest id on ties) top-k, temperature,
top-p, min-p, draw. The draw is a function of (seed, position) alone, so a reply does not depend on what else runs, on
how rows are distributed over steps, nor on the device (luce.ops.draw). Log probabilities are of the unmodified
distribution.

Vocabularies have up to a quarter of a million entries, so no function here sorts or partitions a whole row if a part of
it decides (luce.ops.sample.largest). Where few candidates suffice, the device draws.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.errors import BackendError, GrammarLimitError, RequestError
from luce.ops.draw import draw_among, passes_top_p_min_p, place_drawn
from luce.ops.sample import largest, unpack_mask
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.step import MAX_CANDIDATES

Logits = NDArray[np.float32]
#: uint32 [words]: bit t % 32 of word t / 32 is set if token t may come
Mask = NDArray[np.uint32]

#: a bias of at most BAN bans a token; a bias of at least FORCE bans all tokens without one (OpenAI's -100 and 100)
BAN, FORCE = -100.0, 100.0

# Entries whose probabilities are summed together before a token is drawn from a whole vocabulary.
_DRAW_SECTION = 512
# Most probable tokens that are taken to hold top_p of the mass at first; the number grows until they do.
_TOP_P_TOKENS = 1024


def needs_logits(params: SamplingParams) -> bool:
    """Whether choosing a token on the host needs the whole row of logits, rather than the argmax alone."""
    return params.temperature > 0 or _changes_or_reports(params)


def device_draws(params: SamplingParams) -> bool:
    """Whether a device can draw a reply's tokens: the MAX_CANDIDATES largest logits are enough."""
    return params.temperature > 0 and 0 < params.top_k <= MAX_CANDIDATES and not _changes_or_reports(params)


def reply_ends(params: SamplingParams, eos: frozenset[int], vocab: int) -> frozenset[int]:
    """The ids below `vocab` that end a reply: those of the request, and `eos` unless it ignores them."""
    own = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos
    return frozenset(token for token in own if 0 <= token < vocab)


def mask_allows(mask: Mask, token: int) -> bool:
    """Whether a mask has the bit of a token."""
    return token < 32 * len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)


def _changes_or_reports(params: SamplingParams) -> bool:
    return (
        params.logprobs is not None
        or params.min_tokens > 0
        or bool(params.logit_bias)
        or params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


class Sampler:
    """Chooses the tokens of one reply.

    prompt int32 [n]; `ends` are the ids that end the reply, banned until it has `min_tokens`; `seed` is any integer.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: NDArray[np.int32],
        *,
        seed: int,
        ends: frozenset[int],
    ) -> None:
        self.params = params
        self._draw = draw_of(params, seed)
        self._draws = RowDraws.of([self._draw])
        self._history = _Window(prompt, params.repeat_last_n) if params.repetition_penalty != 1 else None
        self._counts = _Counts() if params.frequency_penalty or params.presence_penalty else None
        self._count = 0
        self._position = len(prompt)
        self._ends = np.array(sorted(ends), np.intp)
        bias = params.logit_bias
        self._forced = np.array(sorted(i for i, b in bias.items() if b >= FORCE), np.intp)
        self._banned = np.array(sorted(i for i, b in bias.items() if b <= BAN), np.intp)
        self._biased = np.array(sorted(i for i, b in bias.items() if BAN < b < FORCE), np.intp)
        self._bias = np.array([bias[int(i)] for i in self._biased], np.float32)

    def choose(self, logits: Logits, mask: Mask | None = None) -> int:
        """The token at the reply's end, given logits float32 [vocab], which are not changed. A token that the mask
        lacks has no probability.

        Raises BackendError if the logits hold NaN or +inf, GrammarLimitError if the mask has no token, RequestError if
        `logit_bias` bans every token, or bans all but the ends before `min_tokens`.
        """
        temperature = self.params.temperature
        if temperature == 0 and mask is not None and not self._adjusts:
            # A look at one token, which mostly is allowed, takes a hundredth of what the other 250,000 take.
            best = int(logits.argmax())
            if math.isfinite(logits[best]) and mask_allows(mask, best):
                return best
        values = self.adjust(logits, mask)
        best = int(values.argmax())
        top = float(values[best])
        if not math.isfinite(top):
            if top == -math.inf:
                raise self._banned_error(mask, len(values))
            raise BackendError(f"position {self._position}: the logits are not finite")
        if temperature == 0:
            return best
        return self._draw_whole(values, top, temperature)

    def push(self, token: int) -> None:
        """Append a token to the reply."""
        if self._history is not None:
            self._history.push(token)
        if self._counts is not None:
            self._counts.push(token)
        self._count += 1
        self._position += 1

    @property
    def _early(self) -> bool:
        """Whether the reply is too short for an end."""
        return self._count < self.params.min_tokens and len(self._ends) > 0

    @property
    def _adjusts(self) -> bool:
        """Whether anything but a mask changes logits at the reply's end."""
        return bool(self.params.logit_bias or self._history or self._counts or self._early)

    def adjust(self, logits: Logits, mask: Mask | None = None) -> Logits:
        """Logits after mask, bias, penalties and bans: float32 [vocab], `logits` itself if nothing applies."""
        params, early = self.params, self._early
        if mask is None and not self._adjusts:
            return logits
        values, forced = logits.copy(), self._forced
        if mask is not None:
            allowed = unpack_mask(mask, len(values))
            values[~allowed] = -np.inf
            forced = forced[allowed[forced]]
            # Where the grammar leaves nothing but the end, it wins over min_tokens.
            early = early and bool(np.count_nonzero(allowed) > np.count_nonzero(allowed[self._ends]))
        values[self._biased] += self._bias
        if self._history is not None:
            # As in llama.cpp: each token of the window once, made less probable on both sides of zero.
            ids = self._history.ids()
            old = values[ids]
            penalty = np.float32(params.repetition_penalty)
            values[ids] = np.where(old > 0, old / penalty, old * penalty)
        if self._counts is not None:
            ids, counts = self._counts.ids, self._counts.counts
            values[ids] -= counts * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        banned = np.union1d(self._banned, self._ends) if early else self._banned
        forced = np.setdiff1d(forced, banned) if early else forced
        if len(forced):
            kept = values[forced]
            values.fill(-np.inf)
            values[forced] = kept
        values[banned] = -np.inf
        return values

    def _banned_error(self, mask: Mask | None, vocab: int) -> RequestError:
        """Why no token can be chosen."""
        if mask is not None and not mask.any():
            return GrammarLimitError("the grammar of the reply allows no token here")
        biased = len(self._banned) and (mask is not None or vocab == len(self._banned))
        param = "logit_bias" if biased else "min_tokens"
        return RequestError(f"{param}: every token is banned", param=param, code="invalid_value")

    def _draw_whole(self, values: Logits, top: float, temperature: float) -> int:
        params = self.params
        with np.errstate(over="ignore"):
            if 0 < params.top_k < len(values):
                ids = largest(values, params.top_k)
                return self._draw_from(ids, values[ids])
            # float32 is precise enough for each mass (1e-7) and ten times faster; only their sum needs float64.
            scaled = values - np.float32(top)
            scaled /= np.float32(max(temperature, 1e-30))
            np.exp(scaled, out=scaled)
        if params.top_p >= 1 and params.min_p <= 0:
            return self._draw_any(values, scaled)
        total = scaled.sum(dtype=np.float64)
        # The sum of the likeliest ones may come out as more than that of all.
        top_p = np.array(params.top_p if params.top_p < 1 else np.inf)
        head = _TOP_P_TOKENS
        while True:
            ids = largest(values, min(head, len(values)))
            mass = scaled[ids].astype(np.float64)
            keep = int(passes_top_p_min_p(mass, top_p, np.array(params.min_p), total).sum())
            if keep < len(mass) or head >= len(values):
                return int(ids[self._first(ids[:keep], mass[:keep])])
            head *= 8

    def _draw_any(self, values: Logits, mass: Logits) -> int:
        """Draw from all tokens, whose mass is float32 [vocab]: the noise is that of the likeliest ones, and of all
        others as one, among which the place in their running sum decides."""
        ids = largest(values, min(MAX_CANDIDATES, len(values)))
        head = mass[ids].astype(np.float64)
        mass[ids] = 0
        rest = float(mass.sum(dtype=np.float64))
        place = self._first(np.append(ids, len(values)), np.append(head, rest))
        return int(ids[place]) if place < len(ids) else draw_index(mass, self._uniform())

    def _draw_from(self, ids: NDArray[np.intp], values: Logits) -> int:
        """Draw one of `ids`, whose logits descend, as a device does."""
        position = np.array([self._position], np.int32)
        return int(draw_among(ids[None], values[None], self._draws, position)[0])

    def _first(self, ids: NDArray[np.integer], mass: NDArray[np.float64]) -> int:
        """The place of the token that is drawn from `ids`."""
        return place_drawn(mass, self._draws, self._position, ids)

    def _uniform(self) -> float:
        """A number in [0, 1) from the high 53 bits of another counter-based generator's output at this position."""
        assert self._draw is not None
        bits = np.random.Philox(key=self._draw.seed, counter=self._position).random_raw()
        return (int(bits) >> 11) * 2.0**-53


def draw_of(params: SamplingParams, seed: int) -> Draw | None:
    """How a reply's tokens are drawn, with any integer as seed; None for greedy replies."""
    if params.temperature == 0:
        return None
    return Draw(seed % 2**64, params.temperature, max(params.top_k, 0), params.top_p, params.min_p)


class _Window:
    """The distinct ids among the last `size` tokens of prompt and reply (all if negative)."""

    def __init__(self, prompt: NDArray[np.int32], size: int) -> None:
        if size < 0:
            self._tokens: deque[int] = deque(prompt.tolist())
        else:
            self._tokens = deque(prompt[-size:].tolist(), maxlen=size)

    def push(self, token: int) -> None:
        self._tokens.append(token)

    def ids(self) -> NDArray[np.intp]:
        return np.array(list(set(self._tokens)), np.intp)


class _Counts:
    """How often each id occurs in the reply."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, np.intp)
        self._counts = np.zeros(64, np.float32)

    @property
    def ids(self) -> NDArray[np.intp]:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._index)]

    def push(self, token: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        self._counts[index] += 1


def log_normalizer(logits: Logits) -> float:
    """Natural log of the sum of exp(logits), float32 [n]."""
    top = logits.max()
    return float(top) + math.log(float(np.exp(logits - top).sum(dtype=np.float64)))


def score(logits: Logits, token: int, alternatives: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log probability of `token`, and (id, log probability) of the most likely tokens, best first."""
    norm = log_normalizer(logits)
    ids = largest(logits, min(alternatives, len(logits))).tolist() if alternatives else []
    return float(logits[token]) - norm, tuple((i, float(logits[i]) - norm) for i in ids)


def draw_index(mass: NDArray[np.float32], uniform: float) -> int:
    """The index where the running sum of `mass`, float32 [vocab], passes `uniform` of the total.

    In sections, without a running sum over all entries.
    """
    starts = np.arange(0, len(mass), _DRAW_SECTION)
    sums = np.add.reduceat(mass, starts, dtype=np.float64)
    running = np.cumsum(sums)
    section = min(int(np.searchsorted(running, uniform * running[-1], side="right")), len(sums) - 1)
    inside = mass[starts[section] : starts[section] + _DRAW_SECTION].astype(np.float64)
    rest = uniform * running[-1] - (running[section - 1] if section else 0.0)
    index = int(np.searchsorted(np.cumsum(inside), rest, side="right"))
    # Rounding may point beyond the section: take its last entry with any mass.
    return int(starts[section]) + min(index, int(np.flatnonzero(inside)[-1]))
