"""A daemon: holds layers, a drafter or a scorer of texts for a server in another process, on this process's devices.

Steps are queued on the devices as they arrive, and their responses are sent in the same order when the work is done, so
the next step arrives while one runs. No message ends the daemon; only the end of the connection does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from luce import __version__
from luce.config.resolve import resolve
from luce.errors import BackendError, LuceError, OutOfMemoryError
from luce.ipc.arena import Arena
from luce.ipc.channel import Channel, ChannelError, ConnectionClosedError
from luce.ipc.lifecycle import DeviceFacts, Failed, Hello, Open, Ping, Pong
from luce.layers.kept_weights import KeptWeights
from luce.remote.daemon_shard import ServedModel
from luce.remote.messages import Load, Measure, Probe, Request
from luce.remote.probe import answer_probe, measure_devices
from luce.remote.service import Handler, Loader, Service, Work
from luce.remote.validate import check_descriptor, load_devices
from luce.runtime.cores import limit_threads
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.open import open_devices
from luce.shard.memory_watch import INTERVAL, MemoryWatch

_log = logging.getLogger(__name__)

#: seconds that a server has to receive a response
_SEND_TIMEOUT = 60.0
#: seconds that the main thread has to end after the server has gone
_END_TIMEOUT = 5.0
#: seconds to poll for a message without sleeping, if there is a GPU: the time that other shards need in a decode step
_SPIN = 10e-3
#: seconds between two looks at work that threads of this process are queueing
_POLL_INTERVAL = 1e-3
#: most bytes of arrays in a request, beside the tensors of a LoadState
_FRAME_LIMIT = 1 << 28

#: Finds the file with the layers of a Load; raises LuceError. The function that it gets takes the share of them that is
#: there, where they have to come from elsewhere first.
Locate = Callable[[Load, Callable[[float], None]], Path]


def serve(
    requests: socket.socket,
    heartbeat: socket.socket,
    *,
    can_share: bool,
    server_timeout: float | None = None,
    locate: Locate | None = None,
    loaders: Sequence[Loader] = (),
    on_loaded: Callable[[], None] = lambda: None,
    weights: KeptWeights | None = None,
) -> None:
    """Serve one server until it closes its end.

    `can_share`: whether memory can be shared with the server. `server_timeout`: seconds without a Ping after which the
    server counts as gone; None if the kernel ends the connection with the server's process. `locate`: finds the model's
    file; None if it is at the server's path. `loaders`: what a daemon can hold beside layers.
    `on_loaded` is called once it holds what the server asked for. `weights`: holds the weights of its layers behind the
    end, and has those of earlier calls.
    """
    with contextlib.ExitStack() as opened:
        pings: Channel[Ping] = Channel(heartbeat, Ping)
        unions = [Request, *(loader.requests for loader in loaders)]
        channel: Channel[Any] = Channel(requests, functools.reduce(operator.or_, unions))
        more: dict[str, Any] = {"loaders": loaders, "on_loaded": on_loaded, "weights": weights}
        session = Session(channel, opened, can_share=can_share, locate=locate, **more)
        closing = threading.Event()
        arguments = pings, channel, session.pong, server_timeout, closing
        responder = threading.Thread(target=_answer_pings, args=arguments, name="luce-pings", daemon=True)
        responder.start()
        opened.callback(responder.join)
        opened.callback(pings.close)
        opened.callback(closing.set)
        opened.callback(channel.close)
        session.run()


def _answer_pings(
    pings: Channel[Ping],
    requests: Channel[Any],
    pong: Callable[[], Pong],
    server_timeout: float | None,
    closing: threading.Event,
) -> None:
    """Send heartbeats, whatever the main thread is doing. When the server is gone, end the process."""
    try:
        while True:
            number, _ = pings.receive(timeout=server_timeout)
            pings.send(number, pong(), timeout=_SEND_TIMEOUT)
    except ChannelError:
        if closing.is_set():
            return
        requests.shutdown()
        if server_timeout is None and not closing.wait(_END_TIMEOUT):
            os._exit(1)


#: type of a request, and when it arrived (time.monotonic)
_Arrival = tuple[str, float]


class Session:
    """Handles the requests of one server. `opened` closes the devices and what is loaded; the rest as for `serve`."""

    def __init__(
        self,
        channel: Channel[Any],
        opened: contextlib.ExitStack,
        *,
        can_share: bool,
        locate: Locate | None,
        loaders: Sequence[Loader],
        on_loaded: Callable[[], None] = lambda: None,
        weights: KeptWeights | None = None,
    ) -> None:
        self._weights = weights
        self._channel = channel
        self._opened = opened
        self._can_share = can_share
        self._locate = locate
        self._on_loaded = on_loaded
        self._handlers: dict[type[msgspec.Struct], Handler] = {
            Open: self.open,
            Load: self.load,
            Measure: self.measure,
            Probe: self.probe,
        }
        self._handlers |= {loader.message: functools.partial(self._load_with, loader) for loader in loaders}
        self._spin = 0.0
        self._devices: list[Device] = []
        self._memory = MemoryWatch(())
        self._service: Service | None = None
        #: requests whose work is queued, with their numbers
        self._queued: deque[tuple[int, Work, _Arrival]] = deque()
        #: the request that the main thread is handling
        self._current: _Arrival | None = None
        #: share of the layers that are loaded
        self._progress = 0.0

    def run(self) -> None:
        """Handle requests until the server is gone."""
        try:
            while True:
                self._answer_finished()
                self._watch_memory()
                limit = _FRAME_LIMIT + (0 if self._service is None else self._service.frame_limit)
                number, message = self._channel.receive(timeout=None, limit=limit, spin=self._spin)
                self._current = type(message).__name__, time.monotonic()
                try:
                    result = self._handle(message)
                except Exception as error:
                    if self._service is not None:
                        self._service.settle()
                    result = _failed(error)
                if isinstance(result, Work):
                    self._queued.append((number, result, self._current))
                elif result is not None:
                    self._finish_all()
                    self._channel.send(number, result, timeout=_SEND_TIMEOUT)
                self._current = None
        except ConnectionClosedError:
            return
        except ChannelError as error:
            _log.error("the connection to the server is closed: %s", error)
        finally:
            if self._service is not None:
                self._service.abandon()

    def pong(self) -> Pong:
        """What the daemon is doing. Any thread may call it."""
        current, queued = self._current, len(self._queued)
        try:
            oldest: _Arrival | None = self._queued[0][2]
        except IndexError:
            oldest = current
        memory = tuple((memory.free, memory.total) for memory in self._memory.seen)
        if oldest is None:
            return Pong(loaded=self._progress, memory=memory)
        kind, arrived = oldest
        return Pong(kind, time.monotonic() - arrived, queued + (current is not None), self._progress, memory)

    def open(self, message: Open) -> Hello:
        """Open the devices."""
        if message.luce != __version__:
            raise BackendError(f"the server is Luce {message.luce}, the daemon Luce {__version__}")
        if self._devices:
            raise BackendError("devices are open already")
        names = ("threads", "cpu_weights", "log_level")
        config = resolve({"target_devices": message.devices, **{n: getattr(message, n) for n in names}}, env={})
        logging.getLogger("luce").setLevel(config.log_level.upper())
        if config.threads:
            limit_threads(config.threads)
        self._devices = open_devices(config)
        self._memory = MemoryWatch(self._devices)
        facts = []
        for device in self._devices:
            self._opened.callback(device.close)
            memory = device.memory()
            name, kv = str(device.name), device.kv_dtype.str
            kind, sizes = (device.host, device.packed, device.lanes), (memory.free, memory.total)
            kept = 0 if self._weights is None else self._weights.free_bytes(device)
            facts.append(DeviceFacts(name, *kind, kv, *sizes, device.describe(), kept))
        if not all(device.host for device in self._devices):
            self._spin = _SPIN
        return Hello(__version__, os.getpid(), tuple(facts))

    def measure(self, message: Measure) -> msgspec.Struct:
        """Measure the devices."""
        self._check_can_load()
        return measure_devices(self._devices, message)

    def probe(self, message: Probe) -> msgspec.Struct:
        """Send bytes back."""
        self._check_can_load()
        return answer_probe(message)

    def load(self, message: Load) -> msgspec.Struct:
        """Load layers."""
        with contextlib.ExitStack() as received:
            fd = None
            if message.shared and self._can_share:
                fd = self._channel.receive_descriptor(timeout=_SEND_TIMEOUT)
                # The mapping keeps the memory.
                received.callback(os.close, fd)
            self._check_can_load()
            if message.shared and not self._can_share:
                raise BackendError("memory cannot be shared over this connection")
            if fd is not None:
                check_descriptor(fd, message.arena)
            arena = Arena(message.arena, fd)
        self._opened.callback(arena.close)
        fetched = 0.0

        def note_fetched(share: float) -> None:
            nonlocal fetched
            # Then reading the layers is the second half.
            fetched = 0.5
            self._note_progress(fetched * share)

        path = Path(message.path) if self._locate is None else self._locate(message, note_fetched)

        def note_read(share: float) -> None:
            self._note_progress(fetched + (1 - fetched) * share)

        devices = load_devices(message, self._devices)
        self._service = ServedModel(path, message, devices, arena, self._opened, note_read, self._weights)
        self._on_loaded()
        return self._service.loaded()

    def _load_with(self, loader: Loader, message: msgspec.Struct) -> msgspec.Struct:
        self._check_can_load()
        self._service = loader.load(message, self._devices, self._opened)
        self._on_loaded()
        return self._service.loaded()

    def _check_can_load(self) -> None:
        if self._service is not None or not self._devices:
            raise BackendError("no devices are open" if not self._devices else "something is loaded already")

    def _note_progress(self, share: float) -> None:
        self._progress = share

    def _handle(self, message: msgspec.Struct) -> msgspec.Struct | Work | None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            return handler(message)
        if self._service is None:
            raise BackendError("nothing is loaded")
        return self._service.handle(message)

    def _answer_finished(self) -> None:
        """Send responses of finished work until a message arrives, or nothing is queued."""
        while self._queued and not self._channel.ready(_POLL_INTERVAL if self._queued[0][1].threaded else 0.0):
            if _is_over(self._queued[0][1]):
                self._answer_first()

    def _watch_memory(self) -> None:
        """Measure the devices' free memory each second until a message arrives, unless work is or will be queued."""
        spin = self._spin
        while not self._queued and not (self._service is not None and self._service.announced):
            self._memory.update()
            if self._channel.ready(INTERVAL, spin=spin):
                break
            spin = 0.0

    def _finish_all(self) -> None:
        """Send the responses of all queued work: they keep the order of the requests."""
        while self._queued:
            self._answer_first()

    def _answer_first(self) -> None:
        number, work, _ = self._queued[0]
        response: msgspec.Struct
        try:
            work.over.wait()
            response = work.response()
        except Exception as error:
            response = _failed(error)
            if self._service is not None and self._service.failed:
                # This response reports the failure; work that is queued behind it fails as well.
                self._service.settle()
        self._channel.send(number, response, timeout=_SEND_TIMEOUT)
        self._queued.popleft()


def _is_over(work: Work) -> bool:
    """Whether the response can be sent, which may be that the work failed."""
    try:
        return work.over.done()
    except Exception:
        return True


def _failed(error: Exception) -> Failed:
    if isinstance(error, LuceError):
        return Failed(type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        free = HostDevice().memory().free
        return Failed(OutOfMemoryError.__name__, f"host memory: {error or 'all is in use'}; {free} bytes free")
    _log.exception("a request failed")
    return Failed(BackendError.__name__, f"{type(error).__name__}: {error}")
