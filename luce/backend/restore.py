"""Loads a stored state into all shards at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence

from luce.shard.saved_state import StatePiece
from luce.shard.shard import Shard

#: most pieces that wait for a shard while it copies another one
WAITING = 1


def load(shards: Sequence[Shard], pieces: Iterable[StatePiece]) -> None:
    """Load each piece into every shard.

    Each remote shard has a thread: while one shard copies a piece, the other shards copy theirs, and `pieces` makes the
    next one. Raises the first error of `pieces` or of a shard; then no thread runs any more.
    """
    feeders = [_Feeder(shard) for shard in shards if shard.remote]
    try:
        for piece in pieces:
            for feeder in feeders:
                feeder.put(piece)
            for shard in shards:
                if not shard.remote:
                    shard.state.load(piece)
            if any(feeder.error is not None for feeder in feeders):
                break
    finally:
        for feeder in feeders:
            feeder.put(None)
        for feeder in feeders:
            feeder.join()
    for feeder in feeders:
        if feeder.error is not None:
            raise feeder.error


class _Feeder(threading.Thread):
    """Loads pieces into one shard until it gets None. After an error it drops the pieces."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(name="luce-load-state", daemon=True)
        self.error: Exception | None = None
        self._shard = shard
        self._pieces: queue.Queue[StatePiece | None] = queue.Queue(WAITING)
        self.put = self._pieces.put
        self.start()

    def run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            try:
                if self.error is None:
                    self._shard.state.load(piece)
            except Exception as error:
                self.error = error
