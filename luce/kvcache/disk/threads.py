"""Worker threads that wait for a disk. They do not keep the process alive, as a disk may never answer."""

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
    """`count` threads that run tasks in the order of submission.

    The threads end with the process, whatever they wait for. Python's own executors do not: when the process exits,
    Python waits for their threads and for all tasks submitted to them.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], object]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a task on a thread. The future gets the result or the exception."""
        future: Future[T] = Future()
        self._tasks.put((future, lambda: task(*arguments)))
        return future

    def close(self, seconds: float) -> None:
        """Cancel the tasks that have not begun, and wait up to `seconds` for the others. Those that take longer go on
        alone."""
        end = time.monotonic() + seconds
        with contextlib.suppress(Empty):
            while (item := self._tasks.get_nowait()) is not None:
                item[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        # A function of its own: a thread that waits for its next task holds no references of the last one.
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
