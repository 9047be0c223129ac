"""The requests of a shard to its daemon, and the responses, which arrive in the same order."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from luce.errors import LuceError
from luce.ipc.channel import SMALL_FRAME, Channel, ChannelError, ChannelTimeoutError, ProtocolError
from luce.ipc.lifecycle import Failed, error_of
from luce.ipc.supervisor import Supervisor
from luce.remote.messages import Done, Drop, Response
from luce.runtime.device import Event, Flag
from luce.runtime.step import Output

#: seconds that a request may take for each row, and for each byte, beside the timeout of all requests
PER_ROW = 0.1
PER_BYTE = 1e-7
#: most requests whose output has been read, but whose response has not been received
_MAX_BEHIND = 8
#: looks at an output flag for each look at the channel
_LOOKS = 16


def check_done(response: Response) -> None:
    """Raises ProtocolError unless the response is Done."""
    if not isinstance(response, Done):
        raise ProtocolError(f"it sent {type(response).__name__} instead of Done")


@dataclass(frozen=True)
class Expected:
    """What to expect of the response to a request."""

    #: gets the response; raises ProtocolError if it is not the right one
    take: Callable[[Response], None] = check_done
    #: seconds that it may take beside the timeout of all requests
    seconds: float = 0.0
    #: most bytes of its arrays
    limit: int = SMALL_FRAME
    #: seconds to poll for it without sleeping
    spin: float = 0.0


class Requests:
    """The requests of one shard, for one thread. `before` is called before each request that has a response.

    If the daemon is lost, all open requests fail with ShardLostError.
    """

    def __init__(self, daemon: Supervisor, before: Callable[[], None] = lambda: None) -> None:
        #: the daemon's life that the requests go to; `lost` updates it
        self.generation = 0
        #: the numbers of saved states
        self.saved_numbers = itertools.count(1)
        #: numbers of saved states to release; any thread may append to it
        self.dropped: deque[int] = deque()
        #: messages without a response, for the time before the next request
        self.later: deque[msgspec.Struct] = deque()
        #: the last request, unless the daemon has been lost since
        self.newest: Request | None = None
        #: seconds that threads have waited for responses and outputs; any thread may read it
        self.waited = 0.0
        self.daemon = daemon
        self._before = before
        self._open: deque[Request] = deque()
        self._numbers = 0

    def channel(self) -> Channel[Response]:
        """The channel to the daemon. Raises ShardLostError."""
        return self.daemon.channel(self.generation)

    def lost(self) -> str:
        """Why the daemon has been lost since the last call, and all state with it; empty if it has not."""
        known, self.generation = self.generation, self.daemon.generation
        return "" if known == self.generation else self.daemon.loss()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message that has no response."""
        self._send(self.channel(), message)

    def ask(self, message: msgspec.Struct, expected: Expected | None = None) -> Request:
        """Send a request. The default expects Done. Raises ShardLostError."""
        self._before()
        channel = self.channel()
        if self.dropped:
            # Any thread may hold the last reference to a saved state, and release it meanwhile.
            self._send(channel, Drop(tuple(self.dropped.popleft() for _ in range(len(self.dropped)))))
        while self.later:
            self._send(channel, self.later.popleft())
        self._send(channel, message)
        request = Request(self, channel, self._numbers, expected or Expected(), self.daemon.timeouts.request)
        self._open.append(request)
        self.newest = request
        return request

    def pump(self, request: Request, *, wait: bool) -> None:
        """Receive responses until that to `request`; without waiting only those that have arrived."""
        while not request.is_over and (wait or request.channel.ready()):
            self._receive()

    def catch_up(self) -> None:
        """Receive the responses that have arrived. Those to requests whose output was read before may be among them."""
        while self._open and (self._open[0].channel.ready() or len(self._open) > _MAX_BEHIND):
            head = self._open[0]
            self._receive()
            if head.error is not None and head.output_was_early:
                raise head.error

    def lost_by(self, channel: Channel[Response], why: ChannelError) -> NoReturn:
        """Let all open requests fail because the channel failed. Raises ShardLostError."""
        error = self.daemon.lost(channel, why)
        for request in self._open:
            request.error = error
        self._open.clear()
        self.newest = None
        raise error

    def _send(self, channel: Channel[Response], message: msgspec.Struct) -> None:
        self._numbers += 1
        pending, seconds = self._receive_pending if self._open else None, self.daemon.timeouts.request
        try:
            channel.send(self._numbers, message, timeout=seconds, receive_pending=pending)
        except ChannelError as error:
            self.lost_by(channel, _with_limit(seconds, error))

    def _receive_pending(self) -> bool:
        """Receive a response that arrives during a send. Returns whether another one may arrive."""
        self._receive()
        return bool(self._open)

    def _receive(self) -> None:
        head = self._open[0]
        try:
            expected = head.expected
            number, response = head.channel.receive(timeout=head.timeout, limit=expected.limit, spin=expected.spin)
            if number != head.number:
                raise ProtocolError(f"it responded to request {number} instead of {head.number}")
            head.finish(response, self.daemon.name)
            self._open.popleft()
        except ChannelError as error:
            self.lost_by(head.channel, _with_limit(head.timeout, error))


