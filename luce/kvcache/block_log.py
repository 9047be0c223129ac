"""What comes into a prefix tree and what leaves it, numbered, for a router that follows it.

A block is a page of the tree, known by its key (luce.kvcache.block_keys).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

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
    """The blocks that are held, and the last changes. Any thread may ask for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = os.urandom(8).hex()
        self._held: dict[bytes, None] = {}
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=MOST_CHANGES)
        self._sequence = 0

    def note(self, key: bytes, *, held: bool) -> None:
        """A block is now held, or no longer."""
        with self._lock:
            if held:
                self._held[key] = None
            else:
                self._held.pop(key, None)
            self._changes.append((key, held))
            self._sequence += 1

    def changes(self, life: str, after: int) -> BlockChanges:
        """What has changed behind number `after` of a life; all blocks if that is another life, or not remembered."""
        with self._lock:
            behind = self._sequence - after
            if life != self._life or after < 0 or not 0 <= behind <= len(self._changes):
                return BlockChanges(self._life, -1, self._sequence, tuple(self._held), ())
            newest = list(islice(reversed(self._changes), behind))
            sequence = self._sequence
        # Of a block that came and went, the last change counts.
        last = dict(reversed(newest))
        added, removed = (tuple(key for key, held in last.items() if held is state) for state in (True, False))
        return BlockChanges(life, after, sequence, added, removed)
