"""The daemon's side: shards on the devices of this process, served to one other process.

Steps are queued on the devices as they come, and answered in their order when their work is done, so the next step is
on its way while one runs. Nothing that the server sends ends the daemon but the end of its connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import threadpoolctl

from luce import __version__
from luce.config.resolve import resolve
from luce.errors import BackendError, LuceError, OutOfMemoryError
from luce.ipc.arena import Arena
from luce.ipc.channel import Channel, ChannelError, GoneError
from luce.ipc.messages import (
    Accept,
    Announce,
    DeviceFacts,
    Done,
    Drop,
    Embed,
    Embedded,
    Failed,
    Fetch,
    Fill,
    Forward,
    Hello,
    Load,
    LoadDraft,
    Open,
    Ping,
    Pong,
    Project,
    Rank,
    Ranked,
    Reply,
    Request,
    Restore,
    Save,
    Seal,
    Unseal,
)
from luce.remote.daemon_shard import Announced, ServedModel, Work
from luce.remote.validate import check_descriptor
from luce.runtime.device import Device, Flag
from luce.runtime.host import HostDevice
from luce.runtime.open import open_devices
from luce.shard.memory_watch import BEAT, MemoryWatch

_log = logging.getLogger(__name__)

#: seconds that a server gets to take an answer
_SEND = 60.0
#: seconds that the main thread gets to end after the server has gone
_GRACE = 5.0
#: seconds to look for a message without sleeping, with a GPU: the work of the other shards in a decode step
_SPIN = 10e-3
#: seconds between looks at work that threads of this process are queueing
_PATIENCE = 1e-3
#: what a frame may hold beside the tensors of a Fill
_LARGEST = 1 << 28


class Guest(Protocol):
    """Something else than layers that a daemon holds."""

    def loaded(self) -> Reply:
        """The answer to what asked for it."""

    def handle(self, message: Request) -> Reply:
        """The answer to a message. Raises what becomes Failed."""


#: a drafter on the devices of this process; `opened` closes it
OpenDraft = Callable[[LoadDraft, Sequence[Device], contextlib.ExitStack], Guest]


def serve(
    requests: socket.socket,
    watch: socket.socket,
    *,
    shares: bool,
    silence: float | None = None,
    path: Path | None = None,
    open_draft: OpenDraft | None = None,
) -> None:
    """Serve one server until it closes its end. `shares`: whether it can share memory.

    `silence`: seconds without a sign of life after which it counts as gone, None where the kernel tells. `path`: the
    model, if it is not where the server has it. `open_draft`: what holds drafters, which are above this layer.
    """
    with contextlib.ExitStack() as opened:
        signs: Channel[Ping] = Channel(watch, Ping)
        channel: Channel[Request] = Channel(requests, Request)
        session = _Session(channel, shares, path, opened, open_draft)
        over = threading.Event()
        arguments = signs, channel, session.sign, silence, over
        pings = threading.Thread(target=_answer_pings, args=arguments, name="luce-pings", daemon=True)
        pings.start()
        opened.callback(pings.join)
        opened.callback(signs.close)
        opened.callback(over.set)
        opened.callback(channel.close)
        session.run()


def _answer_pings(
    watch: Channel[Ping],
    requests: Channel[Request],
    sign: Callable[[], Pong],
    silence: float | None,
    over: threading.Event,
) -> None:
    """Give signs of life, whatever the main thread does; when the server is gone the process does not outlive it."""
    try:
        while True:
            number, _ = watch.receive(timeout=silence)
            watch.send(number, sign(), timeout=_SEND)
    except ChannelError:
        if over.is_set():
            return
        requests.end()
        if silence is None and not over.wait(_GRACE):
            os._exit(1)


#: a request that has come: its kind, and when, as time.monotonic
_Asked = tuple[str, float]


class _Session:
    """What one server says, and the answers."""

    def __init__(
        self,
        channel: Channel[Request],
        shares: bool,
        path: Path | None,
        opened: contextlib.ExitStack,
        open_draft: OpenDraft | None,
    ) -> None:
        self._channel = channel
        self._shares = shares
        self._path = path
        self._opened = opened
        self._open_draft = open_draft
        self._guest: Guest | None = None
        self._spin = 0.0
        self._devices: list[Device] = []
        self._left = MemoryWatch(())
        self._model: ServedModel | None = None
        self._announced: Announced | None = None
        #: requests whose work is queued
        self._running: deque[tuple[int, Work, _Asked]] = deque()
        #: what the main thread is at
        self._now: _Asked | None = None
        #: share of the layers that are read
        self._read = 0.0

    def run(self) -> None:
        """Until the server is gone."""
        try:
            while True:
                self._answer_finished()
                self._look()
                number, message = self._channel.receive(timeout=None, limit=_LARGEST + self._held(), spin=self._spin)
                self._now = type(message).__name__, time.monotonic()
                try:
                    reply = self._handle(number, message)
                except Exception as error:
                    if self._model is not None:
                        self._model.settle()
                    reply = _failed(error)
                if reply is not None:
                    self._finish_all()
                    self._channel.send(number, reply, timeout=_SEND)
                self._now = None
        except GoneError:
            return
        except ChannelError as error:
            _log.error("the server's connection is closed: %s", error)
        finally:
            given = None if self._announced is None else self._announced.message.given
            if self._model is not None and given is not None:
                # Nobody else will, and the device would wait for ever, also if only a part of the work was queued.
                Flag(self._model.arena.given, given).set()

    def sign(self) -> Pong:
        """What it is at. Any thread may ask."""
        now, queued = self._now, len(self._running)
        try:
            oldest: _Asked | None = self._running[0][2]
        except IndexError:
            oldest = now
        memory = tuple((memory.free, memory.total) for memory in self._left.seen)
        if oldest is None:
            return Pong(read=self._read, memory=memory)
        kind, at = oldest
        return Pong(kind, time.monotonic() - at, queued + (now is not None), self._read, memory)

    def _held(self) -> int:
        """Bytes that a Fill may bring."""
        return 0 if self._model is None else sum(shard.info.state for shard in self._model.chain.shards) * 2

    def _answer_finished(self) -> None:
        """Answer what is done until a message is there, or nothing runs."""
        while self._running and not self._channel.ready(_PATIENCE if self._running[0][1].patient else 0.0):
            if _over(self._running[0][1]):
                self._answer_first()

    def _look(self) -> None:
        """While nobody drives the devices, look at what they have left, and again each second until a message comes."""
        spin = self._spin
        while not self._running and self._announced is None:
            self._left.look()
            if self._channel.ready(BEAT, spin=spin):
                break
            spin = 0.0

    def _finish_all(self) -> None:
        """Answers keep the order of the requests."""
        while self._running:
            self._answer_first()

    def _answer_first(self) -> None:
        number, work, _ = self._running[0]
        reply: Reply
        try:
            work.event.wait()
            reply = work.answer()
        except Exception as error:
            reply = _failed(error)
            if self._model is not None and self._model.chain.failure is not None:
                # It is told here; what was queued behind it fails as well.
                self._model.settle()
        self._channel.send(number, reply, timeout=_SEND)
        self._running.popleft()

    def _queued(self, number: int, work: Work) -> None:
        """Work whose answer comes later."""
        assert self._now is not None
        self._running.append((number, work, self._now))
        self._now = None

    def _handle(self, number: int, message: Request) -> Reply | None:
        """The answer, unless it comes later or never. Raises what becomes Failed."""
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Load):
            return self._load(message)
        if isinstance(message, LoadDraft):
            return self._host(message)
        if self._guest is not None:
            return self._guest.handle(message)
        model = self._model
        if model is None:
            raise BackendError("nothing is loaded")
        if isinstance(message, Drop):
            # It may come between a step and its Forward.
            model.drop(message.kept)
            return None
        announced, self._announced = self._announced, None
        if isinstance(message, Announce):
            self._announced = model.announce(message)
            return None
        if isinstance(message, Forward):
            if announced is None:
                raise BackendError("a step was not announced")
            self._queued(number, model.run(announced, message))
            return None
        if isinstance(message, Embed):
            return Embedded(model.embed(message.tokens))
        if isinstance(message, Project):
            return Done(output=model.project(message))
        if isinstance(message, Accept):
            model.accept(message.slot, message.rows)
            return Done()
        if isinstance(message, Seal):
            model.seal(message)
            return Done()
        if isinstance(message, Unseal):
            model.unseal(message)
            return Done()
        if isinstance(message, Rank):
            return Ranked(model.rank(message))
        if isinstance(message, Save):
            self._queued(number, model.save(number, message))
            return None
        if isinstance(message, Fetch):
            return model.fetch(message)
        if isinstance(message, Restore):
            model.restore(message)
        elif isinstance(message, Fill):
            model.fill(message)
        else:
            raise BackendError(f"{type(message).__name__} is for a daemon that holds a drafter")
        return Done()

    def _open(self, message: Open) -> Reply:
        if message.luce != __version__:
            raise BackendError(f"the server is Luce {message.luce}, the daemon Luce {__version__}")
        if self._devices:
            raise BackendError("devices are open already")
        given = {"target_devices": message.devices, "threads": message.threads, "log_level": message.log_level}
        config = resolve(given, env={})
        logging.getLogger("luce").setLevel(config.log_level.upper())
        if config.threads:
            threadpoolctl.threadpool_limits(config.threads, user_api="blas")
        self._devices = open_devices(config)
        self._left = MemoryWatch(self._devices)
        facts = []
        for device in self._devices:
            self._opened.callback(device.close)
            memory = device.memory()
            name, kv = str(device.name), device.kv_dtype.str
            facts.append(DeviceFacts(name, device.host, device.lanes, kv, memory.free, memory.total, device.describe()))
        if not all(device.host for device in self._devices):
            self._spin = _SPIN
        return Hello(__version__, os.getpid(), tuple(facts))

    def _load(self, message: Load) -> Reply:
        with contextlib.ExitStack() as received:
            fd = None
            if message.shared and self._shares:
                fd = self._channel.receive_descriptor(timeout=_SEND)
                # The mapping holds the memory.
                received.callback(os.close, fd)
            self._check_free()
            if message.shared and not self._shares:
                raise BackendError("memory cannot be shared over this connection")
            if fd is not None:
                check_descriptor(fd, message.arena)
            arena = Arena(message.arena, fd)
        self._opened.callback(arena.close)
        path = self._path or Path(message.path)
        self._model = ServedModel(path, message, self._devices, arena, self._opened, self._note_read)
        return self._model.loaded()

    def _note_read(self, share: float) -> None:
        self._read = share

    def _host(self, message: LoadDraft) -> Reply:
        self._check_free()
        if self._open_draft is None:
            raise BackendError("this daemon holds no drafters")
        self._guest = self._open_draft(message, self._devices, self._opened)
        return self._guest.loaded()

    def _check_free(self) -> None:
        if self._model is not None or self._guest is not None or not self._devices:
            raise BackendError("no devices are open" if not self._devices else "something is loaded already")


def _over(work: Work) -> bool:
    """Whether there is an answer, which may be that the work failed."""
    try:
        return work.event.done()
    except Exception:
        return True


def _failed(error: Exception) -> Failed:
    if isinstance(error, LuceError):
        return Failed(type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        free = HostDevice().memory().free
        return Failed(OutOfMemoryError.__name__, f"host memory: {error or 'all is taken'}; {free} bytes free")
    _log.exception("a request failed")
    return Failed(BackendError.__name__, f"{type(error).__name__}: {error}")
