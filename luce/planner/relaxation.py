"""Prices (prices.py) with which few chains are cheaper than the best placement."""

from __future__ import annotations

from collections.abc import Iterator, Set

import numpy as np

from luce.planner.chain_costs import ChainCosts
from luce.planner.completion_costs import TIE, Completions, Narrowed
from luce.planner.prices import Prices

#: limits that are tried where shards share nothing, where they do, and with prices on the way to better ones
_TRIES, _SHARED_TRIES, _STEP_TRIES = 1000, 12, 3
#: changes of prices
_STEPS = 16
#: prices whose bounds a programme looks at
_KEPT = 3


def relaxations(costs: ChainCosts, completions: Completions, lengths: Set[int], upper: float) -> list[Narrowed]:
    """Chains of these numbers of shards with a value of at most `upper`, with one set of prices or several.

    One is enough where no chain is cheaper than the best placement.
    """
    found, known = list[Narrowed](), upper
    for prices in _starts(costs):
        tries = _SHARED_TRIES if costs.pools else _TRIES
        found.append(completions.narrow(lengths, known, prices, tries))
        known = min(known, found[-1].value)
        if settled(found[-1], known):
            return found[-1:]
    best, share = max(found, key=lambda one: one.bound), 1.0
    for _ in range(_STEPS):
        if best.used is None:
            break
        found.append(completions.narrow(lengths, known, _better(costs, best, known, share), _STEP_TRIES))
        known = min(known, found[-1].value)
        if settled(found[-1], known):
            return found[-1:]
        if found[-1].bound > best.bound:
            best = found[-1]
        else:
            share /= 2
    return sorted(found, key=lambda one: one.bound)[-_KEPT:]


def settled(narrowed: Narrowed, known: float) -> bool:
    """Whether no placement is better than a value that is known."""
    return narrowed.bound >= known * (1 - TIE)


def _starts(costs: ChainCosts) -> Iterator[Prices]:
    """Nothing costs anything, and the CPU of each machine is what is slowest."""
    free = np.zeros(len(costs.pools))
    yield Prices.of(costs, free, np.zeros(len(costs.busy)))
    for index in range(len(costs.busy)):
        yield Prices.of(costs, free, np.eye(len(costs.busy))[index])


def _better(costs: ChainCosts, best: Narrowed, known: float, share: float) -> Prices:
    """A share of a step of Polyak's subgradient method: prices rise for what the cheapest chain uses too much of."""
    assert best.used is not None
    resources, slowest = best.used
    pooled, busy = np.split(resources, [len(costs.pools)])
    excess = np.concatenate([pooled / np.maximum(costs.room, 1.0) - 1, costs.repeat * (busy - slowest)])
    now = np.concatenate([best.prices.memory, best.prices.shares])
    excess = np.where((now <= 0) & (excess < 0), 0.0, excess)
    target = known if np.isfinite(known) else best.bound * 1.1
    step = share * (target - best.bound) / max(float(excess @ excess), 1e-30)
    memory, shares = np.split(np.maximum(now + step * excess, 0.0), [len(costs.pools)])
    return Prices.of(costs, memory, shares / max(1.0, float(shares.sum())))
