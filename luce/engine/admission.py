"""Who may wait and run, and what other threads ask of the engine's thread.

Other threads only append commands to the inbox; the engine's thread runs them between two steps. It sleeps when no
sequence is unfinished, so an unfinished sequence never has to wake it: that lets `SequenceHandle.cancel` do without a
lock, and be called from a destructor at any time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from luce.errors import QueueFullError, UnavailableError

Found = TypeVar("Found")

# Weight of the newest reply in the moving average of service time.
_NEWEST_WEIGHT = 0.2


class SequenceHandle:
    """A submitted sequence, as the submitter sees it."""

    def __init__(self, inbox: deque[Callable[[], None]], cancel: Callable[[SequenceHandle], None]) -> None:
        self._inbox = inbox
        self._cancel = cancel
        #: whether the last event is delivered or being delivered
        self.ended = False

    def cancel(self) -> None:
        """End the sequence before the next step, with FinishReason.CANCELLED. Idempotent, from any thread."""
        if not self.ended:
            self._inbox.append(lambda: self._cancel(self))


class Admission:
    """Admits as many sequences as may run and wait, and carries commands to the engine's thread.

    The calls for each sequence are, in turn: `submit`, `note_started` (it has a slot), `note_ended` (its slot is free)
    and `note_delivered` (its sink has the last event).
    """

    def __init__(self, *, slots: int, max_queue: int) -> None:
        self._slots = slots
        self._max_queue = max_queue
        self._inbox: deque[Callable[[], None]] = deque()
        #: guards all fields below
        self.lock = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._all_delivered = threading.Condition(self.lock)
        #: sequences that wait or run
        self._admitted = 0
        #: sequences that run
        self._running = 0
        #: sequences whose last event is not delivered yet
        self._undelivered = 0
        #: when the last step ended, or when there was work again
        self._last_progress = 0.0
        #: moving average of the seconds that a sequence has a slot
        self._service_seconds = 0.0
        self._draining = self._closing = self._broken = self._paused = False

    # From any thread.

    def handle(self, cancel: Callable[[SequenceHandle], None]) -> SequenceHandle:
        """A new handle, whose `cancel` calls this one on the engine's thread."""
        return SequenceHandle(self._inbox, cancel)

    def submit(self, add: Callable[[], None]) -> None:
        """Admit a sequence, which `add` queues on the engine's thread. Raises QueueFullError, UnavailableError."""
        with self.lock:
            if self._draining:
                raise shutting_down_error()
            if self._admitted >= self._slots + self._max_queue:
                raise self.queue_full_error(f"{self._max_queue} requests wait already (--max-queue)")
            if not self._undelivered:
                self._last_progress = time.monotonic()
            self._admitted += 1
            self._undelivered += 1
            self._inbox.append(add)
            self._work.notify()

    def post(self, command: Callable[[], None]) -> bool:
        """Have a command run between two steps. False if the thread is to end; the command never runs then."""
        with self.lock:
            if self._closing:
                return False
            self._inbox.append(command)
            self._work.notify()
            return True

    def call(self, work: Callable[[], Found], closed: Found) -> Found:
        """What `work` returns, which runs between two steps; `closed` if the thread is to end. Blocks, and raises what
        `work` raises."""
        answer = Future[Found]()

        def command() -> None:
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        return answer.result() if self.post(command) else closed

    def wake(self) -> None:
        """Have the engine's thread check again whether there is work."""
        with self.lock:
            self._work.notify()

    def drain(self) -> None:
        """Admit no more sequences. Idempotent."""
        with self.lock:
            self._draining = True

    def close(self, *, broken: bool = False) -> None:
        """Admit no more sequences, and end the thread; `broken` if a defect ends it. Idempotent."""
        with self.lock:
            self._draining = self._closing = True
            self._broken |= broken
            self._work.notify()

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until every sequence has had its last event; False if that takes longer than `timeout` seconds."""
        with self.lock:
            return self._all_delivered.wait_for(lambda: not self._undelivered, timeout)

    def counts(self) -> tuple[int, int, float]:
        """Sequences that wait, sequences that run, and EngineStats.stalled."""
        with self.lock:
            works = self._broken or (self._undelivered and not self._paused)
            stalled = time.monotonic() - self._last_progress if works else 0.0
            return self._admitted - self._running, self._running, stalled

    def queue_full_error(self, message: str) -> QueueFullError:
        """The error of a refused sequence. It says when to try again: after the mean time that a slot is taken."""
        return QueueFullError(message, retry_after=min(60, max(1, math.ceil(self._service_seconds))))

    # On the engine's thread.

    @property
    def commands(self) -> int:
        """Commands that were not run yet."""
        return len(self._inbox)

    @property
    def closing(self) -> bool:
        """Whether the thread is to end."""
        return self._closing

    def wait_for_work(self, more: Callable[[], bool]) -> None:
        """Sleep until there is a command, until the thread is to end, or until `more` holds."""
        with self.lock:
            self._work.wait_for(lambda: self.commands or self._closing or more())

    def wait_for_command(self, seconds: float) -> None:
        """Sleep until there is a command, or for so long; nothing stalls meanwhile."""
        with self.lock:
            self._work.wait_for(lambda: self.commands or self._closing, seconds)
            self._last_progress = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing stalls until the block ends, however long no step runs."""
        self._paused = True
        try:
            yield
        finally:
            self._last_progress = time.monotonic()
            self._paused = False

    def run_commands(self) -> None:
        """Run the commands of other threads."""
        while self._inbox:
            self._inbox.popleft()()

    def note_step(self) -> None:
        """A step has ended."""
        self._last_progress = time.monotonic()

    def note_started(self) -> None:
        """A sequence has a slot."""
        with self.lock:
            self._running += 1

    def note_ended(self, seconds: float | None) -> None:
        """A sequence ended after this time in a slot; None if it never had one."""
        with self.lock:
            self._admitted -= 1
            if seconds is not None:
                self._running -= 1
                mean = self._service_seconds
                self._service_seconds = seconds if not mean else mean + _NEWEST_WEIGHT * (seconds - mean)

    def note_delivered(self) -> None:
        """The last event of a sequence is delivered."""
        with self.lock:
            self._undelivered -= 1
            if not self._undelivered:
                self._all_delivered.notify_all()


def shutting_down_error() -> UnavailableError:
    """The error of sequences that are submitted, or still wait, while the server shuts down."""
    return UnavailableError("the server is shutting down", code="draining")
