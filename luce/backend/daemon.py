"""The daemon's side: shards on the devices of this process, served to one other process.

Steps are queued on the devices as they come, and answered in their order when their work is done, so the next step is
on its way while one runs. Nothing that the server sends ends the daemon but the end of its connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

from luce import __version__, log
from luce import config as settings
from luce.backend.chain import Chain
from luce.backend.kept import HostKept, JoinedKept, Piece
from luce.backend.local import LocalShard
from luce.backend.plan import handed_on, handed_widths
from luce.backend.remote import ANSWER, Answer, shared_size
from luce.backend.shard import Activation
from luce.errors import BackendError, DeviceError, LuceError, ModelError, OutOfMemoryError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.ops.deltanet import RECURRENT_ROWS
from luce.ops.kvtype import KVTypes
from luce.remote.arena import Arena
from luce.remote.channel import Channel, ChannelError, GoneError, shut_down
from luce.remote.messages import (
    PROTOCOL,
    Accept,
    Announce,
    DeviceFacts,
    Done,
    Drop,
    Embed,
    Embedded,
    Failed,
    Fetch,
    Fetched,
    Fill,
    Forward,
    Hello,
    Kind,
    Load,
    Loaded,
    Open,
    Part,
    Ping,
    Pong,
    Project,
    Reply,
    Request,
    Restore,
    Save,
    Saved,
)
from luce.runtime.device import Array, Device, Event, Word
from luce.runtime.host import HostDevice, HostEvent
from luce.runtime.open import open_devices
from luce.runtime.step import PAGE, TOP, Int32, Output, Step
from luce.runtime.transfer import DEPTH, Link, Passage

_log = logging.getLogger(__name__)

#: seconds that a server gets to take an answer
_SEND = 60.0
#: seconds that the main thread gets to end after the server has gone
_GRACE = 5.0
#: seconds to look for a message without sleeping, with a GPU: the work of the other shards in a decode step
_SPIN = 10e-3
#: what a frame may hold beside the tensors of a Fill
_LARGEST = 1 << 28


def serve(
    requests: socket.socket,
    watch: socket.socket,
    *,
    shares: bool,
    silence: float | None = None,
    path: Path | None = None,
) -> None:
    """Serve one server until it closes its end. `shares`: whether it can share memory.

    `silence`: seconds without a sign of life after which it counts as gone, None where the kernel tells. `path`: the
    model, if it is not where the server has it.
    """
    with contextlib.ExitStack() as opened:
        signs: Channel[Ping] = Channel(watch, Ping)
        over = threading.Event()
        arguments = signs, requests, silence, over
        pings = threading.Thread(target=_answer_pings, args=arguments, name="luce-pings", daemon=True)
        pings.start()
        opened.callback(pings.join)
        opened.callback(signs.close)
        opened.callback(over.set)
        channel: Channel[Request] = Channel(requests, Request)
        opened.callback(channel.close)
        _Session(channel, shares, path, opened).run()


def _answer_pings(watch: Channel[Ping], requests: socket.socket, silence: float | None, over: threading.Event) -> None:
    """Give signs of life, whatever the main thread does; when the server is gone the process does not outlive it."""
    try:
        while True:
            number, _ = watch.receive(timeout=silence)
            watch.send(number, Pong(), timeout=_SEND)
    except ChannelError:
        if over.is_set():
            return
        shut_down(requests)
        if silence is None and not over.wait(_GRACE):
            os._exit(1)


@dataclass(frozen=True)
class _Work:
    """A Forward or Save whose work is queued: its answer follows when `event` has happened."""

    event: Event
    answer: Callable[[], Reply]


class _Copied(Event):
    """When what was put aside is there."""

    def __init__(self, kept: JoinedKept) -> None:
        self._kept = kept

    def happened(self) -> bool:
        return self._kept.ready()

    def wait(self) -> None:
        self._kept.wait()

    def seconds_since(self, start: Event) -> float:
        return 0.0


@dataclass(frozen=True)
class _Announced:
    """A step whose Forward is to come. Its work may be queued and wait for the input, or be what cannot be queued."""

    message: Announce
    work: _Work | None = None
    problem: Exception | None = None


class _SharedMemory(HostDevice):
    """The arena as the place that activations come from."""

    shared = True


class _Model:
    """The layers that one Load names, on their devices."""

    def __init__(
        self, path: Path, load: Load, devices: Sequence[Device], arena: Arena, opened: contextlib.ExitStack
    ) -> None:
        file = opened.enter_context(open_gguf(path))
        if fingerprint(file) != load.fingerprint:
            raise ModelError(f"{path}: the daemon's file is not the server's: their contents differ")
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        layers = _layers(load, len(devices), spec)
        spec = replace(spec, captured=load.captured)
        self.spec = spec
        self.load = load
        self.devices = devices
        self.arena = arena
        self.takes = handed_widths(spec, layers[0].start)
        self.gives = handed_widths(spec, layers[-1].stop)
        self.chain = Chain(peer=load.peer)
        opened.callback(self.chain.close)
        opened.callback(arena.close)
        if load.arena != shared_size(load.rows, self.takes, self.gives):
            raise BackendError(f"{load.arena} bytes of shared memory do not suit steps of {load.rows} rows")
        problems = arena.pin(devices)
        for problem in problems:
            _log.warning("shared memory is not pinned, copies are slower: %s", problem)
        #: whether the devices wait for a step's input, and tell its output, by themselves
        self.words = load.shared and not problems and all(device.uses_words for device in devices) and self._try_words()
        #: where the output of the step that is being queued goes, if it does not go with the answer
        self._landing: Iterator[NDArray[Any]] | None = None
        for number, (device, part, spare) in enumerate(zip(devices, layers, load.spare, strict=True)):
            log.event(_log, "loading", device=str(device.name), layers=f"{part.start}..{part.stop - 1}")
            shard = LocalShard(
                file,
                spec,
                part,
                device,
                pages=load.pages,
                slots=load.slots,
                kv=KVTypes(*load.kv),
                verify=load.verify,
                spare=spare,
                fetch=self._fetch,
                on_captured=self._hand_captured,
            )
            # What a device raises names it.
            self.chain.add(f"layers {part.start}..{part.stop - 1}", str(device.name), shard)
            if number:
                self.chain.link(load.rows * handed_on(spec, part.start) // 4)
        self._entry = None
        if self.takes:
            size = load.rows * sum(self.takes)
            self._entry = Link(_SharedMemory(), devices[0], size, peer=False, watch=lambda start, end: None)
        self._exit = devices[-1].copy_stream()
        #: what was handed on, until the copies are done
        self._sent: deque[tuple[Activation, Event]] = deque()
        self._counted = 0.0
        #: where the step that is being queued hands on
        self._target = -1
        self._kept: dict[int, JoinedKept] = {}

    def loaded(self) -> Loaded:
        parts = (part for shard in self.chain.shards for part in shard.parts)
        shown = (Part(p.device, (p.layers.start, p.layers.stop), p.weights, p.state, p.unpacked) for p in parts)
        return Loaded(tuple(shown), self.takes, self.gives, self.spec.vocab, self.words)

    def _try_words(self) -> bool:
        """Whether the devices do with words what they are asked to."""
        try:
            for device in self.devices:
                device.wait_for(Word(self.arena.given, int(self.arena.given[0])))
                device.tell(Word(self.arena.told, int(self.arena.told[0])))
                device.synchronize()
        except DeviceError as error:
            _log.warning("the host tells GPUs when to go on, steps are slower: %s", error)
            return False
        return True

    def _fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """A device's `fetch`, for outputs."""
        return self.devices[-1].fetch(array, None if self._landing is None else next(self._landing))

    def forward(self, message: Announce, there: Event) -> _Work:
        """Queue a step whose input is there when the event has happened."""
        if message.told is not None:
            memory = self.arena.memory[message.answer : message.answer + ANSWER]
            self._landing = iter(Answer(message.step, self.spec.vocab, memory).parts)
        try:
            return self._queue(message, there)
        finally:
            self._landing = None

    def _queue(self, message: Announce, there: Event) -> _Work:
        step, target = message.step, message.target
        handed: Passage | None = None
        self._target = target
        if self._entry is not None:
            handed = self._entry.send(self.arena.floats(message.source, step.rows, self.takes), there)
        result, end = self.chain.run(0, step, handed)
        for following in range(1, len(self.devices)):
            assert isinstance(result, Passage)
            handed = result
            result, end = self.chain.run(following, step, handed)
        if not isinstance(result, tuple):
            assert not isinstance(result, Passage)
            pending = result
            if message.told is not None:
                self.devices[-1].tell(Word(self.arena.told, message.told))
                return _Work(self.devices[-1].record(), lambda: Done(self._seconds()))
            apart = self._apart(target, step.rows) if self.gives else None
            # Behind the copies of what was captured.
            return _Work(self.devices[-1].record(), lambda: Done(self._seconds(), pending(), apart))
        if len(self._sent) == DEPTH:
            # Memory of what was handed on is used again from here on.
            _, taken = self._sent.popleft()
            self.devices[-1].wait_for(taken)
        self._exit.wait_for(end)
        for place, array in zip(self.arena.floats(target, step.rows, self.gives), result, strict=True):
            self._exit.copy(place, array)
        copied = self._exit.record()
        if handed is not None:
            # What is handed on may lie in what was handed over.
            handed.release(copied)
        self._sent.append((result, copied))
        return _Work(copied, lambda: Done(self._seconds(), None, self._apart(target, step.rows)))

    def _hand_captured(self, step: Step, outputs: Sequence[Array]) -> None:
        """What the last shard has captured goes where others hand on."""
        self._exit.wait_for(self.devices[-1].record())
        for place, output in zip(self.arena.floats(self._target, step.rows, self.gives), outputs, strict=True):
            self._exit.copy(place, output.view(np.float32))
        # Memory of the outputs is used again by the next step, and the answer says that they are there.
        self.devices[-1].wait_for(self._exit.record())

    def _apart(self, at: int, rows: int) -> NDArray[np.uint8] | None:
        return None if self.load.shared else self.arena.memory[at : at + 4 * rows * sum(self.gives)]

    def _seconds(self) -> float:
        """What the devices have worked since the last answer."""
        self.chain.look()
        total = self.chain.worked()
        seconds, self._counted = total - self._counted, total
        return seconds

    def embed(self, tokens: Int32) -> NDArray[np.float32]:
        if tokens.ndim != 1 or not _within(tokens, self.spec.vocab):
            raise BackendError("tokens that do not exist")
        rows: NDArray[np.float32] = self.devices[0].download(self.chain.shards[0].embed(tokens))
        return rows

    def project(self, message: Project) -> Output:
        if message.hidden.ndim != 2 or message.hidden.shape[1] != self.spec.hidden or not 0 <= message.top <= TOP:
            raise BackendError(f"rows of shape {message.hidden.shape} and {message.top} candidates cannot be projected")
        return self.chain.shards[-1].project(message.hidden, top=message.top, logits=message.logits)()

    def accept(self, slot: int, rows: int) -> None:
        self._check(slot, [()] * len(self.load.pages))
        if not 0 < rows <= self.load.verify:
            raise BackendError(f"{rows} rows cannot be accepted, tentative spans have up to {self.load.verify}")
        for shard in self.chain.shards:
            shard.accept(slot, rows)

    def save(self, number: int, message: Save) -> _Work:
        """Queue the copies; what they make is known by the number."""
        self._check(message.slot, message.pages)
        shards = self.chain.shards
        parts = [shard.save(message.slot, message.pages, held=message.held) for shard in shards]
        kept = self._kept[number] = JoinedKept(parts)
        return _Work(_Copied(kept), lambda: _saved(kept))

    def fetch(self, message: Fetch) -> Fetched:
        found: dict[str, NDArray[np.generic]] = {}
        for part in self._named(message.kept).parts:
            assert isinstance(part, HostKept)
            part.wait()
            found |= part.rows(message.first, message.count, set(message.names) - part.mirrors)
        return Fetched(found)

    def restore(self, message: Restore) -> None:
        self._check(message.slot, message.pages)
        for shard, part in zip(self.chain.shards, self._named(message.kept).parts, strict=True):
            shard.restore(message.slot, message.pages, part, message.first)

    def fill(self, message: Fill) -> None:
        self._check(message.slot, message.pages)
        for shard in self.chain.shards:
            shard.fill(Piece(message.slot, message.pages, range(*message.layers), message.tensors))

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)

    def _named(self, number: int) -> JoinedKept:
        if number not in self._kept:
            raise BackendError(f"request {number} has put nothing aside")
        return self._kept[number]

    def _check(self, slot: int | None, pages: Sequence[Sequence[int]]) -> None:
        if slot is not None and not 0 <= slot < self.load.slots:
            raise BackendError(f"slot {slot} is outside 0..{self.load.slots - 1}")
        if len(pages) != len(self.load.pages):
            raise BackendError(f"pages of {len(pages)} groups, the model has {len(self.load.pages)}")
        for own, count in zip(pages, self.load.pages, strict=True):
            if not all(0 <= page < count for page in own):
                raise BackendError(f"a page is outside 0..{count - 1}")

    def settle(self) -> None:
        """Wait until nothing runs, whether it fails or not."""
        self._sent.clear()
        self.chain.settle()
        if self._entry is not None:
            with contextlib.suppress(DeviceError):
                self._entry.settle()


