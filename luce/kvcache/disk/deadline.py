"""How long a sequence waits for a disk: no longer than computing its prompt would take."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from typing import TypeVar

from luce.errors import LuceError

T = TypeVar("T")


class SlowDiskError(LuceError):
    """A disk takes too long."""


class Deadline:
    """Starts now. `recompute_seconds`: the time to compute what is read, if known."""

    #: longest wait for one result, and for all results where computing is faster. A read of 32 MiB takes this long at
    #: 4 MB/s.
    seconds = 10.0

    def __init__(self, recompute_seconds: float = math.inf) -> None:
        self._end = time.monotonic() + max(self.seconds, recompute_seconds)

    def wait(self, future: Future[T]) -> T:
        """The result of a thread that reads. Raises what the thread raises, and SlowDiskError: the thread goes on."""
        seconds = min(self.seconds, self._end - time.monotonic())
        try:
            return future.result(max(0.0, seconds))
        except TimeoutError:
            if future.done():  # the disk raised this TimeoutError itself, or the result has just come
                return future.result()
            raise SlowDiskError("the disk takes too long") from None
