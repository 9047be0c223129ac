"""Waiting for a disk: while something comes of it, and no longer than doing without it would take."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from typing import TypeVar

from luce.errors import LuceError

T = TypeVar("T")

# For one thing, and for all where doing without takes less. A share of 32 MiB comes at 4 MB/s.
_SECONDS = 10.0


class SlowError(LuceError):
    """A disk takes too long."""


class Deadline:
    """From now on. `without`: seconds that doing without would take, if that is known."""

    def __init__(self, without: float = math.inf) -> None:
        self._end = time.monotonic() + max(_SECONDS, without)

    def wait(self, future: Future[T]) -> T:
        """What a thread gets from the disk. Raises SlowError; the thread is left to itself then."""
        seconds = min(_SECONDS, self._end - time.monotonic())
        try:
            return future.result(max(0.0, seconds))
        except TimeoutError:
            if future.done():  # the disk's own, or what came just now
                return future.result()
            raise SlowError("the disk takes too long") from None
