"""The draft tree of the likeliest texts, from the distributions of tokens at each position. Pure.

Wang, Ringel, "DDTree" (arXiv 2604.12989): a block-diffusion draft gives the tokens of each position probabilities that
do not depend on other positions, so the probability of a text is their product. A pairwise head makes each depend on
the token before it. The tree holds the likeliest of all texts, each with all of its prefixes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Node:
    """Candidate `candidate` of position `depth`, behind node `parent`, or behind the seed if that is -1. Positions and
    candidates count from 0."""

    depth: int
    candidate: int
    parent: int


def likeliest(scores: NDArray[np.float64], budget: int) -> list[Node]:
    """The `budget` likeliest texts as a tree, parents before children, the likelier first.

    `scores` float64 [positions, k, k]: log probabilities of each position's candidates (last axis) behind each
    candidate of the position before; [positions, 1, k] where they do not depend on it. At position 0 the first row
    counts. Among equals the shorter text comes first, then the one whose last token is likelier behind its parent.
    Tokens of probability 0 are left out.
    """
    nodes: list[Node] = []
    positions, parents, ranks = scores.shape
    # The candidates behind each parent, the likeliest first: the children of one node are waited for one by one.
    order = np.argsort(-scores, axis=-1, kind="stable")
    # Entries: -score, depth, rank, parent; scores of the parents.
    waiting: list[tuple[float, int, int, int]] = []
    reached: list[float] = []

    def add(depth: int, rank: int, parent: int) -> None:
        if depth < positions and rank < ranks:
            before = behind(parent)
            score = (reached[parent] if parent >= 0 else 0.0) + float(scores[depth, before, order[depth, before, rank]])
            if np.isfinite(score):
                heapq.heappush(waiting, (-score, depth, rank, parent))

    def behind(parent: int) -> int:
        return nodes[parent].candidate if parent >= 0 and parents > 1 else 0

    add(0, 0, -1)
    while waiting and len(nodes) < budget:
        score, depth, rank, parent = heapq.heappop(waiting)
        nodes.append(Node(depth, int(order[depth, behind(parent), rank]), parent))
        reached.append(-score)
        add(depth, rank + 1, parent)
        add(depth + 1, 0, len(nodes) - 1)
    return nodes
