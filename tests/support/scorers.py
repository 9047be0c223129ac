"""Scorers of texts without weights, for tests of prompt compression."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from luce.compress.scorer import LONGEST, no_check
from luce.errors import LuceError


class ScriptedScorer:
    """Gives token t the score t, or that of `weight`; counts the texts that it reads, and calls `check` once for each
    of two layers."""

    def __init__(
        self,
        fails: Callable[[int], LuceError | Exception | None] = lambda text: None,
        weight: Callable[[NDArray[np.int32]], NDArray[np.float64]] = lambda tokens: tokens.astype(np.float64),
    ) -> None:
        self._fails, self._weight = fails, weight
        #: numbers of tokens of the texts that were read
        self.read: list[int] = []
        self.closed = 0

    def __call__(
        self,
        tokens: NDArray[np.int32],
        *,
        segment: int = LONGEST,
        rotated: bool = False,
        check: Callable[[], None] = no_check,
    ) -> NDArray[np.float64]:
        self.read.append(len(tokens))
        check()
        error = self._fails(len(self.read))
        if error is not None:
            raise error
        check()
        return self._weight(tokens)

    def close(self) -> None:
        self.closed += 1
