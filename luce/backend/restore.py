"""Copies a stored state to all shards at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence

from luce.shard.saved_state import StatePiece
from luce.shard.shard import Shard

#: pieces that wait for one shard, beside the one that it is copying
WAITING = 1


def load(shards: Sequence[Shard], pieces: Iterable[StatePiece]) -> None:
    """Give each piece to every shard.

    Remote shards have a thread each: while one copies a piece, the others get theirs and the next piece is made. Raises
    the first error of `pieces` or of a shard; no thread runs any more then.
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
    """Gives pieces to one shard until it gets None; after an error it drops them."""

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
