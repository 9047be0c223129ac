"""Keeps one daemon running: starts it, lets it load, watches its heartbeat, and restarts it when it dies.

All of that happens on a thread of the supervisor. The engine's thread only sends requests and waits for responses on
the channel of a daemon that is ready; when the channel fails, it calls `lost`, which returns why the daemon is gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from luce import __version__, log
from luce.errors import BackendError, DeviceError, LuceError, ShardLostError
from luce.ipc.arena import Arena
from luce.ipc.channel import (
    DTYPES,
    Channel,
    ChannelError,
    ChannelTimeoutError,
    ConnectionClosedError,
    ProtocolError,
)
from luce.ipc.heartbeat import Heartbeat
from luce.ipc.lifecycle import Failed, Hello, Open, Pong, error_of
from luce.runtime.device import Memory

_log = logging.getLogger(__name__)

#: share of its layers that a daemon loads between two lines of the log, and that counts as progress
_LOG_EVERY, _PROGRESS = 0.1, 1e-3
#: lanes of a warp or a wavefront, and of the CPU
_LANES = (1, 32, 64)
#: seconds that a daemon has to receive a message
SEND_TIMEOUT = 30.0
#: most restarts within RESTART_WINDOW seconds, and the seconds before each of them
RESTARTS, RESTART_WINDOW = 5, 600.0
RESTART_DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0)
#: seconds between later attempts, for a daemon that cannot even be started or connected to
RETRY_INTERVAL = 30.0
#: seconds that `lost` waits for the reason; longer than a daemon has to end
_REASON_TIMEOUT = 20.0

Answer = TypeVar("Answer", bound=msgspec.Struct)
Result = TypeVar("Result")


class Ask(Protocol):
    """Sends a request before the load, and returns its response, of the given type."""

    def __call__(self, request: msgspec.Struct, response: type[Answer], /) -> Answer: ...


class Peer(Protocol):
    """A daemon that has just been started, or connected to."""

    requests: socket.socket
    heartbeat: socket.socket
    #: the possible reason if it never sends a heartbeat, as the end of an error message
    silence_hint: str

    def kill(self) -> None:
        """End it, or the connection to it, at once."""

    def join(self) -> str:
        """Wait for its end, which comes in bounded time once the sockets are shut down; return how it ended."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a daemon in seconds."""

    #: for its start, and for each layer that it loads
    start: float
    #: for a request, beside the time that its rows and bytes are allowed
    request: float


@dataclass(frozen=True)
class _Loading:
    """What each life of the daemon loads."""

    message: msgspec.Struct
    response: type[msgspec.Struct]
    #: a descriptor of the shared memory that goes with the message, if there is any
    fd: int | None
    #: how activations travel, for the log: shared, stream, or None if there are none
    transport: str | None


