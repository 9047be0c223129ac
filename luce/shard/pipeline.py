"""Shards in the order of their layers, and the copies between them: work is only queued here.

The backend drives the chain of a whole model, a daemon the chain of its own devices.

A driver takes about a thousand launches before it blocks whoever queues another one, and a host shard works as it is
told. So that no shard waits because another one's queue is full, each has a thread of its own: `queue` gives a step to
all of them. One step alone goes through without them (`through`): a thread takes tens of microseconds to wake.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from luce.errors import BackendError, DeviceError
from luce.runtime.device import Event
from luce.runtime.step import Step
from luce.runtime.transfer import Link, Transfer
from luce.shard.shard import Activation, Pending, Shard, TransientActivation
from luce.shard.timing import Clock, ShardTimes

#: What a shard makes of a step, and when its work is done; of the last shard, when what `leave` did with it is.
Ran = tuple[Transfer | Activation | Pending, Event]
#: gives what the first shard is handed of a step, if anything; on that shard's thread
Enter = Callable[[Step], Transfer | None]
#: gets a step, what the last shard has made of it and when that is there, and says when nothing reads it; on its thread
Leave = Callable[[Step, Activation | Pending, Event], Event]

#: Steps per shard that may be queued and not done: enough that no shard waits for the host.
_AHEAD = 2


class Chain:
    """Shards are added in order; each hands on to the next one by a link. `peer` as in Link.

    One thread uses a chain; any may ask for `times`. While steps are with the shards' threads (not `idle`), only
    `queue`, `look`, `wait`, `settle` and `close` may be called.
    """

    def __init__(
        self,
        *,
        peer: bool,
        enter: Enter = lambda step: None,
        leave: Leave = lambda step, result, end: end,
    ) -> None:
        self._peer = peer
        self._enter, self._leave = enter, leave
        self.shards: list[Shard] = []
        #: from each shard to the next
        self.links: list[Link] = []
        self._names: list[str] = []
        self._devices: list[str] = []
        self._work: list[Clock] = []
        self._copies: list[Clock] = []
        self._threads: list[ThreadPoolExecutor] = []
        #: steps that were given to the threads and may not have come to their end there
        self._given: deque[Future[Ran]] = deque()
        #: when the last shard is done with steps
        self._ends: deque[Event] = deque()
        #: why the threads drop what they are given, until `settle`
        self.failure: BaseException | None = None

    def add(self, name: str, device: str, shard: Shard) -> None:
        """The next shard; the chain closes it. `name` stands before its device's errors, `device` in `times`."""
        self.shards.append(shard)
        self._names.append(name)
        self._devices.append(device)
        self._work.append(Clock())
        self._threads.append(ThreadPoolExecutor(1, f"luce {name}"))

    def link(self, size: int) -> None:
        """The way from the shard before the last one to the last one, for `size` float32 values at a time."""
        before, last = self.shards[-2:]
        self._copies.append(Clock())
        self.links.append(Link(before.device, last.device, size, peer=self._peer, watch=self._copies[-1].add))

    @property
    def idle(self) -> bool:
        """Whether no thread has anything to do."""
        # The last shard comes to a step when all others have been there.
        return not self._given or self._given[-1].done()

    def queue(self, step: Step) -> Future[Ran]:
        """Let each shard's thread run a step once the shard before it has. Waits if too many steps are on the way.

        Returns what the last shard will have made of it. Once a step has failed, those behind it are dropped and fail
        as well, until `settle`.
        """
        before: Future[Ran] | None = None
        for number, thread in enumerate(self._threads):
            before = thread.submit(self._follow, number, step, before)
        assert before is not None
        self._given.append(before)
        while len(self._given) > _AHEAD * len(self.shards):
            self._given.popleft().result()
        return before

    def through(self, step: Step) -> Ran:
        """Run a step through all shards here and now."""
        ran = self._run(0, step, self._enter(step))
        for number in range(1, len(self.shards)):
            ran = self._run(number, step, _transfer(ran))
        return ran

    def _follow(self, number: int, step: Step, before: Future[Ran] | None) -> Ran:
        """On a shard's thread."""
        handed = None if before is None else _transfer(before.result())
        if self.failure is not None:
            if handed is not None:
                handed.release(None)
            raise self.failure
        try:
            return self._run(number, step, self._enter(step) if before is None else handed)
        except BaseException as error:
            self.failure = error
            raise

    def _run(self, number: int, step: Step, handed: Transfer | None) -> Ran:
        """Queue a shard's work on a step, and the copy of what it hands on. Raises BackendError naming the shard."""
        shard = self.shards[number]
        device = shard.device
        with self._naming(number), contextlib.ExitStack() as failing:
            if handed is not None:
                failing.callback(handed.release, None)
            shard.announce(step, None if handed is None else tuple(handed.arrays))
            arrays = None if handed is None else handed.receive()
            start = device.record(timing=True)
            result = shard.forward(step, arrays)
            end = device.record(timing=True)
            self._work[number].add(start, end)
            ran: Transfer | Activation | Pending = result
            if number < len(self.links):
                assert isinstance(result, tuple)
                ran = transfer = self.links[number].send(result, end)
                done = transfer.source_read or end
            else:
                done = self._leave(step, result, end)
            if isinstance(result, TransientActivation) and done is not end:
                device.wait_for(done)
            failing.pop_all()
            if handed is not None:
                # What is handed on may lie in what was handed over.
                handed.release(done)
            if number == len(self.links):
                self._ends.append(done)
                if len(self._ends) > _AHEAD * len(self.shards):
                    self._ends.popleft().wait()
            return ran, done

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except DeviceError as error:
            # What another process reports names the shard already.
            name = "" if self.shards[number].remote else f"{self._names[number]}: "
            raise BackendError(f"{name}{error}") from error

    def look(self) -> None:
        """Count the work that is over. Raises LuceError if some of it failed."""
        for clock in (*self._work, *self._copies):
            clock.look()

    def times(self) -> tuple[ShardTimes, ...]:
        """What the shards' work and the copies between them took since the start. Any thread may ask."""
        copies = [*(clock.durations() for clock in self._copies), None]
        return tuple(
            ShardTimes(device, work.durations(), copied)
            for device, work, copied in zip(self._devices, self._work, copies, strict=True)
        )

    def worked(self) -> float:
        """Seconds that the shards' work took since the start, as far as it has been counted."""
        return sum(clock.total for clock in self._work)

    def wait(self) -> None:
        """Wait until the threads are idle. Raises what failed there."""
        if self._given:
            wait([self._given[-1]])
            self._given.clear()
        if self.failure is not None:
            raise self.failure

    def settle(self) -> None:
        """Wait until nothing runs, whether it fails or not. What the threads have not begun is dropped."""
        self.failure = self.failure or BackendError("dropped")
        with contextlib.suppress(BaseException):
            self.wait()
        self._ends.clear()
        for waiting in (*(shard.device.synchronize for shard in self.shards), *(link.settle for link in self.links)):
            with contextlib.suppress(DeviceError, BackendError):
                waiting()
        for clock in (*self._work, *self._copies):
            clock.forget()
        self.failure = None

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.settle()
        for thread in self._threads:
            thread.shutdown()
        self.links.clear()
        for shard in reversed(self.shards):
            shard.close()
        self.shards.clear()


def _transfer(ran: Ran) -> Transfer:
    assert isinstance(ran[0], Transfer)
    return ran[0]
