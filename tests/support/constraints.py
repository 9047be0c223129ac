"""Constraints without a grammar."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from luce.engine.sequence import Constraint, RowKind


class Few:
    """A constraint of a few ids at every place, which nothing ends. `hook` is called where masks are made."""

    open = over = False

    def __init__(self, vocab: int, *ids: int, hook: Callable[[], None] = lambda: None) -> None:
        self._vocab = vocab
        self._ids = ids
        self._hook = hook
        self.pushed: list[int] = []
        self.threads: set[str] = set()

    def allows(self, token: int) -> bool:
        return token in self._ids

    def mask(self, ends: frozenset[int]) -> NDArray[np.uint32]:
        words = np.zeros(-(-self._vocab // 32), np.uint32)
        for token in self._ids:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def fill(
        self, tokens: Many[int], parents: Many[int], ends: frozenset[int], out: NDArray[np.uint32]
    ) -> list[RowKind]:
        self.threads.add(threading.current_thread().name)
        self._hook()
        out[:] = self.mask(ends)
        return [RowKind.MADE] * len(out)

    def valid(self, tokens: Many[int], parents: Many[int], ends: frozenset[int]) -> list[bool]:
        return [token in self._ids for token in tokens]

    def forced(self, most: int, ends: frozenset[int]) -> list[int]:
        return []

    def push(self, token: int) -> None:
        assert token in self._ids
        self.pushed.append(token)

    def copy(self) -> Constraint:
        raise NotImplementedError
