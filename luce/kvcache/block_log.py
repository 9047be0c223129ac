"""What comes into a prefix tree and what leaves it, numbered, for a router that follows it. Pure.

A block is a page of the tree, known by its key (luce.kvcache.block_keys).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

#: changes that are remembered; who is further behind gets the whole list
MOST_CHANGES = 1 << 14


@dataclass(frozen=True)
class BlockChanges:
    """What has changed behind number `since`, up to number `sequence`; `since` -1: `added` is the whole list."""

    #: another one begins at number 0 again
    life: str
    since: int
    sequence: int
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class BlockLog:
    """The last changes."""

    def __init__(self) -> None:
        self._life = os.urandom(8).hex()
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=MOST_CHANGES)
        self._sequence = 0

    def note(self, key: bytes, *, held: bool) -> None:
        """A block is now in the tree, or no longer."""
        self._changes.append((key, held))
        self._sequence += 1

    def changes(self, life: str, after: int, whole: Iterable[bytes]) -> BlockChanges:
        """What has changed behind number `after` of a life; `whole`: the keys of all blocks in the tree, for who asks
        about another life, or about what is not remembered."""
        behind = self._sequence - after
        if life != self._life or after < 0 or not 0 <= behind <= len(self._changes):
            return BlockChanges(self._life, -1, self._sequence, tuple(whole), ())
        # Of a block that came and went, the last change counts.
        last = dict(list(self._changes)[len(self._changes) - behind :])
        added, removed = (tuple(key for key, held in last.items() if held is state) for state in (True, False))
        return BlockChanges(self._life, after, self._sequence, added, removed)