class Request(Event):
    """A request to the daemon. The event is its response, or its output if that arrives earlier in shared memory."""

    def __init__(
        self, requests: Requests, channel: Channel[Response], number: int, expected: Expected, timeout: float
    ) -> None:
        self._requests = requests
        self.channel = channel
        self.number = number
        self.expected = expected
        #: seconds, all told
        self.timeout = timeout + expected.seconds
        self._output_flag: Flag | None = None
        self._read: Callable[[], Output] | None = None
        self._work = 0.0
        self._output: Output | None = None
        self._finished = False
        self.error: LuceError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the response has arrived, or never will."""
        return self._finished or self.error is not None

    @property
    def is_read(self) -> bool:
        """Whether its part of the shared memory may be overwritten."""
        return self._output is not None or self.error is not None

    @property
    def output_was_early(self) -> bool:
        """Whether its output has been read, while its response has not arrived."""
        return self._output is not None and not self._finished

    def expect_output(self, flag: Flag, read: Callable[[], Output]) -> None:
        """The output can be read as soon as the flag is raised. `read` raises ProtocolError."""
        self._output_flag, self._read = flag, read

    def finish(self, response: Response, name: str) -> None:
        """Take the response of the daemon `name`. Raises ProtocolError if it is not the right one."""
        if isinstance(response, Failed):
            self.error = error_of(response, name)
            return
        self.expected.take(response)
        if isinstance(response, Done):
            self._work = sum(response.seconds)
            self._output = self._output or response.output or (self._read() if self._read is not None else None)
        # `take` may refer to an object that refers to this request.
        self.expected = Expected()
        self._finished = True

    def output(self) -> Output:
        """The output of the last shard. Waits for it."""
        self.wait()
        if self._output is None:
            assert self._read is not None
            try:
                self._output = self._read()
            except ProtocolError as error:
                self._requests.lost_by(self.channel, error)
        return self._output

    def done(self) -> bool:
        self._requests.pump(self, wait=False)
        if self.error is not None:
            raise self.error
        return self._finished

    def wait(self) -> None:
        begin = time.monotonic()
        try:
            if not self._has_output(begin):
                self._requests.pump(self, wait=True)
        finally:
            self._requests.waited += time.monotonic() - begin
        if self.error is not None:
            raise self.error

    def _has_output(self, begin: float) -> bool:
        """Whether the output is in shared memory. Polls for it without sleeping as long as `expected.spin` allows."""
        if self._output_flag is None:
            return False
        end = begin + self.expected.spin
        # A look at the channel takes as long as many at the flag, which mostly is what comes first.
        while not any(self._output_flag.done() for _ in range(_LOOKS)):
            if self.is_over or time.monotonic() >= end:
                return self._output_flag.done()
            self._requests.pump(self, wait=False)
        return True

    def seconds_since(self, start: Event) -> float:
        """What the daemon's devices worked. The time between two responses includes what the daemon waited for."""
        return self._work


def _with_limit(seconds: float, error: ChannelError) -> ChannelError:
    """The error, with the limit in its message if it is a timeout."""
    if not isinstance(error, ChannelTimeoutError):
        return error
    return ChannelTimeoutError(f"{error} within {seconds:.4g} s (--shard-timeout)")
