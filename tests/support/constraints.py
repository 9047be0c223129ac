"""Constraints without a grammar."""

from __future__ import annotations

import itertools
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
        self.ids = ids
        self._hook = hook
        self.pushed: list[int] = []
        self.threads: set[str] = set()

    def at(self, place: int) -> Many[int]:
        """The ids that may be the reply's token number `place`."""
        return self.ids

    def allows(self, token: int) -> bool:
        return token in self.at(len(self.pushed))

    def mask(self, ends: frozenset[int], ahead: int = 0) -> NDArray[np.uint32]:
        """As in Constraint, of the token behind `ahead` more ones."""
        words = np.zeros(-(-self._vocab // 32), np.uint32)
        for token in self.at(len(self.pushed) + ahead):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def fill(
        self, tokens: Many[int], parents: Many[int], ends: frozenset[int], out: NDArray[np.uint32]
    ) -> list[RowKind]:
        self.threads.add(threading.current_thread().name)
        self._hook()
        for row, words in enumerate(out):
            words[:] = self.mask(ends, row)
        return [RowKind.MADE] * len(out)

    def valid(self, tokens: Many[int], parents: Many[int], ends: frozenset[int]) -> list[bool]:
        return [token in self.at(len(self.pushed) + row) for row, token in enumerate(tokens)]

    def forced(self, most: int, ends: frozenset[int]) -> list[int]:
        return []

    def push(self, token: int) -> None:
        assert self.allows(token)
        self.pushed.append(token)

    def copy(self) -> Constraint:
        raise NotImplementedError


class Turns(Few):
    """Every third of its ids at a place, others at the next one: a mask that is made too early allows wrong ones."""

    def at(self, place: int) -> Many[int]:
        return self.ids[place % 3 :: 3]


class Runs(Few):
    """Of each ten tokens the last four are forced."""

    def at(self, place: int) -> Many[int]:
        return self.ids if place % 10 < 6 else (self.ids[place % len(self.ids)],)

    def forced(self, most: int, ends: frozenset[int]) -> list[int]:
        found = [self.at(len(self.pushed) + ahead) for ahead in range(most)]
        return [ids[0] for ids in itertools.takewhile(lambda ids: len(ids) == 1, found)]
