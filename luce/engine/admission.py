"""What other threads want of the engine's thread, and how many of them wait.

They only append to the inbox, which the engine's thread works off between two steps. It sleeps when nothing is left to
do, so an unfinished sequence never has to wake it: that lets `Ticket.cancel` do without a lock, and be called from a
destructor at any time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from luce.errors import QueueFullError, UnavailableError

# Weight of the newest reply in the moving average of service time.
_NEWEST = 0.2


class Ticket:
    """A submitted sequence, in the hands of the one who submitted it."""

    def __init__(self, inbox: deque[Callable[[], None]], cancel: Callable[[Ticket], None]) -> None:
        self._inbox = inbox
        self._cancel = cancel
        #: whether the last event is given or being given
        self.over = False

    def cancel(self) -> None:
        """End the sequence before the next step, with FinishReason.CANCELLED. Idempotent, from any thread."""
        if not self.over:
            self._inbox.append(lambda: self._cancel(self))


class Admission:
    """Lets in as many sequences as may run and wait, and carries commands to the engine's thread.

    A sequence is `enter`ed, `admitted` to a slot, has `left` it, and is `gone` after its last event.
    """

    def __init__(self, *, slots: int, max_queue: int) -> None:
        self._slots = slots
        self._max_queue = max_queue
        self._inbox: deque[Callable[[], None]] = deque()
        # The lock guards what follows.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        #: sequences that count against the queue, those of them that have a slot, and all whose last event is to come
        self._open = self._running = self._pending = 0
        #: when the last step ended, or when there was work again; seconds that a sequence has a slot
        self._progress = self._service = 0.0
        self._draining = self._closing = self._broken = False

    # From any thread.

    def ticket(self, cancel: Callable[[Ticket], None]) -> Ticket:
        """A new one, which calls `cancel` on the engine's thread."""
        return Ticket(self._inbox, cancel)

    def enter(self, add: Callable[[], None]) -> None:
        """One more sequence, which `add` takes in. Raises QueueFullError, UnavailableError."""
        with self._lock:
            if self._draining:
                raise shutting_down()
            if self._open >= self._slots + self._max_queue:
                raise self.full(f"{self._max_queue} requests wait already (--max-queue)")
            if not self._pending:
                self._progress = time.monotonic()
            self._open += 1
            self._pending += 1
            self._inbox.append(add)
            self._work.notify()

    def tell(self, command: Callable[[], None]) -> bool:
        """Have a command run between two steps. False, and it never runs, if the thread is to end."""
        with self._lock:
            if self._closing:
                return False
            self._inbox.append(command)
            self._work.notify()
            return True

    def wake(self) -> None:
        """Whatever the engine's thread waits for may be there."""
        with self._lock:
            self._work.notify()

    def drain(self) -> None:
        """Let nobody in any more. Idempotent."""
        with self._lock:
            self._draining = True

    def close(self, *, broken: bool = False) -> None:
        """Let nobody in any more, and end the thread; `broken` if a defect ends it. Idempotent."""
        with self._lock:
            self._draining = self._closing = True
            self._broken |= broken
            self._work.notify()

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until every sequence has had its last event; False if that takes longer than `timeout` seconds."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._pending, timeout)

    def counts(self) -> tuple[int, int, float]:
        """Sequences that wait, sequences that run, and EngineStats.stalled."""
        with self._lock:
            stalled = time.monotonic() - self._progress if self._pending or self._broken else 0.0
            return self._open - self._running, self._running, stalled

    def full(self, message: str) -> QueueFullError:
        """The error of a sequence for which there is no room, saying when there may be."""
        return QueueFullError(message, retry_after=min(60, max(1, math.ceil(self._service))))

    # On the engine's thread.

    @property
    def closing(self) -> bool:
        """Whether the thread is to end."""
        return self._closing

    def wait(self, other: Callable[[], bool]) -> None:
        """Sleep until there is a command, or the `other` reason to go on."""
        with self._lock:
            self._work.wait_for(lambda: self._inbox or self._closing or other())

    def work_off(self) -> None:
        """Run the commands."""
        while self._inbox:
            self._inbox.popleft()()

    def stepped(self) -> None:
        """A step has ended."""
        self._progress = time.monotonic()

    def admitted(self) -> None:
        """A sequence has a slot."""
        with self._lock:
            self._running += 1

    def left(self, seconds: float | None) -> None:
        """A sequence makes room for another one, after so long in a slot; None if it never had one."""
        with self._lock:
            self._open -= 1
            if seconds is not None:
                self._running -= 1
                self._service = seconds if not self._service else self._service + _NEWEST * (seconds - self._service)

    def gone(self) -> None:
        """A sequence has had its last event."""
        with self._lock:
            self._pending -= 1
            if not self._pending:
                self._quiet.notify_all()


def shutting_down() -> UnavailableError:
    """The error of those who come too late."""
    return UnavailableError("the server is shutting down", code="draining")
