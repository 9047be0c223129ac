"""Scores the pages of a text by the attention that a small model pays them from the text's end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.compress.scorer import Scorer
from luce.runtime.step import PAGE, Int32

#: most tokens of a segment: scoring takes time linear in the length of the text
SEGMENT = 2048


class DraftScorer:
    """See luce.kvcache.policies.PageScorer. It closes `scorer`. `segment`, `rotated`: as for the scorer."""

    def __init__(self, scorer: Scorer, *, segment: int = SEGMENT, rotated: bool = True) -> None:
        self._scorer = scorer
        self._segment, self._rotated = segment, rotated

    def __call__(self, tokens: Int32) -> NDArray[np.float32]:
        """int32 [n] -> float32 [n // PAGE]: the mean score of each full page's tokens."""
        count = len(tokens) // PAGE
        if not count:
            return np.zeros(0, np.float32)
        scores = self._scorer(tokens, segment=self._segment, rotated=self._rotated)
        means: NDArray[np.float32] = scores[: count * PAGE].reshape(count, PAGE).mean(axis=1).astype(np.float32)
        return means

    def close(self) -> None:
        """Idempotent."""
        self._scorer.close()
