"""The thread that writes snapshots. After repeated failures it takes a pause."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from luce.errors import LuceError
from luce.kvcache.disk.stats import DiskStats
from luce.kvcache.disk.store import SnapshotGoneError, StoreFullError

_log = logging.getLogger(__name__)

#: failures without a success between them that cause a pause, and its length
_FAILURES, _PAUSE_SECONDS = 3, 60.0
#: shortest time between two warnings
_WARN_SECONDS = 60.0
#: the task in progress gets this time when the thread stops
LEAST_SECONDS = 1.0


class WriteThread:
    """Runs tasks in the order of `post`. An exception of a task is counted and logged, and the thread goes on.

    `begin` runs first and `end` last, on the thread; `ran` after every task.
    """

    def __init__(
        self, stats: DiskStats, begin: Callable[[], None], ran: Callable[[], object], end: Callable[[], None]
    ) -> None:
        self._stats = stats
        self._begin = begin
        self._ran = ran
        self._end = end
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count = threading.Lock()
        #: tasks that have not finished
        self.waiting = 0
        #: failures since the last success
        self._failures = 0
        self._pause_end = self._next_warning = 0.0
        self._thread = threading.Thread(target=self._main, name="luce-cache-write", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether nothing is to be written now."""
        return time.monotonic() < self._pause_end

    def post(self, task: Callable[[], object] | None) -> None:
        """Run a task behind those posted before; None stops the thread."""
        with self._count:
            self.waiting += 1
        self._tasks.put(task)

    def succeeded(self) -> None:
        """A snapshot was written."""
        self._failures = 0

    def close(self, seconds: float) -> None:
        """Stop behind the tasks posted before, and wait up to `seconds` for it."""
        self.post(None)
        self._thread.join(seconds)

    def _main(self) -> None:
        self._begin()
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                self._fail(error)
            with self._count:
                self.waiting -= 1
            self._ran()
        self._end()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, SnapshotGoneError):
            self._stats.skipped += 1
            _log.info("a snapshot was not written: %s", error)
            return
        self._stats.failures += 1
        self._failures += 1
        if self._failures >= _FAILURES:
            self._failures, self._pause_end = 0, time.monotonic() + _PAUSE_SECONDS
        if not isinstance(error, OSError | LuceError):
            _log.error("a snapshot could not be written", exc_info=error)
        elif time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARN_SECONDS
            advice = "raise --kv-cache-budget or free space" if isinstance(error, StoreFullError) else "check the disk"
            _log.warning("a snapshot was not written: %s; %s, or name another --kv-cache-dir", error, advice)
