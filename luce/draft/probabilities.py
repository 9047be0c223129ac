"""How sure a draft is of its tokens, and drafting for as long as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from luce.draft.drafter import Draftable, Proposal
from luce.runtime.step import Candidates, Int32, Output

# The chance of a text below which it is not gone on with, where each further token takes a pass of its own.
_LEAST = 0.2


def top_probabilities(top: Candidates) -> NDArray[np.float64]:
    """The probability of each row's likeliest token among the candidates, which have nearly all: float64 [rows]."""
    logits = top.logits.astype(np.float64)
    result: NDArray[np.float64] = 1 / np.exp(logits - logits[:, :1]).sum(axis=1)
    return result


def log_probabilities(top: Candidates, *, scale: float = 1.0, softcap: float = 0.0) -> NDArray[np.float64]:
    """Log probabilities of all candidates, whose norms are known: float64, the shape of their ids.

    Logits are multiplied by `scale`, and then x becomes softcap tanh(x / softcap) if there is one.
    """
    assert top.norms is not None
    logits = top.logits.astype(np.float64) * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    # Norms are rounded to float32, what they are of is not: certain tokens may be a little above theirs.
    result: NDArray[np.float64] = np.minimum(logits - top.norms[:, None], 0.0)
    return result


def draft_one_by_one(asked: Sequence[Draftable], block: int, run: Callable[[int, Int32], Output]) -> list[Proposal]:
    """Up to `block` tokens of each text, all texts together: run(depth, tokens) gives what follows each text's token at
    that depth, the seed at first, with candidates."""
    tokens = np.array([one.tokens[-1] for one in asked], np.int32)
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in asked]
    reach = np.ones(len(asked))
    for depth in range(min(block, max(one.max_tokens for one in asked))):
        output = run(depth, tokens)
        assert output.candidates is not None
        tokens, sure = output.ids, top_probabilities(output.candidates)
        for (ids, own), one, token, chance in zip(found, asked, tokens.tolist(), sure.tolist(), strict=True):
            if depth < one.max_tokens:
                ids.append(token)
                own.append(chance)
        reach *= sure
        if reach.max() < _LEAST:
            break
    return [Proposal(ids, own) for ids, own in found]
