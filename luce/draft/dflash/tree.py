"""The draft tree of the likeliest texts, from one distribution of tokens per position. Pure.

Wang, Ringel, "DDTree" (arXiv 2604.12989): a block-diffusion draft gives the tokens of each position probabilities that
do not depend on other positions, so the probability of a text is their product. The tree holds the likeliest of all
texts, each with all of its prefixes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Node:
    """The `rank`-likeliest token of position `depth`, behind node `parent`, or behind the seed if that is -1. Positions
    and ranks count from 0."""

    depth: int
    rank: int
    parent: int


def likeliest(scores: NDArray[np.float64], budget: int) -> list[Node]:
    """The `budget` likeliest texts as a tree, parents before children, the likelier first.

    `scores` float64 [positions, k]: log probabilities of each position's likeliest tokens, descending. Among equals the
    shorter text comes first, then the one whose last token is likelier. Tokens of probability 0 are left out.
    """
    nodes: list[Node] = []
    positions, ranks = scores.shape
    # Entries: -score, depth, rank, parent; scores of the parents.
    waiting: list[tuple[float, int, int, int]] = []
    reached: list[float] = []

    def add(depth: int, rank: int, parent: int) -> None:
        if depth < positions and rank < ranks and np.isfinite(scores[depth, rank]):
            score = (reached[parent] if parent >= 0 else 0.0) + float(scores[depth, rank])
            heapq.heappush(waiting, (-score, depth, rank, parent))

    add(0, 0, -1)
    while waiting and len(nodes) < budget:
        score, depth, rank, parent = heapq.heappop(waiting)
        nodes.append(Node(depth, rank, parent))
        reached.append(-score)
        add(depth, rank + 1, parent)
        add(depth + 1, 0, len(nodes) - 1)
    return nodes
