"""Threads that wait for a disk. They keep nobody from ending, as a disk may never answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """So many threads that do tasks in the order in which these come.

    They end with the process, whatever they wait for: at its end Python waits for those of concurrent.futures, and for
    all tasks that these were given.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], object]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[..., T], *arguments: Any) -> Future[T]:
        """Let a thread do a task; what it gives or raises is the future's."""
        future: Future[T] = Future()
        self._tasks.put((future, lambda: task(*arguments)))
        return future

    def close(self, seconds: float) -> None:
        """Cancel what has not begun. What has may take so long; then it is left to itself."""
        end = time.monotonic() + seconds
        with contextlib.suppress(Empty):
            while (item := self._tasks.get_nowait()) is not None:
                item[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while self._do():
            pass

    def _do(self) -> bool:
        # In a frame of its own: nothing of a task is kept while the next one is waited for.
        item = self._tasks.get()
        if item is None:
            return False
        future, task = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
        return True
