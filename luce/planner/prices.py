"""What shards pay for what they share: the memory and the CPU of their machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from luce.planner.chain_costs import ChainCosts
from luce.planner.shard_tables import Floats


@dataclass(frozen=True)
class Prices:
    """Prices of shared memory and of shared CPUs.

    No placement pays more than it may: memory is paid back whole, and seconds of a CPU stand for a share of those of
    the slowest part, which take no less. So, with any prices, no placement's value is below that of the cheapest
    chain, whether that one has the memory or not. With the right prices hardly any chain is cheaper than the best
    placement.
    """

    #: [pools]: of all of a machine's memory, in seconds
    memory: Floats
    #: [busy]: of the slowest part, that the CPU stands for; at most 1 in all
    shares: Floats
    #: [pools + busy]: of a byte, and of a second
    weights: Floats
    #: what is paid back
    refund: float
    #: how much the slowest shard or link counts beside
    repeat: float

    @classmethod
    def of(cls, costs: ChainCosts, memory: Floats, shares: Floats) -> Prices:
        """Prices of memory and shares for CPUs."""
        weights = np.concatenate([memory / np.maximum(costs.room, 1.0), costs.repeat * shares])
        return cls(memory, shares, weights, float(memory.sum()), costs.repeat * max(0.0, 1 - float(shares.sum())))
