"""Shards in the order of their layers, and the copies between them. All calls only queue work.

The backend drives the pipeline of a whole model, a daemon the pipeline of its own devices.

A GPU driver takes about a thousand launches before it blocks the thread that queues another one, and a host shard
computes during the call. Each shard has its own thread, so no shard waits because another one's queue is full; `queue`
submits a step to all threads. A single step needs no threads (`run`): a thread takes tens of microseconds to wake.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, repeat

from luce.errors import BackendError, DeviceError
from luce.ops.handover import can_hand_over, hand_over
from luce.runtime.device import Event
from luce.runtime.step import PendingMasks, Step
from luce.runtime.transfer import Link, Transfer
from luce.shard.shard import Activation, DeferredOutput, Shard, ShardResult, TransientActivation
from luce.shard.timing import Clock, SequenceRows, ShardTimes

#: A shard's result for a step, and the event that ends its work; for the last shard, the event that `leave` returns.
Result = tuple[Transfer | ShardResult, Event]
#: Returns the activation of a step for the first shard, if there is one. Called on that shard's thread.
Enter = Callable[[Step], Transfer | None]
#: Gets a step, the last shard's result and the event that ends its work. Returns the event after which nothing reads
#: the result. Called on that shard's thread.
Leave = Callable[[Step, ShardResult, Event], Event]

#: most unfinished steps in the queue, per shard: enough that no shard waits for the host
_AHEAD = 2


class Pipeline:
    """Shards, added in order, and a link from each to the next. `peer` as in Link.

    One thread uses a pipeline; any thread may call `times`. While steps are on the shards' threads (not `idle`), only
    `queue`, `count_times`, `wait`, `settle` and `close` may be called.
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
        #: results of the last shard for steps that may still be on the threads
        self._queued: deque[Future[Result]] = deque()
        #: events that end the last shard's work on steps
        self._ends: deque[Event] = deque()
        #: why the threads drop queued steps, until `settle`
        self.failure: BaseException | None = None

    def add(self, name: str, device: str, shard: Shard) -> None:
        """Append a shard, which the pipeline closes. `name` precedes its device's errors; `times` reports `device`."""
        self.shards.append(shard)
        self._names.append(name)
        self._devices.append(device)
        self._work.append(Clock())
        self._threads.append(ThreadPoolExecutor(1, f"luce {name}"))

    def link(self, size: int) -> None:
        """Link the last two shards, for activations of at most `size` float32 values."""
        before, last = self.shards[-2:]
        self._copies.append(Clock())
        self.links.append(Link(before.device, last.device, size, peer=self._peer, watch=self._copies[-1].add))

    @property
    def idle(self) -> bool:
        """Whether no thread has work."""
        # The last shard runs a step after all others.
        return not self._queued or self._queued[-1].done()

    def queue(self, step: Step) -> Future[Result]:
        """Run a step on the shards' threads, one shard after the other. Waits while too many steps are queued.

        Returns the future result of the last shard. Once a step has failed, later ones are dropped and fail too, until
        `settle`.
        """
        before: Future[Result] | None = None
        for number, thread in enumerate(self._threads):
            before = thread.submit(self._follow, number, step, before)
        assert before is not None
        self._queued.append(before)
        while len(self._queued) > _AHEAD * len(self.shards):
            self._queued.popleft().result()
        return before

    def run(self, step: Step) -> Result:
        """Run a step through all shards on this thread."""
        for number, link in enumerate(self.links, start=1):
            # A CPU computes during its call: the daemon of the next one reads and checks the step meanwhile.
            before, shard = self.shards[number - 1], self.shards[number]
            if before.device.host and shard.device.host and shard.remote:
                shard.announce(step, (link.next_memory,))
        result = self._run(0, step, self._enter(step), alone=True)
        for number in range(1, len(self.shards)):
            result = self._run(number, step, _transfer(result), alone=True)
        return result

    def queue_output(self, result: Result, masks: PendingMasks | None) -> Result:
        """Queue the output of the newest step, of which `run` returned a DeferredOutput."""
        deferred, end = result
        assert isinstance(deferred, DeferredOutput)
        with self._naming(len(self.links)):
            return deferred.queue(masks), end

    def _follow(self, number: int, step: Step, before: Future[Result] | None) -> Result:
        """Run a step on a shard's thread once the previous shard has run it."""
        incoming = None if before is None else _transfer(before.result())
        if self.failure is not None:
            if incoming is not None:
                incoming.release(None)
            raise self.failure
        try:
            return self._run(number, step, self._enter(step) if before is None else incoming)
        except BaseException as error:
            self.failure = error
            raise

    def _run(self, number: int, step: Step, incoming: Transfer | None, *, alone: bool = False) -> Result:
        """Queue a shard's work on a step, and the copy of its result. Raises BackendError naming the shard.

        `alone`: whether this thread drives all shards.
        """
        shard = self.shards[number]
        device = shard.device
        with self._naming(number), contextlib.ExitStack() as failing:
            if incoming is not None:
                failing.callback(incoming.release, None)
            shard.announce(step, None if incoming is None else tuple(incoming.arrays))
            arrays = None if incoming is None else incoming.receive()
            start = device.record(timing=True)
            made = shard.forward(step, arrays)
            end = device.record(timing=True)
            self._work[number].add(start, end, sequence_rows(step))
            result: Transfer | ShardResult = made
            if number < len(self.links):
                assert isinstance(made, tuple)
                handed = self._hand_over(number, step, made, end) if alone else None
                result = outgoing = handed or self.links[number].send(made, end)
                done = outgoing.source_read or end
            else:
                done = self._leave(step, made, end)
            if isinstance(made, TransientActivation) and done is not end:
                device.wait_for(done)
            failing.pop_all()
            if incoming is not None:
                # The result may lie in the memory of the incoming activation.
                incoming.release(done)
            if number == len(self.links):
                self._ends.append(done)
                if len(self._ends) > _AHEAD * len(self.shards):
                    self._ends.popleft().wait()
            return result, done

    def _hand_over(self, number: int, step: Step, made: Activation, end: Event) -> Transfer | None:
        """Let a shard's device hand its result to the next one's daemon, if it can; the host looks on."""
        link, device, following = self.links[number], self.shards[number].device, self.shards[number + 1]
        if not can_hand_over(device, made):
            return None
        # Before the rows: the daemon's devices have the step queued when the flag is raised.
        flag = following.announce(step, (link.next_memory,))
        if flag is None:
            return None
        return link.send_on(device, made, end, lambda places: hand_over(device, made, places, flag))

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except DeviceError as error:
            # Errors of another process name the shard already.
            name = "" if self.shards[number].remote else f"{self._names[number]}: "
            raise BackendError(f"{name}{error}") from error

    def count_times(self) -> None:
        """Count the time of finished work. Raises LuceError if some of the work failed."""
        for clock in (*self._work, *self._copies):
            clock.count()

    def times(self) -> tuple[ShardTimes, ...]:
        """Seconds that the shards' work and the copies between them took since the start. Any thread may call it, also
        while shards are added."""
        copies = chain((clock.durations() for clock in self._copies), repeat(None))
        # The last shard has no copies, nor have shards that are not linked yet.
        found = zip(self._devices, self._work, copies, strict=False)
        return tuple(ShardTimes(device, work.durations(), copied) for device, work, copied in found)

    def watch_rows(self, shard: int, on_rows: Callable[[SequenceRows, float], None] | None) -> None:
        """Let a function get the rows and the seconds of each step of one sequence in a shard, when `count_times`
        counts it."""
        self._work[shard].on_rows = on_rows

    def work_seconds(self) -> list[float]:
        """Seconds that each shard's counted work took since the start."""
        return [clock.total for clock in self._work]

    def wait(self) -> None:
        """Wait until the threads are idle. Raises their first error."""
        if self._queued:
            wait([self._queued[-1]])
            self._queued.clear()
        if self.failure is not None:
            raise self.failure

    def settle(self) -> None:
        """Wait until nothing runs, and ignore failures. Steps that the threads have not begun are dropped."""
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


def sequence_rows(step: Step) -> SequenceRows | None:
    """The rows of a step on one sequence; None for steps on several ones, and where several rows have outputs."""
    outputs = len(step.output_rows)
    return SequenceRows(int(step.positions[0]), step.rows, outputs) if len(step.spans) == 1 >= outputs else None


def _transfer(result: Result) -> Transfer:
    assert isinstance(result[0], Transfer)
    return result[0]