class Supervisor:
    """One daemon. `name` is its name in messages, until the name of what it loads is known.

    `connect` starts the daemon or connects to it, under that name: on the supervisor's thread, for each life of the
    daemon. `responses` is the union of the messages that the daemon sends in response to requests.
    """

    def __init__(
        self, name: str, connect: Callable[[str], Peer], opening: Open, timeouts: Timeouts, responses: Any
    ) -> None:
        self.name = name
        self.timeouts = timeouts
        self._connect = connect
        self._opening = opening
        self._responses = responses
        self._changed = threading.Condition()
        self._hello: Hello | None = None
        #: what is to be asked before the load, and who waits for the result
        self._before: deque[tuple[Callable[[Ask], Any], Future[Any]]] = deque()
        self._loading: _Loading | None = None
        self._loaded: msgspec.Struct | None = None
        #: the request channel of a daemon that is ready
        self._channel: Channel[Any] | None = None
        #: the daemon of this life
        self.peer: Peer | None = None
        #: of this life, or of the last one
        self._channels: tuple[Channel[Any], Channel[Pong]] | None = None
        #: bytes sent and received in earlier lives
        self._earlier_traffic = 0, 0
        self._ever_ready = False
        self._closing = False
        #: why the daemon's last life ended
        self._error: LuceError | None = None
        #: whether no further life is to be waited for
        self._given_up = False
        #: why the daemon's last life ended that was ready; attempts to restart it may have failed since
        self._loss: LuceError | None = None
        #: the error that the engine saw when the daemon died
        self._suspicion: ChannelError | None = None
        #: how many daemons that were ready have died
        self.generation = 0
        #: share of its layers that the daemon has loaded, as known here, and as logged
        self.progress = self._logged = 0.0
        #: when the daemon has to have loaded more than this share
        self._deadline, self._reached = math.inf, 0.0
        #: of this life
        self._heartbeat: Heartbeat | None = None
        self._thread = threading.Thread(target=self._main, name=f"luce-{name}", daemon=True)
        self._thread.start()

    def hello(self) -> Hello:
        """The daemon's version, process and devices. Waits for it. Raises LuceError if the daemon did not start."""
        with self._changed:
            self._changed.wait_for(lambda: self._hello is not None or self._given_up)
            if self._hello is None:
                raise self._error or DeviceError(f"{self.name}: closed")
            return self._hello

    def before_load(self, work: Callable[[Ask], Result]) -> Future[Result]:
        """Let `work` send requests on the supervisor's thread, before `begin_load` is called.

        The future has its result, or the LuceError with which it failed; DeviceError if the daemon is lost meanwhile.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._given_up or self._loading is not None:
                future.set_exception(self._error or DeviceError(f"{self.name}: it is closed, or has loaded"))
            else:
                self._before.append((work, future))
                self._changed.notify_all()
        return future

    def begin_load(
        self,
        load: msgspec.Struct,
        response: type[msgspec.Struct],
        *,
        arena: Arena | None = None,
        name: str | None = None,
    ) -> None:
        """Let this life of the daemon, and all later ones, load something. Returns at once.

        `response` is the type of the daemon's response to `load`. The arena stays the caller's. `name` is the daemon's
        name in messages from now on.
        """
        # A descriptor of its own: the caller may close the arena while a daemon restarts.
        fd = None if arena is None or arena.fd is None else os.dup(arena.fd)
        transport = None if arena is None else "stream" if fd is None else "shared"
        with self._changed:
            self.name = name or self.name
            self._loading = _Loading(load, response, fd, transport)
            self._changed.notify_all()

    def wait_loaded(self, response: type[Answer], on_progress: Callable[[], None] = lambda: None) -> Answer:
        """The response to the load message. `on_progress` is called when `progress` may have changed.

        Raises LuceError if the daemon could not load.
        """
        with self._changed:
            on_progress()
            while self._loaded is None and not self._given_up:
                self._changed.wait()
                on_progress()
            if self._loaded is None:
                raise self._error or DeviceError(f"{self.name}: closed")
            assert isinstance(self._loaded, response)
            return self._loaded

    def ready_channel(self) -> Channel[Any]:
        """The request channel of a daemon that is ready, for one thread. Does not wait.

        Raises ShardLostError with the reason if the daemon is not ready.
        """
        with self._changed:
            if self._channel is None:
                why = str(self._error or f"{self.name}: the daemon is not ready")
                raise ShardLostError(why if self._given_up else f"{why}; restarting it")
            return self._channel

    def channel(self, generation: int) -> Channel[Any]:
        """The request channel of a daemon that is ready, for the engine's thread. Waits while a daemon restarts.

        Raises ShardLostError if the daemon is gone for good, and if a daemon of this generation has died.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._channel or self._given_up or self.generation != generation)
            if self.generation != generation:
                raise ShardLostError(str(self._loss))
            if self._channel is None:
                raise ShardLostError(f"{self._error or self.name + ': closed'}")
            return self._channel

    def ready(self) -> bool:
        """Whether requests can be sent now. Any thread may call it."""
        return self._channel is not None

    def down(self) -> str:
        """Why the daemon is gone for good; empty while it runs or restarts. Any thread may call it."""
        with self._changed:
            return str(self._error) if self._given_up and not self._closing else ""

    def memory(self) -> tuple[Memory, ...]:
        """Memory of each device at the last heartbeat; empty while there is no daemon. Any thread may call it."""
        heartbeat = self._heartbeat
        return () if heartbeat is None else heartbeat.memory

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received on the request channels of all lives. Any thread may call it."""
        with self._changed:
            sent, received = self._earlier_traffic
            if self._channels is not None:
                sent, received = sent + self._channels[0].sent, received + self._channels[0].received
            return sent, received

    def loss(self) -> str:
        """Why the last daemon that was ready died."""
        with self._changed:
            return str(self._loss)

    def lost(self, channel: Channel[Any], suspicion: ChannelError) -> ShardLostError:
        """The error for a daemon whose channel failed with `suspicion`. Ends the daemon if it still runs."""
        with self._changed:
            if self._channel is channel:
                generation, self._suspicion = self.generation, suspicion
                self._shutdown_channels()
                self._changed.wait_for(lambda: self.generation > generation or self._given_up, _REASON_TIMEOUT)
            return ShardLostError(str(self._loss or f"{self.name}: {suspicion}"))

    def close(self) -> None:
        """End the daemon and wait for its end, which comes in bounded time. Idempotent."""
        with self._changed:
            self._closing = True
            self._shutdown_channels()
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            loading, self._loading = self._loading, None
            if loading is not None and loading.fd is not None:
                os.close(loading.fd)

    def _shutdown_channels(self) -> None:
        """End both connections, which wakes the threads that wait on them, here and in the daemon."""
        for channel in self._channels or ():
            channel.shutdown()

    # The methods below run on the supervisor's thread.

    def _main(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            _log.exception("the supervisor of %s stopped", self.name)
            with self._changed:
                self._error = BackendError(f"{self.name}: {type(error).__name__}: {error}")
                self._channel, self._given_up = None, True
                self._changed.notify_all()
        finally:
            with self._changed:
                self._drop_before()

    def _keep_running(self) -> None:
        """One life of the daemon after another, until it is gone for good or this is closed."""
        deaths: deque[float] = deque()
        missed = 0
        while True:
            error = self._live()
            with self._changed:
                was_ready, reached = self._channel is not None, self.peer is not None
                self._channel = self.peer = self._suspicion = self._heartbeat = None
                self.generation += was_ready
                self._error = error
                self._loss = error if was_ready else self._loss
                now = time.monotonic()
                while deaths and now - deaths[0] > RESTART_WINDOW:
                    deaths.popleft()
                if reached:
                    deaths.append(now)
                missed = 0 if reached else missed + 1
                attempts = len(deaths) + missed - 1
                delay = RESTART_DELAYS[attempts] if attempts < RESTARTS else RETRY_INTERVAL
                if self._closing or not self._ever_ready or (reached and attempts >= RESTARTS):
                    if not self._closing:
                        _log.error("%s", error)
                    self._given_up = True
                    self._changed.notify_all()
                    return
                if attempts < RESTARTS:
                    _log.warning("%s; restarting it%s", error, f" in {delay:g} s" if delay else "")
                elif not self._given_up:
                    # Another machine may be switched on again.
                    _log.error("%s; retrying every %g s", error, delay)
                    self._given_up = True
                self._changed.notify_all()
                if self._changed.wait_for(lambda: self._closing, delay):
                    self._given_up = True
                    return

    def _live(self) -> LuceError:
        """One life of the daemon, from its start to its end. Returns why it ended."""
        try:
            peer = self._connect(self.name)
        except LuceError as error:
            return error
        suspicion: ChannelError | LuceError
        channel: Channel[Any] = Channel(peer.requests, self._responses)
        pongs: Channel[Pong] = Channel(peer.heartbeat, Pong)
        heartbeat = Heartbeat(lambda: self.name, pongs, len(self._opening.devices), self._note_progress)
        self._heartbeat = heartbeat
        with contextlib.closing(channel), contextlib.closing(pongs):
            try:
                with self._changed:
                    self._earlier_traffic = self.traffic()
                    self.peer, self._channels = peer, (channel, pongs)
                    if self._closing:
                        self._shutdown_channels()
                self._start(channel, heartbeat)
                suspicion = _wait_for_loss(heartbeat)
            except (ChannelError, LuceError) as error:
                suspicion = error
            with self._changed:
                suspicion = self._suspicion or suspicion
            gone = isinstance(suspicion, ConnectionClosedError)
            if not gone:
                peer.kill()
            # A daemon ends by itself when its connections do.
            self._shutdown_channels()
            end = peer.join()
        if isinstance(suspicion, LuceError):
            return suspicion
        kind = ShardLostError if self._ever_ready else DeviceError
        reason = str(suspicion)
        if isinstance(suspicion, ChannelTimeoutError):
            reason += heartbeat.last_activity() or peer.silence_hint
        return kind(f"{self.name}: the daemon is lost: {end if gone else reason}")

    def _start(self, channel: Channel[Any], heartbeat: Heartbeat) -> None:
        """Open the devices, and load."""
        began = time.monotonic()
        self.progress = self._logged = self._reached = 0.0
        hello = self._ask(channel, heartbeat, self._opening, Hello)
        self._check(hello)
        with self._changed:
            self._hello = self._hello or hello
            self._changed.notify_all()
        loading = self._wait_for_load(channel, heartbeat)
        loaded = self._ask(channel, heartbeat, loading.message, loading.response, loading.fd)
        if self._loaded is not None and loaded != self._loaded:
            raise BackendError(f"{self.name}: the restarted daemon has loaded something else than before")
        seconds = time.monotonic() - began
        log.event(_log, "shard ready", shard=self.name, pid=hello.pid, transport=loading.transport, seconds=seconds)
        with self._changed:
            self.progress = 1.0
            self._loaded, self._channel, self._ever_ready, self._given_up = loaded, channel, True, False
            self._changed.notify_all()

    def _wait_for_load(self, channel: Channel[Any], heartbeat: Heartbeat) -> _Loading:
        """What `begin_load` was given, once it has been called. Until then, `before_load` has its turn."""
        while True:
            heartbeat.ping()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._before or self._loading is not None or self._closing, heartbeat.due()
                )
                before = self._before.popleft() if self._before else None
                if before is None and self._loading is not None:
                    return self._loading
            if before is not None:
                self._run_before(*before, partial(self._ask, channel, heartbeat))
            # If this is closed, the connections have ended, and `receive` raises.
            heartbeat.receive()

    def _run_before(self, work: Callable[[Ask], Any], future: Future[Any], ask: Ask) -> None:
        """Do what `before_load` was given. Raises ChannelError if the daemon is lost."""
        try:
            future.set_result(work(ask))
        except LuceError as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(DeviceError(f"{self.name}: {error}"))
            raise

    def _drop_before(self) -> None:
        """Nothing is asked any more before a load."""
        while self._before:
            self._before.popleft()[1].set_exception(self._error or DeviceError(f"{self.name}: closed"))

    def _note_progress(self, share: float) -> None:
        """The daemon has loaded this share of its layers."""
        with self._changed:
            self.progress = share
            self._changed.notify_all()
        if share >= self._reached + _PROGRESS:
            self._reached, self._deadline = share, time.monotonic() + self.timeouts.start
        if share >= self._logged + _LOG_EVERY:
            self._logged = share
            log.event(_log, "shard loading", shard=self.name, percent=int(100 * share))

    def _check(self, hello: Hello) -> None:
        """Raises DeviceError or ProtocolError unless the daemon opened the right devices with the same version."""
        if hello.luce != __version__:
            raise DeviceError(f"{self.name}: the daemon is Luce {hello.luce}, this is Luce {__version__}")
        if tuple(device.name for device in hello.devices) != self._opening.devices:
            raise DeviceError(f"{self.name}: the daemon opened other devices than it was asked to")
        for device in hello.devices:
            sizes = device.free, device.total, device.kept, device.total - device.kept
            if device.kv_dtype not in DTYPES or device.lanes not in _LANES or min(sizes) < 0:
                raise ProtocolError(f"it sent invalid facts about {device.name}")

    def _ask(
        self,
        channel: Channel[Any],
        heartbeat: Heartbeat,
        request: msgspec.Struct,
        response: type[Answer],
        fd: int | None = None,
    ) -> Answer:
        """Send a request and wait for the response, while the daemon sends heartbeats and makes progress."""
        self._deadline = time.monotonic() + self.timeouts.start
        channel.send(0, request, timeout=SEND_TIMEOUT)
        if fd is not None:
            channel.send_descriptor(fd, timeout=SEND_TIMEOUT)
        try:
            while not heartbeat.wait(channel):
                if time.monotonic() > self._deadline:
                    missing = "made no progress" if self._reached else "not started"
                    limit = f"{self.timeouts.start:g} s (--shard-start-timeout)"
                    raise ChannelTimeoutError(f"it has {missing} within {limit}")
        except ConnectionClosedError:
            # The message that it sent before it ended has the reason.
            if not channel.ready():
                raise
        _, received = channel.receive(timeout=SEND_TIMEOUT)
        if isinstance(received, Failed):
            raise error_of(received, self.name, starting=True)
        if not isinstance(received, response):
            raise ProtocolError(f"it sent {type(received).__name__} instead of {response.__name__}")
        return received


def _wait_for_loss(heartbeat: Heartbeat) -> ChannelError:
    """Ping the daemon until it is lost. Returns the reason."""
    try:
        while True:
            heartbeat.wait(None)
    except ChannelError as error:
        return error
