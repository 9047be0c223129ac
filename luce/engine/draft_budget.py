"""How many draft rows pay: acceptance rates, and the choice of rows by them and by the times of steps. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from collections.abc import Sequence as Many

from luce.draft.drafter import Proposal

# The acceptance rate assumed for a draft token without a probability.
_PRIOR = 0.5
# A token that is copied behind so many tokens, which are known to be copied too, is assumed to be right in half of the
# places. The last bin of such lengths begins at 2 to the power of the second number.
_PRIOR_LENGTH, _LONGEST_BIN = 4, 4
# An assumed rate counts as so many outcomes.
_ASSUMED_OUTCOMES = 2
# How fast rates go back to the assumed ones while no draft token is compared.
_DECAY = 0.005
_BINS = 10


def choose_draft_rows(
    probabilities: Many[Many[float]],
    budget: int,
    plain: int,
    seconds: Callable[[int], float],
    drafting: float,
    sizes: Container[int],
    *,
    whole: bool = True,
) -> tuple[list[int], float]:
    """How many draft rows of each sequence to verify, and how many times faster that is than not to draft.

    probabilities  per sequence, descending: that row 1, 2, ... is accepted
    budget         most draft rows
    plain          rows of the step without drafts, each of which gives a token
    seconds        of a step by number of rows
    drafting       seconds that the proposals take
    sizes          allowed rows of the whole step, beside `plain`
    whole          all draft rows that the budget allows are allowed too
    """
    rows = sorted(((-value, index) for index, own in enumerate(probabilities) for value in own))[:budget]
    counts, best = [0] * len(probabilities), 0
    expected, best_rate = float(plain), plain / (drafting + seconds(plain))
    for count, (negative, _) in enumerate(rows, 1):
        expected -= negative
        if plain + count not in sizes and not (whole and count == len(rows)):
            continue
        rate = expected / (drafting + seconds(plain + count))
        if rate > best_rate:
            best_rate, best = rate, count
    for _, index in rows[:best]:
        counts[index] += 1
    return counts, best_rate * seconds(plain) / plain


def worth_drafting(
    forecasts: Many[Many[float]],
    budget: int,
    plain: int,
    seconds: Callable[[int], float],
    drafting: Callable[[int], float],
    sizes: Container[int],
    *,
    margin: float,
) -> list[bool]:
    """Which sequences to draft for: those with which the most tokens a second are expected.

    forecasts  probabilities, as in choose_draft_rows, of the proposals that are expected for each sequence
    drafting   seconds that the proposals take by number of sequences
    margin     the share by which that must be faster than plain steps

    All else as in choose_draft_rows. The sequences of the greatest expected gain come first, and as many of them are
    drafted for as pay; only some numbers of them are tried, beside one, two and all.
    """
    order = sorted(range(len(forecasts)), key=lambda index: -sum(forecasts[index]))
    best, best_rate, all_of_them = 0, 1 + margin, len(forecasts)
    counts = [*(1 << power for power in range(all_of_them.bit_length()) if 1 << power < all_of_them), all_of_them]
    for count in counts if forecasts else ():
        chosen = [forecasts[index] for index in order[:count]]
        rate = choose_draft_rows(chosen, budget, plain, seconds, drafting(count), sizes)[1]
        # Among equals all of them: without a cost each can only gain.
        if rate > best_rate or (best and rate == best_rate):
            best, best_rate = count, rate
    return [index in order[:best] for index in range(len(forecasts))]


def fair_shares(budget: int, demands: Many[int]) -> list[int]:
    """Split `budget` rows so that the smallest share is as large as it can be; none exceeds its demand.

    Equal demands get shares that differ by at most one row, the earlier ones the larger shares.
    """
    shares = [0] * len(demands)
    remaining = budget
    for place, index in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        shares[index] = min(demands[index], -(-remaining // (len(demands) - place)))
        remaining -= shares[index]
    return shares


class AcceptanceRates:
    """How often draft tokens were accepted whose parents were, by the drafter's own probability if it gives one, and by
    how much of the text before them is known to be copied.

    like  rates that are assumed for what has few outcomes; they may go on learning
    """

    def __init__(self, like: AcceptanceRates | None = None) -> None:
        self._like = like
        #: each bin's mean outcome, and its number of outcomes
        self._means: dict[tuple[int, int], tuple[float, int]] = {}

    def probabilities(self, proposal: Proposal) -> list[float]:
        """The probability that row 1, 2, ... is accepted; none is above that of the row before it."""
        return list(itertools.accumulate(self.reach(proposal), min))

    def reach(self, proposal: Proposal) -> list[float]:
        """The probability that each token is accepted, as the product of the rates on the path to it."""
        found: list[float] = []
        for index in range(len(proposal.tokens)):
            parent = proposal.parents[index] if proposal.parents else index - 1
            found.append((found[parent] if parent >= 0 else 1.0) * self._rate(*_bin(proposal, index)))
        return found

    def update(self, proposal: Proposal, outcomes: Many[tuple[int, bool]], weight: float) -> None:
        """Learn from draft tokens whose parents were accepted: (index, whether the token was accepted). `weight`: that
        of an outcome, once there are many."""
        for index, accepted in outcomes:
            key, _ = _bin(proposal, index)
            mean, count = self._means.get(key, (0.0, 0))
            self._means[key] = mean + max(weight, 1 / (count + 1)) * (float(accepted) - mean), count + 1

    def decay(self, proposal: Proposal) -> None:
        """Learn that no token of a proposal was compared: rates go back until some are."""
        for key, prior in {_bin(proposal, index) for index in range(len(proposal.tokens))}:
            if key in self._means:
                mean, count = self._means[key]
                self._means[key] = mean + _DECAY * (self._assumed(key, prior) - mean), count

    def _rate(self, key: tuple[int, int], prior: float) -> float:
        assumed = self._assumed(key, prior)
        mean, count = self._means.get(key, (0.0, 0))
        return assumed + (mean - assumed) * count / (count + _ASSUMED_OUTCOMES)

    def _assumed(self, key: tuple[int, int], prior: float) -> float:
        return prior if self._like is None else self._like._rate(key, prior)


def _bin(proposal: Proposal, index: int) -> tuple[tuple[int, int], float]:
    """The bin that counts a draft token, and the rate that is assumed for it at first.

    Bins are of the drafter's probability, -1 without one, and of the length of the text that is known to be copied
    before the token: 0 for none, 1 for up to 3 tokens, 2 for up to 7, and so on.
    """
    probability, chance = -1, _PRIOR
    if len(proposal.probabilities):
        chance = min(max(float(proposal.probabilities[index]), 0.0), 1.0)
        probability = min(int(chance * _BINS), _BINS - 1)
    length = proposal.copied[index] if len(proposal.copied) else 0
    if length:
        # Either is right where the other is not: a copied token that the drafter lacks has probability 0.
        alone = len(proposal.probabilities) == 0
        copied = length / (length + _PRIOR_LENGTH)
        chance = copied if alone else 1 - (1 - chance) * (1 - copied)
    return (probability, min(length.bit_length() - 1, _LONGEST_BIN) if length > 1 else length), chance