class _Session:
    """What one server says, and the answers."""

    def __init__(
        self, channel: Channel[Request], shares: bool, path: Path | None, opened: contextlib.ExitStack
    ) -> None:
        self._channel = channel
        self._shares = shares
        self._path = path
        self._opened = opened
        self._spin = 0.0
        self._devices: list[Device] = []
        self._model: _Model | None = None
        self._announced: _Announced | None = None
        #: by request
        self._running: deque[tuple[int, _Work]] = deque()

    def run(self) -> None:
        """Until the server is gone."""
        try:
            while True:
                self._answer_finished()
                number, message = self._channel.receive(timeout=None, limit=_LARGEST + self._held(), spin=self._spin)
                try:
                    reply = self._handle(number, message)
                except Exception as error:
                    if self._model is not None:
                        self._model.settle()
                    reply = _failed(error)
                if reply is not None:
                    self._finish_all()
                    self._channel.send(number, reply, timeout=_SEND)
        except GoneError:
            return
        except ChannelError as error:
            _log.error("the server's connection is closed: %s", error)
        finally:
            given = None if self._announced is None else self._announced.message.given
            if self._model is not None and given is not None:
                # Nobody else will, and the device would wait for ever, also if only a part of the work was queued.
                Word(self._model.arena.given, given).tell()

    def _held(self) -> int:
        """Bytes that a Fill may bring."""
        return 0 if self._model is None else sum(shard.info.state for shard in self._model.chain.shards) * 2

    def _answer_finished(self) -> None:
        """Answer what is done until a message is there, or nothing runs."""
        while self._running and not self._channel.ready():
            if _over(self._running[0][1]):
                self._answer(*self._running.popleft())

    def _finish_all(self) -> None:
        """Answers keep the order of the requests."""
        while self._running:
            self._answer(*self._running.popleft())

    def _answer(self, number: int, work: _Work) -> None:
        reply: Reply
        try:
            work.event.wait()
            reply = work.answer()
        except Exception as error:
            reply = _failed(error)
        self._channel.send(number, reply, timeout=_SEND)

    def _handle(self, number: int, message: Request) -> Reply | None:
        """The answer, unless it comes later or never. Raises what becomes Failed."""
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Load):
            return self._load(message)
        model = self._model
        if model is None:
            raise BackendError("nothing is loaded")
        if isinstance(message, Drop):
            # It may come between a step and its Forward.
            model.drop(message.kept)
            return None
        announced, self._announced = self._announced, None
        if isinstance(message, Announce):
            self._announced = self._announce(model, message)
            return None
        if isinstance(message, Forward):
            if announced is None:
                raise BackendError("a step was not announced")
            self._running.append((number, self._forward(model, announced, message)))
            return None
        if isinstance(message, Embed):
            return Embedded(model.embed(message.tokens))
        if isinstance(message, Project):
            return Done(output=model.project(message))
        if isinstance(message, Accept):
            model.accept(message.slot, message.rows)
            return Done()
        if isinstance(message, Save):
            self._running.append((number, model.save(number, message)))
            return None
        if isinstance(message, Fetch):
            return model.fetch(message)
        if isinstance(message, Restore):
            model.restore(message)
        else:
            model.fill(message)
        return Done()

    def _open(self, message: Open) -> Reply:
        if (message.protocol, message.luce) != (PROTOCOL, __version__):
            raise BackendError(
                f"the server is Luce {message.luce} with protocol {message.protocol}, "
                f"the daemon Luce {__version__} with protocol {PROTOCOL}"
            )
        if self._devices:
            raise BackendError("devices are open already")
        given = {"target_devices": message.devices, "threads": message.threads, "log_level": message.log_level}
        config = settings.resolve(given, env={})
        logging.getLogger("luce").setLevel(config.log_level.upper())
        if config.threads:
            threadpoolctl.threadpool_limits(config.threads, user_api="blas")
        self._devices = open_devices(config)
        facts = []
        for device in self._devices:
            self._opened.callback(device.close)
            memory = device.memory()
            name, kv = str(device.name), device.kv_dtype.str
            facts.append(DeviceFacts(name, device.host, device.lanes, kv, memory.free, memory.total, device.describe()))
        if not all(device.host for device in self._devices):
            self._spin = _SPIN
        return Hello(PROTOCOL, __version__, os.getpid(), tuple(facts))

    def _load(self, message: Load) -> Reply:
        fd = self._channel.receive_descriptor(timeout=_SEND) if message.shared and self._shares else None
        if self._model is not None or not self._devices:
            raise BackendError("no devices are open" if not self._devices else "layers are loaded already")
        if message.shared and not self._shares:
            raise BackendError("memory cannot be shared over this connection")
        if fd is not None:
            _check_descriptor(fd, message.arena)
        path = self._path or Path(message.path)
        self._model = _Model(path, message, self._devices, Arena(message.arena, fd), self._opened)
        return self._model.loaded()

    def _announce(self, model: _Model, message: Announce) -> _Announced:
        """Do what can be done before the input is there. What goes wrong is the answer to Forward."""
        try:
            check_step(message.step, model.spec.vocab, model.load)
            self._check_places(model, message)
            work = None
            if message.given is not None:
                work = model.forward(message, Word(model.arena.given, message.given))
        except Exception as error:
            return _Announced(message, problem=error)
        return _Announced(message, work)

    @staticmethod
    def _forward(model: _Model, announced: _Announced, message: Forward) -> _Work:
        """The work of an announced step, queued now if it is not yet."""
        if announced.problem is not None:
            raise announced.problem
        if (message.data is None) != (model.load.shared or not model.takes):
            raise BackendError("an activation came by the wrong way")
        if message.data is not None:
            size = 4 * announced.message.step.rows * sum(model.takes)
            if message.data.shape != (size,):
                raise BackendError(f"an activation of {message.data.shape} bytes, expected {size}")
            at = announced.message.source
            model.arena.memory[at : at + size] = message.data
        return announced.work or model.forward(announced.message, HostEvent())

    @staticmethod
    def _check_places(model: _Model, message: Announce) -> None:
        rows = message.step.rows
        if rows > model.load.rows and (model.takes or model.gives):
            raise BackendError(f"a step of {rows} rows, at most {model.load.rows} were agreed on")
        for at, widths in ((message.source, model.takes), (message.target, model.gives)):
            inside = 0 <= at <= len(model.arena.memory) - 4 * rows * sum(widths) and at % 4 == 0
            if not inside if widths else at != -1:
                raise BackendError(f"place {at} is none for an activation of {rows} rows")
        if message.given is not None and not (model.words and model.takes):
            raise BackendError("there is no input that a device here could wait for")
        inside = 0 <= message.answer <= len(model.arena.memory) - ANSWER and message.answer % 64 == 0
        if message.told is not None and not (model.words and not model.gives and inside and len(message.step.wanted)):
            raise BackendError(f"place {message.answer} is none for an output, or there is none")


