"""Keeps one daemon alive: starts it, lets it load its layers, asks it for signs of life, starts it anew when it dies.

A thread of its own does all of that. The engine's thread only sends requests and waits for answers on the channel of a
daemon that is ready; when that fails it says so (`lost`) and learns here why the daemon is gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from luce import __version__, log
from luce.errors import (
    BackendError,
    DeviceError,
    FormatError,
    LuceError,
    ModelError,
    OutOfMemoryError,
    ShardLostError,
    UnsupportedError,
    UsageError,
)
from luce.ipc.arena import Arena
from luce.ipc.channel import DTYPES, Channel, ChannelError, GarbageError, GoneError, LateError
from luce.ipc.messages import (
    DraftLoaded,
    Failed,
    Hello,
    Load,
    LoadDraft,
    Loaded,
    Open,
    Ping,
    Pong,
    Reply,
)
from luce.runtime.device import Memory

_log = logging.getLogger(__name__)

#: seconds between signs of life, without any until the log says so, and until a daemon counts as lost
_BEAT = 1.0
_SUSPECT = 5.0
_SILENCE = 15.0
#: likewise before the first one: an interpreter may take long to import what it needs
_FIRST = 60.0
#: what a daemon reads of its layers between two lines of the log, and at least to have come further
_SHARE, _FURTHER = 0.1, 1e-3
#: lanes of a warp or a wavefront, and of the host
_LANES = (1, 32, 64)
#: most letters of what a daemon says that it is at
_KIND = 40
#: seconds that a daemon gets to take what it is sent
_SEND = 30.0
#: restarts within a time, both at most so many; seconds before each
_RESTARTS, _WITHIN = 5, 600.0
_DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0)
#: seconds between later tries of a daemon that cannot even be started or connected to
_AGAIN = 30.0
#: how long `lost` waits to learn the reason: longer than a daemon gets to end
_VERDICT = 20.0

Answer = TypeVar("Answer", Hello, Loaded, DraftLoaded)


class Peer(Protocol):
    """A daemon that has just been started or connected to."""

    requests: socket.socket
    watch: socket.socket
    #: what may be why, for the end of a message, if it never gives a sign of life
    silent: str

    def kill(self) -> None:
        """End it, or the connection to it, at once."""

    def end(self) -> str:
        """Wait for the end, which comes in bounded time once the sockets are shut down, and say how it came."""


@dataclass(frozen=True)
class Limits:
    """Seconds: for a daemon's start and for each layer that it reads; for a request, beside what it takes in proportion
    to its rows."""

    start: float
    request: float


class Supervisor:
    """One daemon, called `name` in messages until it is known what it is to load.

    `connect` gets what it is called, and runs in the supervisor's thread, for each life of the daemon. `shares`:
    whether daemon and server have memory in common, which may turn out to be impossible; `required`: that this is an
    error then. `wire`: what activations are in messages otherwise.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[str], Peer],
        opening: Open,
        limits: Limits,
        *,
        shares: bool = True,
        required: bool = False,
        wire: str = "f32",
    ) -> None:
        self.name = name
        self.limits = limits
        self.shares = shares
        self.required = required
        self.wire = "f32" if shares else wire
        self._connect = connect
        self._opening = opening
        self._changed = threading.Condition()
        self._hello: Hello | None = None
        #: and a descriptor of its shared memory, None over a network
        self._load: tuple[Load | LoadDraft, int | None] | None = None
        self._loaded: Loaded | DraftLoaded | None = None
        self._channel: Channel[Reply] | None = None
        self._peer: Peer | None = None
        #: of this life, or of the last one
        self._channels: tuple[Channel[Reply], Channel[Pong]] | None = None
        #: bytes sent and received in the lives before
        self._before = 0, 0
        self._ever_ready = False
        self._closing = False
        #: why the daemon's last life ended, and that nobody is to wait for another one
        self._error: LuceError | None = None
        self._ended = False
        #: why the daemon was lost when it was last ready: attempts to start it anew may have failed since
        self._loss: LuceError | None = None
        #: what the engine saw of the daemon's death
        self._suspicion: ChannelError | None = None
        #: how often a daemon that was ready died
        self.generation = 0
        #: share of its layers that the daemon has read, as far as is known, and as the log has it
        self.read = self._told = 0.0
        #: when it is to have come further than this share
        self._deadline, self._reached = math.inf, 0.0
        #: signs of this life
        self._beat: _Heartbeat | None = None
        self._thread = threading.Thread(target=self._main, name=f"luce-{name}", daemon=True)
        self._thread.start()

    def hello(self) -> Hello:
        """What the daemon is. Waits for it. Raises LuceError if it did not start."""
        with self._changed:
            self._changed.wait_for(lambda: self._hello is not None or self._ended)
            if self._hello is None:
                raise self._error or DeviceError(f"{self.name}: closed")
            return self._hello

    def begin_load(self, load: Load, arena: Arena, name: str) -> None:
        """Let this life of the daemon, and all later ones, load layers, called `name`. The arena stays the caller's."""
        with self._changed:
            self.name = name
            # One of its own: the caller closes the arena while a daemon may start anew.
            self._load = load, None if arena.fd is None else os.dup(arena.fd)
            self._changed.notify_all()

    def begin_draft(self, load: LoadDraft) -> None:
        """Let this life of the daemon, and all later ones, load a drafter instead."""
        with self._changed:
            self._load = load, None
            self._changed.notify_all()

    def loaded(self, on_sign: Callable[[], None] = lambda: None) -> Loaded:
        """What the daemon has loaded. Waits for it; `on_sign` is called meanwhile, when `read` may have changed.

        Raises LuceError if it could not.
        """
        loaded = self._wait_loaded(on_sign)
        assert isinstance(loaded, Loaded)
        return loaded

    def draft_loaded(self) -> DraftLoaded:
        """The drafter that the daemon has loaded. Waits for it. Raises LuceError if it could not."""
        loaded = self._wait_loaded()
        assert isinstance(loaded, DraftLoaded)
        return loaded

    def _wait_loaded(self, on_sign: Callable[[], None] = lambda: None) -> Loaded | DraftLoaded:
        with self._changed:
            on_sign()
            while self._loaded is None and not self._ended:
                self._changed.wait()
                on_sign()
            if self._loaded is None:
                raise self._error or DeviceError(f"{self.name}: closed")
            return self._loaded

    def channel_now(self) -> Channel[Reply]:
        """The way to a daemon that is ready now, for one thread alone. Raises ShardLostError saying why there is none,
        without waiting."""
        with self._changed:
            if self._channel is None:
                why = str(self._error or f"{self.name}: it is not there")
                raise ShardLostError(why if self._ended else f"{why}; it is started anew")
            return self._channel

    def channel(self, generation: int) -> Channel[Reply]:
        """The way to a daemon that is ready, for the engine's thread alone; waits while one starts anew.

        Raises ShardLostError if there is none to wait for, and if it is not the one of this generation.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._channel or self._ended or self.generation != generation)
            if self.generation != generation:
                raise ShardLostError(str(self._loss))
            if self._channel is None:
                raise ShardLostError(f"{self._error or self.name + ': closed'}")
            return self._channel

    def ready(self) -> bool:
        """Whether requests can be sent now. Any thread may ask."""
        return self._channel is not None

    def down(self) -> str:
        """Why there is no daemon and nobody is to wait for one, otherwise empty. Any thread may ask."""
        with self._changed:
            return str(self._error) if self._ended and not self._closing else ""

    def memory(self) -> tuple[Memory, ...]:
        """What each of the daemon's devices had left when it was last heard of; empty while it is not. Any thread may
        ask."""
        beat = self._beat
        return () if beat is None else beat.memory

    def traffic(self) -> tuple[int, int]:
        """Bytes of requests and of answers, of all lives. Any thread may ask."""
        with self._changed:
            sent, received = self._before
            if self._channels is not None:
                sent, received = sent + self._channels[0].sent, received + self._channels[0].received
            return sent, received

    def loss(self) -> str:
        """Why the daemon was lost when it was last ready."""
        with self._changed:
            return str(self._loss)

    def lost(self, channel: Channel[Reply], suspicion: ChannelError) -> ShardLostError:
        """The error for a daemon whose channel failed. It is ended, if it is not dead yet."""
        with self._changed:
            if self._channel is channel:
                generation, self._suspicion = self.generation, suspicion
                self._hang_up()
                self._changed.wait_for(lambda: self.generation > generation or self._ended, _VERDICT)
            return ShardLostError(str(self._loss or f"{self.name}: {suspicion}"))

    def close(self) -> None:
        """End the daemon and wait for its end, which comes in bounded time. Idempotent."""
        with self._changed:
            self._closing = True
            self._hang_up()
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            _, fd = self._load or (None, None)
            self._load = None
            if fd is not None:
                os.close(fd)

    def _hang_up(self) -> None:
        """End both connections, which wakes whoever waits on them, here and in the daemon."""
        for channel in self._channels or ():
            channel.end()

    # What follows runs on the supervisor's thread.

    def _main(self) -> None:
        try:
            self._keep()
        except Exception as error:
            _log.exception("the supervisor of %s stopped", self.name)
            with self._changed:
                self._error = BackendError(f"{self.name}: {type(error).__name__}: {error}")
                self._channel, self._ended = None, True
                self._changed.notify_all()

    def _keep(self) -> None:
        deaths: deque[float] = deque()
        missed = 0
        while True:
            error = self._live()
            with self._changed:
                was_ready, reached = self._channel is not None, self._peer is not None
                self._channel = self._peer = self._suspicion = self._beat = None
                self.generation += was_ready
                self._error = error
                self._loss = error if was_ready else self._loss
                now = time.monotonic()
                while deaths and now - deaths[0] > _WITHIN:
                    deaths.popleft()
                if reached:
                    deaths.append(now)
                missed = 0 if reached else missed + 1
                tries = len(deaths) + missed - 1
                delay = _DELAYS[tries] if tries < _RESTARTS else _AGAIN
                if self._closing or not self._ever_ready or (reached and tries >= _RESTARTS):
                    if not self._closing:
                        _log.error("%s", error)
                    self._ended = True
                    self._changed.notify_all()
                    return
                if tries < _RESTARTS:
                    _log.warning("%s; starting it anew%s", error, f" in {delay:g} s" if delay else "")
                elif not self._ended:
                    # Another machine may be switched on again.
                    _log.error("%s; trying again every %g s", error, delay)
                    self._ended = True
                self._changed.notify_all()
                if self._changed.wait_for(lambda: self._closing, delay):
                    self._ended = True
                    return

    def _live(self) -> LuceError:
        """One life of the daemon, from its start to its end; why it ended."""
        try:
            peer = self._connect(self.name)
        except LuceError as error:
            return error
        suspicion: ChannelError | LuceError
        channel: Channel[Reply] = Channel(peer.requests, Reply)
        watch: Channel[Pong] = Channel(peer.watch, Pong)
        beat = self._beat = _Heartbeat(lambda: self.name, watch, len(self._opening.devices), self._note_read)
        with contextlib.closing(channel), contextlib.closing(watch):
            try:
                with self._changed:
                    self._before = self.traffic()
                    self._peer, self._channels = peer, (channel, watch)
                    if self._closing:
                        self._hang_up()
                self._start(channel, beat)
                suspicion = self._attend(beat)
            except (ChannelError, LuceError) as error:
                suspicion = error
            with self._changed:
                suspicion = self._suspicion or suspicion
            gone = isinstance(suspicion, GoneError)
            if not gone:
                peer.kill()
            # A daemon ends by itself when its connections do.
            self._hang_up()
            how = peer.end()
        if isinstance(suspicion, LuceError):
            return suspicion
        kind = ShardLostError if self._ever_ready else DeviceError
        why = f"{suspicion}{beat.last() or peer.silent}" if isinstance(suspicion, LateError) else suspicion
        return kind(f"{self.name}: the daemon is lost: {how if gone else why}")

    def _start(self, channel: Channel[Reply], beat: _Heartbeat) -> None:
        """Hello and load."""
        began = time.monotonic()
        self.read = self._told = self._reached = 0.0
        hello = self._ask(channel, beat, self._opening, Hello)
        self._check(hello)
        with self._changed:
            self._hello = self._hello or hello
            self._changed.notify_all()
        load, fd = self._given_load(beat)
        loaded: Loaded | DraftLoaded
        if isinstance(load, LoadDraft):
            loaded = self._ask(channel, beat, load, DraftLoaded)
        else:
            loaded = self._ask(channel, beat, load, Loaded, fd)
        if self._loaded is not None and loaded != self._loaded:
            raise BackendError(f"{self.name}: the daemon does not load what it loaded before")
        seconds, way = time.monotonic() - began, None
        if isinstance(load, Load):
            way = "shared" if load.shared else "stream"
        log.event(_log, "shard ready", shard=self.name, pid=hello.pid, transport=way, seconds=seconds)
        with self._changed:
            self.read = 1.0
            self._loaded, self._channel, self._ever_ready, self._ended = loaded, channel, True, False
            self._changed.notify_all()

    def _given_load(self, beat: _Heartbeat) -> tuple[Load | LoadDraft, int | None]:
        """What is to be loaded, as soon as that is known."""
        while True:
            beat.ask()
            with self._changed:
                self._changed.wait_for(lambda: self._load is not None or self._closing, beat.left())
                if self._load is not None:
                    return self._load
            # Its end too: that of the connections, when this is closed.
            beat.hear()

    def _note_read(self, share: float) -> None:
        """What the daemon has read of its layers by now."""
        with self._changed:
            self.read = share
            self._changed.notify_all()
        if share >= self._reached + _FURTHER:
            self._reached, self._deadline = share, time.monotonic() + self.limits.start
        if share >= self._told + _SHARE:
            self._told = share
            log.event(_log, "shard loading", shard=self.name, percent=int(100 * share))

    def _check(self, hello: Hello) -> None:
        if hello.luce != __version__:
            raise DeviceError(f"{self.name}: the daemon is Luce {hello.luce}, this is Luce {__version__}")
        if tuple(device.name for device in hello.devices) != self._opening.devices:
            raise DeviceError(f"{self.name}: the daemon opened other devices than it was asked to")
        for device in hello.devices:
            if device.kv_dtype not in DTYPES or device.lanes not in _LANES or min(device.free, device.total) < 0:
                raise GarbageError(f"it described {device.name} as no device is")

    def _ask(
        self,
        channel: Channel[Reply],
        beat: _Heartbeat,
        request: Open | Load | LoadDraft,
        answer: type[Answer],
        fd: int | None = None,
    ) -> Answer:
        """The answer to a request, while the daemon gives signs of life and comes further."""
        self._deadline = time.monotonic() + self.limits.start
        channel.send(0, request, timeout=_SEND)
        if fd is not None:
            channel.send_descriptor(fd, timeout=_SEND)
        try:
            while not beat.wait(channel):
                if time.monotonic() > self._deadline:
                    what = "come further" if self._reached else "started"
                    raise LateError(f"it has not {what} within {self.limits.start:g} s (--shard-start-timeout)")
        except GoneError:
            # What it said before it ended says why.
            if not channel.ready():
                raise
        _, reply = channel.receive(timeout=_SEND)
        if isinstance(reply, Failed):
            raise failure(self.name, reply, starting=True)
        if not isinstance(reply, answer):
            raise GarbageError(f"it sent {type(reply).__name__} instead of {answer.__name__}")
        return reply

    def _attend(self, beat: _Heartbeat) -> ChannelError:
        """Ask for signs of life until there are none."""
        try:
            while True:
                beat.wait(None)
        except ChannelError as error:
            return error


class _Heartbeat:
    """Pings a daemon of so many devices and counts the silence.

    `on_read` gets the share of its layers that it has read, when it grows.
    """

    def __init__(
        self, name: Callable[[], str], watch: Channel[Pong], devices: int, on_read: Callable[[float], None]
    ) -> None:
        self._name = name
        self._watch = watch
        self._devices = devices
        self._on_read = on_read
        #: the last sign of life
        self._sign: Pong | None = None
        #: of each device, as it says; empty as long as it is not known
        self.memory: tuple[Memory, ...] = ()
        self._suspect = False
        self._next = self._heard = time.monotonic()

    def wait(self, other: Channel[Reply] | None) -> bool:
        """Whether something has come on the other channel within a beat. Raises ChannelError if the daemon is lost."""
        self.ask()
        poller = select.poll()
        for channel in (self._watch, other):
            if channel is not None:
                poller.register(channel.socket, select.POLLIN)
        poller.poll(1000 * self.left())
        self.hear()
        return other is not None and other.ready()

    def left(self) -> float:
        """Seconds until it is to be asked again."""
        return max(0.0, self._next - time.monotonic())

    def ask(self) -> None:
        """Ask, if it is time to. Raises ChannelError if the daemon is lost."""
        now = time.monotonic()
        silence, limit = now - self._heard, _FIRST if self._sign is None else _SILENCE
        if silence > limit:
            raise LateError(f"it has given no sign of life for {limit:g} s")
        if silence > _SUSPECT and self._sign is not None and not self._suspect:
            self._suspect = True
            _log.warning("%s: no sign of life for %.1f s; it counts as lost after %g s", self._name(), silence, limit)
        if now >= self._next:
            self._next = now + _BEAT
            self._watch.send(0, Ping(), timeout=_SILENCE)

    def hear(self) -> None:
        """Take a sign of life, if there is one. Raises ChannelError if the daemon is lost."""
        if not self._watch.ready():
            return
        _, sign = self._watch.receive(timeout=_SILENCE)
        real = sign.requests >= 0 and 0 <= sign.seconds < math.inf and 0 <= sign.read <= 1
        real &= len(sign.memory) in (0, self._devices) and min(map(min, sign.memory), default=0) >= 0
        if not real or len(sign.request) > _KIND or not sign.request.isprintable():
            raise GarbageError("it sent a sign of life that is none")
        before, self._sign, self._heard = self._sign, sign, time.monotonic()
        self.memory = tuple(Memory(free, total) for free, total in sign.memory)
        if self._suspect:
            self._suspect = False
            _log.warning("%s: gives signs of life again", self._name())
        if sign.read > (0.0 if before is None else before.read):
            self._on_read(sign.read)

    def last(self) -> str:
        """What the daemon was at when it gave its last sign of life, for the end of a message; empty without any."""
        sign = self._sign
        if sign is None:
            return ""
        ago = f"; {time.monotonic() - self._heard:.1f} s ago it "
        if not sign.requests:
            return f"{ago}waited for requests"
        beside = f", {100 * sign.read:.0f} % of its layers read" if sign.request == Load.__name__ else ""
        beside += f", {sign.requests - 1} more to answer" if sign.requests > 1 else ""
        return f"{ago}was at {sign.request} for {sign.seconds:.1f} s{beside}"


#: what a daemon may report of its start, and of a request
_OF_STARTS = {kind.__name__: kind for kind in (UsageError, ModelError, FormatError, UnsupportedError)}
_OF_REQUESTS: dict[str, type[LuceError]] = {kind.__name__: kind for kind in (DeviceError, OutOfMemoryError)}


def failure(name: str, failed: Failed, *, starting: bool = False) -> LuceError:
    """The error that a daemon reports, as this side raises it."""
    kinds = {**_OF_REQUESTS, **_OF_STARTS} if starting else _OF_REQUESTS
    return kinds.get(failed.error, BackendError)(f"{name}: {failed.message}")
