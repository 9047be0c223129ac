"""What a shard asks its daemon for, and the answers, which come in the same order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import msgspec

from luce.errors import LuceError
from luce.ipc.channel import Channel, ChannelError, GarbageError, LateError
from luce.ipc.messages import Done, Drop, Failed, Reply
from luce.ipc.supervisor import Supervisor, failure
from luce.runtime.device import Event, Flag
from luce.runtime.step import Output

#: seconds that a request may take for each row, and for each byte, beside the limit of all requests
PER_ROW = 0.1
PER_BYTE = 1e-7
#: answers that may be on their way while their output has been read already
_BEHIND = 8


class Requests:
    """The requests of one shard. For one thread. `before` is called before each.

    `generation`: the daemon's life that they are for, which `lost` brings up to date. A daemon that is lost is the
    answer to all of them: ShardLostError.
    """

    def __init__(self, daemon: Supervisor, before: Callable[[], None] = lambda: None) -> None:
        self.generation = 0
        #: numbers of what was put aside and is of no use any more; any thread may append to it
        self.dropped: deque[int] = deque()
        #: what was asked for last, unless the daemon was lost since
        self.newest: Request | None = None
        #: seconds that threads have waited for answers, and for outputs that are told before; any thread may read it
        self.waited = 0.0
        self._daemon = daemon
        self._before = before
        self._asked: deque[Request] = deque()
        self._numbers = 0

    def channel(self) -> Channel[Reply]:
        """The way to the daemon. Raises ShardLostError."""
        return self._daemon.channel(self.generation)

    def lost(self) -> str:
        """Why all that the daemon kept has been lost since the last call; empty if it has not."""
        known, self.generation = self.generation, self._daemon.generation
        return "" if known == self.generation else self._daemon.loss()

    def send(self, message: msgspec.Struct) -> None:
        """A message that gets no answer."""
        self._send(self.channel(), message)

    def ask(
        self,
        message: msgspec.Struct,
        *,
        seconds: float,
        limit: int,
        spin: float = 0.0,
        take: Callable[[Reply], None],
    ) -> Request:
        """`take` gets the answer, and raises GarbageError if it is none.

        `seconds` that it may take beside the limit of all requests; `limit` of the bytes behind its message; `spin`:
        seconds to look for it without sleeping.
        """
        self._before()
        channel = self.channel()
        if self.dropped:
            # Who keeps the last reference may be on any thread, and may go meanwhile.
            self._send(channel, Drop(tuple(self.dropped.popleft() for _ in range(len(self.dropped)))))
        self._send(channel, message)
        request = Request(self, channel, self._numbers, self._daemon.limits.request + seconds, limit, spin, take)
        self._asked.append(request)
        self.newest = request
        return request

    def pump(self, request: Request, *, wait: bool) -> None:
        """Receive answers until the one to a request, or all that are there without waiting."""
        while not request.over and (wait or request.channel.ready()):
            self._receive()

    def catch_up(self) -> None:
        """Receive answers that are there; there may be some to requests whose output was read before."""
        while self._asked and (self._asked[0].channel.ready() or len(self._asked) > _BEHIND):
            head = self._asked[0]
            self._receive()
            if head.error is not None and head.early:
                raise head.error

    def lost_by(self, channel: Channel[Reply], why: ChannelError) -> NoReturn:
        """The daemon's death is the answer to all that was asked."""
        error = self._daemon.lost(channel, why)
        for request in self._asked:
            request.error = error
        self._asked.clear()
        self.newest = None
        raise error

    def _send(self, channel: Channel[Reply], message: msgspec.Struct) -> None:
        self._numbers += 1
        hear, seconds = self._hear if self._asked else None, self._daemon.limits.request
        try:
            channel.send(self._numbers, message, timeout=seconds, hear=hear)
        except ChannelError as error:
            self.lost_by(channel, _within(seconds, error))

    def _hear(self) -> bool:
        """An answer comes while something is sent. Whether there may be another one."""
        self._receive()
        return bool(self._asked)

    def _receive(self) -> None:
        head = self._asked[0]
        try:
            number, reply = head.channel.receive(timeout=head.seconds, limit=head.limit, spin=head.spin)
            if number != head.number:
                raise GarbageError(f"it answered request {number} instead of {head.number}")
            head.finish(reply, self._daemon.name)
            self._asked.popleft()
        except ChannelError as error:
            self.lost_by(head.channel, _within(head.seconds, error))


class Request(Event):
    """Something that the daemon was asked for; the event is its answer, or the output that is told before it."""

    def __init__(
        self,
        requests: Requests,
        channel: Channel[Reply],
        number: int,
        seconds: float,
        limit: int,
        spin: float,
        take: Callable[[Reply], None],
    ) -> None:
        self._requests = requests
        self.channel = channel
        self.number = number
        self.seconds = seconds
        self.limit = limit
        self.spin = spin
        self._take = take
        self._told: Flag | None = None
        self._read: Callable[[], Output] | None = None
        self._work = 0.0
        self._output: Output | None = None
        self._done = False
        self.error: LuceError | None = None

    @property
    def over(self) -> bool:
        """Whether the answer has come, or will never come."""
        return self._done or self.error is not None

    @property
    def read(self) -> bool:
        """Whether nobody needs any more what lies in shared memory for it."""
        return self._output is not None or self.error is not None

    @property
    def early(self) -> bool:
        """Whether its output was read before the answer came."""
        return self._output is not None and not self._done

    def expect(self, told: Flag, read: Callable[[], Output]) -> None:
        """The output can be read once the word tells it. `read` raises GarbageError."""
        self._told, self._read = told, read

    def finish(self, reply: Reply, name: str) -> None:
        """The answer. Raises GarbageError if it is none."""
        if isinstance(reply, Failed):
            self.error = failure(name, reply)
            return
        self._take(reply)
        if isinstance(reply, Done):
            self._work = reply.seconds
            self._output = self._output or reply.output or (self._read() if self._read is not None else None)
        # It may refer to whoever keeps this request.
        self._take = _nothing
        self._done = True

    def output(self) -> Output:
        """What the last shard returns; waits for it."""
        self.wait()
        if self._output is None:
            assert self._read is not None
            try:
                self._output = self._read()
            except GarbageError as error:
                self._requests.lost_by(self.channel, error)
        return self._output

    def done(self) -> bool:
        self._requests.pump(self, wait=False)
        if self.error is not None:
            raise self.error
        return self._done

    def wait(self) -> None:
        begin = time.monotonic()
        try:
            if not self._is_told(begin):
                self._requests.pump(self, wait=True)
        finally:
            self._requests.waited += time.monotonic() - begin
        if self.error is not None:
            raise self.error

    def _is_told(self, begin: float) -> bool:
        """Whether the output is there. Looks for it without sleeping, as long as the request is to be looked for."""
        if self._told is None:
            return False
        end = begin + self.spin
        while not self._told.done() and not self.over and time.monotonic() < end:
            self._requests.pump(self, wait=False)
        return self._told.done()

    def seconds_since(self, start: Event) -> float:
        """The daemon's own measure: between the answers lies what it waited for as well."""
        return self._work


def _within(seconds: float, error: ChannelError) -> ChannelError:
    """The error, with the limit if that is what it is about."""
    return LateError(f"{error} within {seconds:.4g} s (--shard-timeout)") if isinstance(error, LateError) else error


def _nothing(reply: Reply) -> None:
    pass