def check_step(step: Step, vocab: int, load: Load) -> None:
    """Raises BackendError unless all that a step refers to exists: kernels look at nothing twice."""
    rows = len(step.tokens)
    shapes = [step.tokens.shape == step.positions.shape == (rows,), rows > 0, step.wanted.ndim == 1]
    shapes += [step.top is None or step.top.shape == step.wanted.shape]
    shapes += [step.full.shape == step.wanted.shape, len(step.views) == len(load.pages)]
    at = 0
    for span in step.spans:
        shapes += [span.start == at, span.rows > 0, span.position >= 0, 0 <= span.slot < load.slots]
        shapes += [0 <= span.accepted <= load.verify, not span.tentative or span.rows <= load.verify]
        shapes += [span.position > 0 or not (span.accepted or span.tentative)]
        at += span.rows
    if not all(shapes) or at != rows:
        raise BackendError("a step whose parts do not fit each other")
    inside = [_within(step.tokens, vocab), _within(step.wanted, rows), bool((step.positions >= 0).all())]
    for view, pages in zip(step.views, load.pages, strict=True):
        spans, width = len(step.spans), view.table.shape[-1] if view.table.ndim == 2 else -1
        if view.table.shape != (spans, width) or view.first.shape != (spans, width):
            raise BackendError(f"a page table of {view.table.shape} for {spans} spans")
        seen = view.seen is None or (view.seen.shape == (rows, 2) and all(span.rows <= 64 for span in step.spans))
        if view.count.shape != (spans,) or view.dest.shape != (rows,) or not seen:
            raise BackendError("a page table whose parts do not fit each other")
        inside += [_within(view.table, pages), _within(view.dest, pages * PAGE), _within(view.count, width + 1)]
    if not all(inside):
        raise BackendError("a step refers to something that does not exist")


