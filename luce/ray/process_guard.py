"""No child outlives the process that started it, and no process of Ray the node that it belongs to.

Ray ends the processes of a node when its raylet ends in order. A raylet that is killed, or a node that stood still and
was given up meanwhile, leaves actors with their children behind, which hold a GPU while Ray starts the next ones.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO

#: seconds between two looks at the parent
INTERVAL = 0.5
_GUARDED = "luce.ray.guarded"


class Nursery:
    """Starts children that the kernel kills when this process ends.

    PR_SET_PDEATHSIG follows the thread that starts a child, not its process: all start on one thread that stays.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="nursery", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._tasks.get()()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """A child in a process group of its own. `output`: where its standard output and error go. Raises OSError."""
        guarded = [sys.executable, "-m", _GUARDED, str(os.getpid()), *command]
        done: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

        def begin() -> None:
            try:
                child = subprocess.Popen(
                    guarded,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=None if output is None else subprocess.STDOUT,
                    process_group=0,
                    pass_fds=pass_fds,
                )
            except BaseException as error:
                done.put(error)
            else:
                done.put(child)

        self._tasks.put(begin)
        found = done.get()
        if isinstance(found, BaseException):
            raise found
        return found


def stop(child: subprocess.Popen[bytes], seconds: float) -> int:
    """End a child: SIGTERM, after `seconds` SIGKILL for its process group. Returns its exit status."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return child.wait()


class Watch:
    """When a process of a node has to end. Pure: the caller says what it sees, and when.

    A control store that does not answer gives nobody else this process's place, so it goes on without: only one that
    answers can have given the node up.

    `parent`: the process id of the raylet that started it. `timeout`: seconds without the control store after which it
    ends nevertheless; 0: never.
    """

    def __init__(self, parent: int, timeout: float, now: float) -> None:
        self._parent, self._timeout, self._answered = parent, timeout, now

    def reason(self, parent: int, now: float, answers: Collection[bool]) -> str:
        """Why to end now, "" for going on. `answers`: of the control store since the last call, whether it has this
        node as alive."""
        if parent != self._parent:
            return "the raylet that started this process is gone"
        if not all(answers):
            return "the control store has given this node up"
        if answers:
            self._answered = now
        elif self._timeout and now - self._answered > self._timeout:
            return f"the control store has not answered for {self._timeout:g} s"
        return ""


def watch(alive: Callable[[], bool | None], timeout: float, end: Callable[[str], None]) -> threading.Thread:
    """A thread that calls `end` with the reason once this process has to end. `alive` asks the control store whether
    this node is alive, None if it does not answer, and may take long."""
    guard = Watch(os.getppid(), timeout, time.monotonic())
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        while True:
            if (answer := alive()) is not None:
                heard.put(answer)
            time.sleep(INTERVAL)

    def look() -> None:
        while True:
            answers = [heard.get() for _ in range(heard.qsize())]
            if reason := guard.reason(os.getppid(), time.monotonic(), answers):
                end(reason)
                return
            time.sleep(INTERVAL)

    # On a thread of its own: a call that hangs must not keep the other from looking.
    threading.Thread(target=ask, name="control-store", daemon=True).start()
    thread = threading.Thread(target=look, name="parent-watch", daemon=True)
    thread.start()
    return thread


def end_now(reason: str) -> None:
    """End this process at once, whatever its threads do; its children follow."""
    os.write(2, f"luce: {reason}\n".encode())
    os._exit(1)
