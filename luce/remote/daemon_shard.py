"""The layers that a daemon serves, on the devices of its process.

Work is queued on the devices; `Work` says when it is done, and what the answer is then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce import log
from luce.errors import BackendError, DeviceError, ModelError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc.arena import Arena
from luce.ipc.messages import (
    Announce,
    Done,
    Fetch,
    Fetched,
    Fill,
    Forward,
    Kind,
    Load,
    Loaded,
    Part,
    Project,
    Rank,
    Reply,
    Restore,
    Save,
    Saved,
    Seal,
    Unseal,
)
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.ops.kvtype import KVTypes
from luce.remote.activation_codec import ActivationCodec
from luce.remote.shared_layout import ANSWER, Answer, shared_size
from luce.remote.validate import check_pages, check_step, is_path, load_layers, within
from luce.runtime.device import Array, Device, Event, Flag
from luce.runtime.host import HostDevice, HostEvent
from luce.runtime.step import MAX_CANDIDATES, Int32, Output, Step
from luce.runtime.transfer import DEPTH, Link, Transfer
from luce.shard.local import LocalShard
from luce.shard.pipeline import Chain, Ran
from luce.shard.saved_state import HostSavedState, JoinedSavedState, Piece
from luce.shard.shard import Activation, Pending
from luce.shard.sizes import handed_on, handed_widths

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """A Forward or Save whose work is queued: its answer follows when `event` has happened.

    `patient`: threads of this process are still at it, which whoever looks for it all the time would slow down.
    """

    event: Event
    answer: Callable[[], Reply]
    patient: bool = False


class _Queued(Event):
    """When a step is over that the chain's threads are to queue."""

    def __init__(self, ran: Future[Ran]) -> None:
        self._ran = ran

    def done(self) -> bool:
        return self._ran.done() and self._ran.result()[1].done()

    def wait(self) -> None:
        self._ran.result()[1].wait()

    def seconds_since(self, start: Event) -> float:
        return 0.0


class _Copied(Event):
    """When what was put aside is there."""

    def __init__(self, kept: JoinedSavedState) -> None:
        self._kept = kept

    def done(self) -> bool:
        return self._kept.ready()

    def wait(self) -> None:
        self._kept.wait()

    def seconds_since(self, start: Event) -> float:
        return 0.0


@dataclass(frozen=True)
class Announced:
    """A step whose Forward is to come. Its work may be queued and wait for the input, or be what cannot be queued."""

    message: Announce
    work: Work | None = None
    problem: Exception | None = None


class _SharedMemory(HostDevice):
    """The arena as the place that activations come from."""

    remote = True