def _saved(kept: JoinedKept) -> Saved:
    kinds = {}
    for part in kept.parts:
        assert isinstance(part, HostKept)
        for name, tensor in part.tensors.items():
            if name not in part.mirrors:
                kinds[name] = Kind(tensor.dtype.str, tensor.shape, name in part.paged)
    return Saved(kinds, kept.nbytes)


def _within(values: NDArray[np.int32], end: int) -> bool:
    return not values.size or (int(values.min()) >= 0 and int(values.max()) < end)


def _layers(load: Load, devices: int, spec: ModelSpec) -> list[range]:
    layers = [range(begin, end) for begin, end in load.layers]
    tiled = all(before.stop == after.start for before, after in pairwise(layers))
    if len(layers) != devices or not tiled or not all(layers) or layers[-1].stop > len(spec.blocks):
        raise BackendError(f"layers {load.layers} for {devices} devices and a model of {len(spec.blocks)} layers")
    if len(load.spare) != devices:
        raise BackendError(f"spare memory of {len(load.spare)} devices, there are {devices}")
    if (
        layers[0].start < 0
        or not 0 < load.slots <= 1 << 16
        or not 0 <= load.verify <= RECURRENT_ROWS
        or len(load.pages) != len(spec.page_groups)
    ):
        raise BackendError("a load whose parts do not fit the model")
    if sorted(set(load.captured)) != list(load.captured) or not set(load.captured) <= set(range(len(spec.blocks))):
        raise BackendError(f"layers {load.captured} cannot be captured of {len(spec.blocks)}")
    if not all(0 < pages < 1 << 24 for pages in load.pages) or not 0 < load.rows <= 1 << 20:
        raise BackendError("a load whose parts do not fit the model")
    return layers


def _check_descriptor(fd: int, size: int) -> None:
    """A file that shrinks would end this process when it looks at the memory."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if os.fstat(fd).st_size < size or not seals & fcntl.F_SEAL_SHRINK:
        os.close(fd)
        raise BackendError("the shared memory is too small, or can become so")


def _over(work: _Work) -> bool:
    """Whether there is an answer, which may be that the work failed."""
    try:
        return work.event.happened()
    except LuceError:
        return True


def _failed(error: Exception) -> Failed:
    if isinstance(error, LuceError):
        return Failed(type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        free = HostDevice().memory().free
        return Failed(OutOfMemoryError.__name__, f"host memory: {error or 'all is taken'}; {free} bytes free")
    _log.exception("a request failed")
    return Failed(BackendError.__name__, f"{type(error).__name__}: {error}")
