"""Probabilities of a draft's tokens, and drafting token by token while they are high enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.draft.coupled_draws import Draws
from luce.draft.drafter import Draftable, Proposal
from luce.runtime.step import Candidates, Int32, Output

# Drafting token by token, where each token takes a pass of its own, ends when every text is less probable than this.
_MIN_PROBABILITY = 0.2


def top_probabilities(candidates: Candidates) -> NDArray[np.float64]:
    """The probability of each row's likeliest token among the candidates, which have nearly all of it: float64
    [rows]."""
    logits = candidates.logits.astype(np.float64)
    result: NDArray[np.float64] = 1 / np.exp(logits - logits[:, :1]).sum(axis=1)
    return result


def log_probabilities(candidates: Candidates, *, scale: float = 1.0, softcap: float = 0.0) -> NDArray[np.float64]:
    """Log probabilities of all candidates, which must have norms: float64, the shape of their ids.

    Logits are multiplied by `scale`; then, with a softcap, x becomes softcap tanh(x / softcap).
    """
    assert candidates.norms is not None
    logits = candidates.logits.astype(np.float64) * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    # Norms are rounded to float32, these logits are not: the log probability of a certain token may exceed 0 a little.
    result: NDArray[np.float64] = np.minimum(logits - candidates.norms[:, None], 0.0)
    return result


def draft_one_by_one(asked: Sequence[Draftable], block: int, run: Callable[[int, Int32], Output]) -> list[Proposal]:
    """Up to `block` tokens of each text, all texts together.

    run(depth, tokens) computes the token that follows each text's token at that depth, the seed at depth 0, with
    candidates.
    """
    draws = Draws([one.draw for one in asked], [len(one.tokens) for one in asked])
    tokens = np.array([one.tokens[-1] for one in asked], np.int32)
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in asked]
    reach = np.ones(len(asked))
    for depth in range(min(block, max(one.max_tokens for one in asked))):
        output = run(depth, tokens)
        assert output.candidates is not None
        tokens, probabilities = output.ids, top_probabilities(output.candidates)
        if draws.any:
            ids = output.candidates.ids
            scores = output.candidates.logits.astype(np.float64)
            scores += np.log(probabilities)[:, None] - scores[:, :1]
            places, chances = draws.choose(depth, ids[:, None], scores[:, None])
            tokens, probabilities = np.take_along_axis(ids, places, 1)[:, 0], chances[:, 0]
        for (drafted, own), one, token, probability in zip(
            found, asked, tokens.tolist(), probabilities.tolist(), strict=True
        ):
            if depth < one.max_tokens:
                drafted.append(token)
                own.append(probability)
        reach *= probabilities
        if reach.max() < _MIN_PROBABILITY:
            break
    return [Proposal(ids, own) for ids, own in found]