class ServedModel:
    """The layers that one Load names, on their devices. Raises LuceError for what a message cannot ask for.

    `on_read` gets the share of the layers that are read, after each.
    """

    def __init__(
        self,
        path: Path,
        load: Load,
        devices: Sequence[Device],
        arena: Arena,
        opened: contextlib.ExitStack,
        on_read: Callable[[float], None],
    ) -> None:
        file = opened.enter_context(open_gguf(path))
        if fingerprint(file) != load.fingerprint:
            raise ModelError(f"{path}: the daemon's file is not the server's: their contents differ")
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        layers = load_layers(load, len(devices), spec)
        spec = replace(spec, captured=load.captured, ranked=load.ranked)
        self.spec = spec
        self.load = load
        self.devices = devices
        self.arena = arena
        self.takes = handed_widths(spec, layers[0].start)
        self.gives = handed_widths(spec, layers[-1].stop)
        #: how what is taken and given travels in messages
        self._wires = (
            ActivationCodec(load.wire, spec, layers[0].start),
            ActivationCodec(load.wire, spec, layers[-1].stop),
        )
        self._last = layers[-1].stop == len(spec.layers)
        self.chain = Chain(peer=load.peer, enter=self._enter, leave=self._leave)
        opened.callback(self.chain.close)
        if load.arena != shared_size(load.rows, self.takes, self.gives):
            raise BackendError(f"{load.arena} bytes of shared memory do not suit steps of {load.rows} rows")
        problems = arena.pin(devices)
        for problem in problems:
            _log.warning("shared memory is not pinned, copies are slower: %s", problem)
        #: whether the devices wait for a step's input, and tell its output, by themselves
        self.words = load.shared and not problems and all(device.uses_flags for device in devices) and self._try_words()
        #: steps that are being queued, by their identity, and when their inputs are there
        self._going: dict[int, tuple[Announce, Event]] = {}
        read, count = itertools.count(1), sum(map(len, layers))
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
                pieces=len(devices) > 1,
                places=self._places,
                on_captured=self._hand_captured,
                on_layer=lambda: on_read(next(read) / count),
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
        self._kept: dict[int, JoinedSavedState] = {}

    def loaded(self) -> Loaded:
        """What lies on the devices, and the model's dimensions as this process sees them."""
        parts = (part for shard in self.chain.shards for part in shard.info.devices)
        shown = (Part(p.device, (p.layers.start, p.layers.stop), p.weights, p.state, p.unpacked) for p in parts)
        return Loaded(tuple(shown), self.takes, self.gives, self.spec.vocab, self.words)

    def _try_words(self) -> bool:
        """Whether the devices do with words what they are asked to."""
        try:
            for device in self.devices:
                device.wait_for(Flag(self.arena.given, int(self.arena.given[0])))
                device.set_flag(Flag(self.arena.told, int(self.arena.told[0])))
                device.synchronize()
        except DeviceError as error:
            _log.warning("the host tells GPUs when to go on, steps are slower: %s", error)
            return False
        return True

    def announce(self, message: Announce) -> Announced:
        """Do what can be done before the input is there. What goes wrong is the answer to Forward."""
        try:
            check_step(message.step, self.spec.vocab, self.load)
            self._check_places(message)
            work = None
            if message.given is not None:
                work = self.forward(message, Flag(self.arena.given, message.given))
        except Exception as error:
            return Announced(message, problem=error)
        return Announced(message, work)

    def run(self, announced: Announced, message: Forward) -> Work:
        """The work of an announced step, queued now if it is not yet."""
        if announced.problem is not None:
            raise announced.problem
        if (message.data is None) != (self.load.shared or not self.takes):
            raise BackendError("an activation came by the wrong way")
        if message.data is not None:
            memory = self.arena.memory[announced.message.source :]
            self._wires[0].unpack(message.data, memory, announced.message.step.rows)
        return announced.work or self.forward(announced.message, HostEvent())

    def _check_places(self, message: Announce) -> None:
        rows = message.step.rows
        if rows > self.load.rows and (self.takes or self.gives):
            raise BackendError(f"a step of {rows} rows, at most {self.load.rows} were agreed on")
        for at, widths in ((message.source, self.takes), (message.target, self.gives)):
            inside = 0 <= at <= len(self.arena.memory) - 4 * rows * sum(widths) and at % 4 == 0
            if not inside if widths else at != -1:
                raise BackendError(f"place {at} is none for an activation of {rows} rows")
        if message.given is not None and not (self.words and self.takes):
            raise BackendError("there is no input that a device here could wait for")
        inside = 0 <= message.answer <= len(self.arena.memory) - ANSWER and message.answer % 64 == 0
        if message.told is not None and not (self.words and self._last and inside and len(message.step.output_rows)):
            raise BackendError(f"place {message.answer} is none for an output, or there is none")

    def forward(self, message: Announce, there: Event) -> Work:
        """Queue a step whose input is there when the event has happened."""
        step, chain = message.step, self.chain
        self._going[id(step)] = message, there
        if len(self.devices) == 1 or (len(step.output_rows) and chain.idle and chain.failure is None):
            # A thread takes tens of microseconds to wake.
            result, over = chain.through(step)
            return Work(over, lambda: self._done(message, result))
        ran = chain.queue(step)
        return Work(_Queued(ran), lambda: self._done(message, ran.result()[0]), patient=True)

    def _enter(self, step: Step) -> Transfer | None:
        """What the first shard is handed, on its thread."""
        message, there = self._going[id(step)]
        if self._entry is None:
            return None
        return self._entry.send(self.arena.floats(message.source, step.rows, self.takes), there)

    def _places(self, step: Step) -> Sequence[NDArray[Any]] | None:
        """Where the output goes, if it does not go with the answer."""
        message, _ = self._going[id(step)]
        if message.told is None:
            return None
        return Answer(step, self.spec.vocab, self.arena.memory[message.answer : message.answer + ANSWER]).parts

    def _leave(self, step: Step, result: Activation | Pending, end: Event) -> Event:
        """Tell the output of a step, or hand on what others go on with; on the last shard's thread."""
        message, _ = self._going.pop(id(step))
        last = self.devices[-1]
        if not isinstance(result, tuple):
            if message.told is not None:
                last.set_flag(Flag(self.arena.told, message.told))
            # Behind the copies of what was captured.
            return last.record()
        if len(self._sent) == DEPTH:
            # Memory of what was handed on is used again from here on.
            _, taken = self._sent.popleft()
            last.wait_for(taken)
        self._exit.wait_for(end)
        for place, array in zip(self.arena.floats(message.target, step.rows, self.gives), result, strict=True):
            self._exit.copy(place, array)
        copied = self._exit.record()
        self._sent.append((result, copied))
        return copied

    def _done(self, message: Announce, result: object) -> Done:
        """The answer to a step that is over, of which the last shard has made this."""
        output = result() if callable(result) and message.told is None else None
        data = None
        if self.gives and not self.load.shared:
            data = self._wires[1].pack(self.arena.memory[message.target :], message.step.rows)
        return Done(self._seconds(), output, data)

    def _hand_captured(self, step: Step, outputs: Sequence[Array]) -> None:
        """What the last shard has captured goes where others hand on."""
        self._exit.wait_for(self.devices[-1].record())
        message, _ = self._going[id(step)]
        for place, output in zip(self.arena.floats(message.target, step.rows, self.gives), outputs, strict=True):
            self._exit.copy(place, output.view(np.float32))
        # Memory of the outputs is used again by the next step, and the answer says that they are there.
        self.devices[-1].wait_for(self._exit.record())

    def _seconds(self) -> float:
        """What the devices have worked since the last answer."""
        self.chain.look()
        total = self.chain.worked()
        seconds, self._counted = total - self._counted, total
        return seconds

    def embed(self, tokens: Int32) -> NDArray[np.float32]:
        """Rows of the token table, [tokens, H]."""
        self.chain.wait()
        if tokens.ndim != 1 or not within(tokens, self.spec.vocab):
            raise BackendError("tokens that do not exist")
        rows: NDArray[np.float32] = self.devices[0].download(self.chain.shards[0].ends.embed(tokens))
        return rows

    def project(self, message: Project) -> Output:
        """The head's product with rows."""
        self.chain.wait()
        if (
            message.hidden.ndim != 2
            or message.hidden.shape[1] != self.spec.hidden
            or not 0 <= message.top <= MAX_CANDIDATES
        ):
            raise BackendError(f"rows of shape {message.hidden.shape} and {message.top} candidates cannot be projected")
        if not (0 <= message.scale < math.inf and 0 <= message.softcap < math.inf):
            raise BackendError(f"no norms of logits times {message.scale}, capped at {message.softcap}")
        shard, norms = self.chain.shards[-1], {"scale": message.scale, "softcap": message.softcap}
        return shard.ends.project(message.hidden, top=message.top, logits=message.logits, **norms)()

    def seal(self, message: Seal) -> None:
        """Queue what keeps the moments of pages' keys."""
        self.chain.wait()
        pages = [() if group.window is not None else message.pages for group in self.spec.page_groups]
        check_pages(self.load, message.slot, pages)
        if len(message.entries) != len(message.pages) or not all(0 <= entry < 1 << 24 for entry in message.entries):
            raise BackendError("pages of a sequence that cannot be")
        for shard in self.chain.shards:
            shard.ranking.add(message.slot, message.entries, message.pages)

    def unseal(self, message: Unseal) -> None:
        """Give up what was kept of a slot's pages."""
        self.chain.wait()
        check_pages(self.load, message.slot)
        for shard in self.chain.shards:
            shard.ranking.drop(message.slot)

    def rank(self, message: Rank) -> NDArray[np.float64]:
        """Shares of sealed pages, by layer."""
        self.chain.wait()
        check_pages(self.load, message.slot)
        entries = message.entries
        listed = entries.ndim == 1 and entries.size > 0 and entries[0] >= 0 and (np.diff(entries) > 0).all()
        if message.position < 0 or not listed:
            raise BackendError("these pages of a sequence cannot be ranked")
        return np.concatenate(
            [shard.ranking.rank(message.slot, message.position, entries) for shard in self.chain.shards]
        )

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """These rows of a speculative span or a tree count."""
        self.chain.wait()
        check_pages(self.load, slot)
        if not is_path(rows, self.load.verify):
            raise BackendError(f"rows {rows} cannot be accepted, speculative spans have up to {self.load.verify}")
        for shard in self.chain.shards:
            shard.accept(slot, rows)

    def save(self, number: int, message: Save) -> Work:
        """Queue the copies; what they make is known by the number."""
        self.chain.wait()
        check_pages(self.load, message.slot, message.pages)
        shards = self.chain.shards
        parts = [shard.state.save(message.slot, message.pages, held=message.held) for shard in shards]
        kept = self._kept[number] = JoinedSavedState(parts)
        return Work(_Copied(kept), lambda: _saved(kept))

    def fetch(self, message: Fetch) -> Fetched:
        """Some of what was put aside, once it is there."""
        found: dict[str, NDArray[np.generic]] = {}
        for part in self._named(message.kept).parts:
            assert isinstance(part, HostSavedState)
            part.wait()
            found |= part.rows(message.first, message.count, set(message.names) - part.mirrors)
        return Fetched(found)

    def restore(self, message: Restore) -> None:
        """What was put aside, back into pages and a slot."""
        self.chain.wait()
        check_pages(self.load, message.slot, message.pages)
        for shard, part in zip(self.chain.shards, self._named(message.kept).parts, strict=True):
            shard.state.restore(message.slot, message.pages, part, message.first)

    def fill(self, message: Fill) -> None:
        """The same from tensors that came with the message."""
        self.chain.wait()
        check_pages(self.load, message.slot, message.pages)
        for shard in self.chain.shards:
            shard.state.load(Piece(message.slot, message.pages, range(*message.layers), message.tensors))

    def drop(self, numbers: Sequence[int]) -> None:
        """What these requests put aside is of no use any more."""
        for number in numbers:
            self._kept.pop(number, None)

    def _named(self, number: int) -> JoinedSavedState:
        if number not in self._kept:
            raise BackendError(f"request {number} has put nothing aside")
        return self._kept[number]

    def settle(self) -> None:
        """Wait until nothing runs, whether it fails or not."""
        self.chain.settle()
        self._sent.clear()
        self._going.clear()
        if self._entry is not None:
            with contextlib.suppress(DeviceError):
                self._entry.settle()


def _saved(kept: JoinedSavedState) -> Saved:
    kinds = {}
    for part in kept.parts:
        assert isinstance(part, HostSavedState)
        for name, tensor in part.tensors.items():
            if name not in part.mirrors:
                kinds[name] = Kind(tensor.dtype.str, tensor.shape, name in part.paged)
    return Saved(kinds, kept.nbytes)
