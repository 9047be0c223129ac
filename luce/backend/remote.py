"""A shard in another process: what the verbs of a shard become on the wire."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.backend.kept import Kept, Piece, Tensors, layer_of
from luce.backend.plan import handed_widths, mirrored
from luce.backend.shard import Activation, Captured, Pending, ShardInfo
from luce.errors import BackendError, LuceError, ShardLostError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.ops.kvtype import KVTypes
from luce.ops.sample import candidates
from luce.remote.arena import Arena, arena_size, shared_arena
from luce.remote.channel import DTYPES, SMALL, Channel, ChannelError, GarbageError
from luce.remote.device import RemoteDevice
from luce.remote.messages import (
    Accept,
    Announce,
    Done,
    Drop,
    Embed,
    Embedded,
    Failed,
    Fetch,
    Fetched,
    Fill,
    Forward,
    Kind,
    Load,
    Project,
    Reply,
    Restore,
    Save,
    Saved,
)
from luce.remote.supervisor import Supervisor, failure
from luce.runtime.device import Array, Device, Event, Word
from luce.runtime.host import HostEvent
from luce.runtime.step import PAGE, TOP, Int32, Output, Step
from luce.runtime.transfer import DEPTH

_log = logging.getLogger(__name__)

#: Places for what is handed on. One more than a link has: when a step is asked for, the copy of what the one before the
#: last handed on may still run.
OUTPUTS = DEPTH + 1
#: bytes for an output in shared memory: the candidates of many rows, or the logits of one
ANSWER = 1 << 20
#: fields of a step that Answer knows: an output has more if a step has others
_ANSWERED = {"tokens", "positions", "spans", "views", "wanted", "full", "top"}
_UNANSWERED = [field for field in fields(Step) if field.name not in _ANSWERED]
#: seconds that a request may take for each row, and for each byte, beside the limit of all requests
_PER_ROW = 0.1
_PER_BYTE = 1e-7
#: Seconds to look for the answer to a step of few rows without sleeping, if a GPU gives it: such a step is over by
#: then, and a thread that waits in the driver for its own GPU does not sleep either.
_SPIN, _SPUN_ROWS = 20e-3, 64
#: answers that may be on their way while their output has been read already
_BEHIND = 8
#: bytes of kept tensors that are fetched at a time, or one tensor's
_WINDOW = 4 << 20


def shared_size(rows: int, takes: Sequence[int], gives: Sequence[int]) -> int:
    """Bytes of shared memory for steps of `rows` rows, whose activations have so many columns."""
    return arena_size([4 * rows * sum(takes)] * DEPTH + [4 * rows * sum(gives)] * OUTPUTS + [ANSWER])


class Answer:
    """How the output of a step lies in `memory`, uint8: ids, whole logits, keys of candidates, each in lines of 64."""

    def __init__(self, step: Step, vocab: int, memory: NDArray[np.uint8]) -> None:
        asked = 0 if step.top is None else int(np.count_nonzero(step.top))
        self.parts: list[NDArray[Any]] = []
        at = 0
        for rows, columns, dtype in (
            (len(step.wanted), (), np.int32),
            (int(np.count_nonzero(step.full)), (vocab,), np.float32),
            *([(asked, (min(TOP, vocab),), np.uint64)] if asked else ()),
        ):
            size = rows * math.prod(columns) * np.dtype(dtype).itemsize
            if at + size > len(memory):
                raise BackendError(f"the output of {len(step.wanted)} rows does not fit into {len(memory)} bytes")
            self.parts.append(memory[at : at + size].view(dtype).reshape(rows, *columns))
            at += -(-size // 64) * 64

    def output(self) -> Output:
        """What lies there, in fresh arrays."""
        ids, logits, *keys = self.parts
        return Output(ids.copy(), logits.copy(), candidates(keys[0]) if keys else None)


class RemoteShard:
    """Layers of a file on the devices of one daemon, a range for each. It loads in the background: `wait_loaded`.

    `name` stands in errors; `on_captured` as in LocalShard. `spare`: bytes of each device in which matrices may be kept
    unpacked; `rows`: most rows of a step if something is handed over or on. Raises OutOfMemoryError for the shared
    memory.
    """

    def __init__(
        self,
        name: str,
        file: GGUFFile,
        spec: ModelSpec,
        layers: Sequence[range],
        devices: Sequence[RemoteDevice],
        *,
        pages: Sequence[int],
        slots: int,
        kv: KVTypes,
        verify: int,
        spare: Sequence[int],
        rows: int,
        peer: bool,
        on_captured: Captured = lambda step, outputs: None,
    ) -> None:
        self.device = devices[0]
        self.layers = range(layers[0].start, layers[-1].stop)
        self._name = name
        self._daemon: Supervisor = devices[0].daemon
        self._vocab, self._hidden = spec.vocab, spec.hidden
        self._mirrored = mirrored(spec, self.layers)
        self._takes, self._gives = handed_widths(spec, self.layers.start), handed_widths(spec, self.layers.stop)
        self._last = self.layers.stop == len(spec.blocks)
        self._on_captured = on_captured
        size = shared_size(rows, self._takes, self._gives)
        self._spin = 0.0 if all(device.host for device in devices) else _SPIN
        self._arena = shared_arena(size) if self._daemon.shares else Arena(size, None)
        self._answer = self._arena.take(ANSWER)
        self._outputs = [self._arena.take(4 * rows * sum(self._gives)) for _ in range(OUTPUTS)]
        self._asked: deque[_Request] = deque()
        #: numbers of what was put aside and is of no use any more
        self._dropped: deque[int] = deque()
        self._newest: _Request | None = None
        self._announced: _Announced | None = None
        #: whose output comes through shared memory, or came last
        self._reader: _Request | None = None
        self._words = False
        self._numbers = 0
        #: the daemon's life in which sequences have state here
        self._generation = 0
        self._forwards = 0
        for device in devices:
            device.arena, device.moment = self._arena, self._moment
        self._load = Load(
            path=str(file.paths[0].resolve()),
            fingerprint=fingerprint(file),
            layers=tuple((part.start, part.stop) for part in layers),
            pages=tuple(pages),
            slots=slots,
            kv=(kv.k, kv.v),
            verify=verify,
            captured=spec.captured,
            spare=tuple(spare),
            rows=rows,
            peer=peer,
            arena=size,
            shared=self._daemon.shares,
        )
        self._expected = tuple(
            (str(device.name.local), (part.start, part.stop)) for device, part in zip(devices, layers, strict=True)
        )
        self._parts = tuple(ShardInfo(str(d.name), part, 0, 0, 0) for d, part in zip(devices, layers, strict=True))
        self._daemon.begin_load(self._load, self._arena)

    def wait_loaded(self) -> None:
        """Raises LuceError if the daemon cannot load its layers."""
        loaded = self._daemon.loaded()
        if tuple((part.device, part.layers) for part in loaded.parts) != self._expected:
            raise BackendError(f"{self._name}: the daemon has loaded other layers than it was asked to")
        theirs, ours = (loaded.takes, loaded.gives, loaded.vocab), (self._takes, self._gives, self._vocab)
        if theirs != ours:
            raise BackendError(f"{self._name}: the daemon sees a model of dimensions {theirs}, this process {ours}")
        self._words = loaded.words and self._daemon.shares
        self._parts = tuple(
            ShardInfo(mine.device, mine.layers, part.weights, part.state, part.unpacked)
            for mine, part in zip(self._parts, loaded.parts, strict=True)
        )

    def pin(self, devices: Iterable[Device]) -> None:
        """Let the copies of neighbouring devices reach the shared memory directly."""
        for problem in self._arena.pin(devices):
            _log.warning("%s: shared memory is not pinned, copies are slower: %s", self._name, problem)

    @property
    def info(self) -> ShardInfo:
        parts = self._parts
        return ShardInfo(
            ",".join(part.device for part in parts),
            self.layers,
            sum(part.weights for part in parts),
            sum(part.state for part in parts),
            sum(part.unpacked for part in parts),
        )

    apart = True

    @property
    def parts(self) -> tuple[ShardInfo, ...]:
        return self._parts

    def lost(self) -> str:
        known, self._generation = self._generation, self._daemon.generation
        return "" if known == self._generation else f"{self._name}: {self._daemon.loss()}"

    def announce(self, step: Step, handed: Activation | None) -> None:
        channel = self._channel()
        self._release()
        self._catch_up()
        source = -1 if handed is None else self._arena.place(handed[0])
        target = self._outputs[self._forwards % OUTPUTS] if self._gives else -1
        self._forwards += 1
        given = told = None
        if self._words:
            given = None if handed is None else Word(self._arena.given, self._forwards)
            told = Word(self._arena.told, self._forwards) if self._answers(step) else None
        values = (None if word is None else word.value for word in (given, told))
        self._send(channel, Announce(step, source, target, next(values), self._answer, next(values)))
        self._announced = _Announced(step, source, target, given, told)

    def _answers(self, step: Step) -> bool:
        """Whether the output of a step can come through shared memory."""
        # What was captured comes with Done, and must be there before the output is.
        if (
            not self._last
            or self._gives
            or not len(step.wanted)
            or (self._reader is not None and not self._reader.read)
        ):
            return False
        if any(getattr(step, field.name) is not field.default for field in _UNANSWERED):
            return False
        try:
            Answer(step, self._vocab, self._memory())
        except BackendError:
            return False
        return True

    def _memory(self) -> NDArray[np.uint8]:
        return self._arena.memory[self._answer : self._answer + ANSWER]

    def forward(self, step: Step, handed: Activation | None) -> Activation | Pending:
        if self._announced is None or self._announced.step is not step:
            self.announce(step, handed)
        announced = self._announced
        assert announced is not None
        self._release()
        channel, target = self._channel(), announced.target
        data = None if handed is None else self._apart(announced.source, step.rows, self._takes)
        rows = len(step.wanted)
        request = self._ask(
            channel,
            Forward(data),
            seconds=_PER_ROW * step.rows,
            # Ids and whole logits, and as much again for what else an output may have.
            limit=SMALL + 4 * (2 * rows * self._vocab + step.rows * sum(self._gives)),
            spin=self._spin if step.rows <= _SPUN_ROWS else 0.0,
            take=lambda done: self._take(done, step, announced),
        )
        if announced.told is not None:
            answer = Answer(step, self._vocab, self._memory())
            request.expect(announced.told, lambda: self._checked(answer.output(), step))
            self._reader = request
        return request.output if self._last else self._arena.floats(target, step.rows, self._gives)

    def embed(self, tokens: Int32) -> Array:
        shape = (len(tokens), self._hidden)
        found: list[NDArray[np.float32]] = []

        def take(reply: Reply) -> None:
            if not isinstance(reply, Embedded) or reply.rows.shape != shape:
                raise GarbageError("it sent something else than the rows of the tokens")
            found.append(reply.rows)

        seconds, limit = _PER_ROW * len(tokens), SMALL + 4 * len(tokens) * self._hidden
        self._ask(self._channel(), Embed(np.asarray(tokens, np.int32)), seconds=seconds, limit=limit, take=take).wait()
        return found[0]

    def project(self, hidden: Array, *, top: int = 0, logits: bool = False) -> Pending:
        rows = len(hidden)

        def take(reply: Reply) -> None:
            _done(reply)
            assert isinstance(reply, Done)
            if reply.output is None:
                raise GarbageError("it projected nothing")
            self._check_output(reply.output, rows, rows if logits else 0, (rows if top else 0, top))

        seconds, limit = _PER_ROW * rows, SMALL + 4 * rows * self._vocab
        message = Project(np.asarray(hidden, np.float32), top, logits)
        return self._ask(self._channel(), message, seconds=seconds, limit=limit, take=take).output

    def accept(self, slot: int, rows: int) -> None:
        self._ask(self._channel(), Accept(slot, rows), seconds=0, limit=SMALL, take=_done)

    def save(self, slot: int | None, pages: Sequence[Sequence[int]], *, held: bool = False) -> RemoteKept:
        kept = RemoteKept(self, self._dropped)
        message = Save(slot, tuple(tuple(map(int, group)) for group in pages), held)
        kept.saved = self._ask(self._channel(), message, seconds=self._copying, limit=SMALL, take=kept.take)
        return kept

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], kept: Kept, first: int = 0
    ) -> Callable[[], None] | None:
        assert isinstance(kept, RemoteKept)
        kept.wait()
        message = Restore(kept.number, slot, tuple(tuple(map(int, group)) for group in pages), first)
        return self._ask(self._channel(), message, seconds=self._copying, limit=SMALL, take=_done).wait

    def fill(self, piece: Piece) -> None:
        own = {
            name: tensor
            for name, tensor in piece.tensors.items()
            if self._owns(name) or layer_of(name) in self._mirrored
        }
        pages = tuple(tuple(map(int, group)) for group in piece.pages)
        message = Fill(piece.slot, pages, (piece.layers.start, piece.layers.stop), own)
        seconds = _PER_BYTE * sum(tensor.nbytes for tensor in own.values())
        self._ask(self._channel(), message, seconds=seconds, limit=SMALL, take=_done).wait()

    def fetch(self, message: Fetch, kinds: Mapping[str, Kind], size: int) -> Tensors:
        """Tensors of `kinds`, of together `size` bytes."""
        found: dict[str, NDArray[np.generic]] = {}

        def take(reply: Reply) -> None:
            if not isinstance(reply, Fetched) or reply.tensors.keys() != set(message.names):
                raise GarbageError("it sent other tensors than were asked for")
            for name, tensor in reply.tensors.items():
                if (tensor.dtype.str, tensor.nbytes) != (kinds[name].dtype, _size(kinds[name], message.count)):
                    raise GarbageError(f"it sent {name} of shape {tensor.shape} and type {tensor.dtype}")
            found.update(reply.tensors)

        self._ask(self._channel(), message, seconds=_PER_BYTE * size, limit=SMALL + size, take=take).wait()
        return found

    @property
    def _copying(self) -> float:
        """Seconds that copies of a sequence's state may take the daemon's devices."""
        return _PER_BYTE * self.info.state

    def _owns(self, name: str) -> bool:
        return layer_of(name) in self.layers

    def close(self) -> None:
        """Idempotent. The daemon ends with its devices."""
        self._arena.close()

    def _release(self) -> None:
        """Let work go on that waits for the input of an announced step, or would for ever if that has failed."""
        if self._announced is not None and self._announced.given is not None:
            self._announced.given.tell()
        self._announced = None

    def _apart(self, at: int, rows: int, widths: Sequence[int]) -> NDArray[np.uint8] | None:
        """What lies at a place, for a peer that does not see it."""
        return None if self._daemon.shares else self._arena.memory[at : at + 4 * rows * sum(widths)]

    def _take(self, reply: Reply, step: Step, announced: _Announced) -> None:
        """Check the answer to a Forward, and put what came with it where it belongs."""
        _done(reply)
        assert isinstance(reply, Done)
        expected = self._apart(announced.target, step.rows, self._gives) if self._gives else None
        brings = self._last and announced.told is None
        if (expected is None) != (reply.data is None) or (reply.output is None) == brings:
            raise GarbageError("it answered with something else than was asked for")
        if expected is not None and reply.data is not None:
            if reply.data.shape != expected.shape:
                raise GarbageError(f"it handed on {reply.data.shape} bytes, expected {expected.shape}")
            expected[...] = reply.data
        if self._last and self._gives:
            outputs = self._arena.floats(announced.target, step.rows, self._gives)
            self._on_captured(step, [output.copy().view(np.uint16) for output in outputs])
        if announced.told is not None and not announced.told.happened():
            raise GarbageError("it is done without the output")
        if reply.output is not None and len(step.wanted):
            self._checked(reply.output, step)

    def _checked(self, output: Output, step: Step) -> Output:
        """Raises GarbageError unless it is an output of the step."""
        top = 0 if step.top is None else int(np.count_nonzero(step.top))
        self._check_output(output, len(step.wanted), int(np.count_nonzero(step.full)), (top, TOP))
        return output

    def _check_output(self, output: Output, rows: int, full: int, asked: tuple[int, int]) -> None:
        """Raises GarbageError unless there are ids of `rows` rows, logits of `full`, and (rows, count) candidates."""
        ids, logits, top = output.ids, output.logits, output.top
        shape = asked[0], min(asked[1], self._vocab)
        if ids.shape != (rows,) or logits.shape != (full, self._vocab):
            raise GarbageError(f"it returned ids {ids.shape} and logits {logits.shape} for {rows} rows")
        if (top is None) != (not asked[0]) or (top is not None and not top.ids.shape == top.logits.shape == shape):
            raise GarbageError("it returned other candidates than were asked for")
        for found in (ids, *([] if top is None else [top.ids])):
            if found.min(initial=0) < 0 or found.max(initial=0) >= self._vocab:
                raise GarbageError(f"it returned ids outside 0..{self._vocab - 1}")

    def _channel(self) -> Channel[Reply]:
        try:
            return self._daemon.channel(self._generation)
        except ShardLostError as error:
            raise self._named(error) from None

    def _moment(self) -> Event:
        """When all that has been asked for is done."""
        return self._newest or HostEvent()

    def _send(self, channel: Channel[Reply], message: msgspec.Struct) -> None:
        self._numbers += 1
        try:
            channel.send(self._numbers, message, timeout=self._daemon.limits.request)
        except ChannelError as error:
            self.lost_by(channel, error)

    def _ask(
        self,
        channel: Channel[Reply],
        message: msgspec.Struct,
        *,
        seconds: float,
        limit: int,
        spin: float = 0.0,
        take: Callable[[Reply], None],
    ) -> _Request:
        self._release()
        if self._dropped:
            # Who keeps the last reference may be on any thread, and may go meanwhile.
            self._send(channel, Drop(tuple(self._dropped.popleft() for _ in range(len(self._dropped)))))
        self._send(channel, message)
        request = _Request(self, channel, self._numbers, self._daemon.limits.request + seconds, limit, spin, take)
        self._asked.append(request)
        self._newest = request
        return request

    def pump(self, request: _Request, *, wait: bool) -> None:
        """Receive answers until the one to a request, or all that are there without waiting."""
        while not request.over and (wait or request.channel.ready()):
            self._receive()

    def _receive(self) -> None:
        head = self._asked[0]
        try:
            number, reply = head.channel.receive(timeout=head.seconds, limit=head.limit, spin=head.spin)
            if number != head.number:
                raise GarbageError(f"it answered request {number} instead of {head.number}")
            head.finish(reply, self._name)
            self._asked.popleft()
        except ChannelError as error:
            self.lost_by(head.channel, error)

    def _catch_up(self) -> None:
        """Receive answers that are there; there may be some to requests whose output was read before."""
        while self._asked and (self._asked[0].channel.ready() or len(self._asked) > _BEHIND):
            head = self._asked[0]
            self._receive()
            if head.error is not None and head.early:
                raise head.error

    def lost_by(self, channel: Channel[Reply], why: ChannelError) -> NoReturn:
        """The daemon's death is the answer to all that was asked."""
        error = self._named(self._daemon.lost(channel, why))
        for request in self._asked:
            request.error = error
        self._asked.clear()
        self._newest = None
        raise error

    def _named(self, error: ShardLostError) -> ShardLostError:
        return ShardLostError(f"{self._name}: {error}")


@dataclass(frozen=True)
class _Announced:
    """A step whose Forward is to come, and what went with it, as in the message."""

    step: Step
    source: int
    target: int
    given: Word | None
    told: Word | None


class _Request(Event):
    """Something that the daemon was asked for; the event is its answer, or the output that is told before it."""

    def __init__(
        self,
        shard: RemoteShard,
        channel: Channel[Reply],
        number: int,
        seconds: float,
        limit: int,
        spin: float,
        take: Callable[[Reply], None],
    ) -> None:
        self._shard = shard
        self.channel = channel
        self.number = number
        self.seconds = seconds
        self.limit = limit
        self.spin = spin
        self._take = take
        self._told: Word | None = None
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

    def expect(self, told: Word, read: Callable[[], Output]) -> None:
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
        self._done = True

    def output(self) -> Output:
        """What the last shard returns; waits for it."""
        self.wait()
        if self._output is None:
            assert self._read is not None
            try:
                self._output = self._read()
            except GarbageError as error:
                self._shard.lost_by(self.channel, error)
        return self._output

    def happened(self) -> bool:
        self._shard.pump(self, wait=False)
        if self.error is not None:
            raise self.error
        return self._done

    def wait(self) -> None:
        if not self._is_told():
            self._shard.pump(self, wait=True)
        if self.error is not None:
            raise self.error

    def _is_told(self) -> bool:
        """Whether the output is there. Looks for it without sleeping, as long as the request is to be looked for."""
        if self._told is None:
            return False
        end = time.monotonic() + self.spin
        while not self._told.happened() and not self.over and time.monotonic() < end:
            self._shard.pump(self, wait=False)
        return self._told.happened()

    def seconds_since(self, start: Event) -> float:
        """The daemon's own measure: between the answers lies what it waited for as well."""
        return self._work


class RemoteKept:
    """What a daemon has put aside. The daemon is told when the last reference is gone."""

    def __init__(self, shard: RemoteShard, dropped: deque[int]) -> None:
        self._shard = shard
        self._dropped = dropped
        self.saved: _Request | None = None
        self._kinds: Mapping[str, Kind] = {}
        self._nbytes = 0

    def __del__(self) -> None:
        if self.saved is not None:
            self._dropped.append(self.saved.number)

    @property
    def number(self) -> int:
        """How the daemon knows it."""
        assert self.saved is not None
        return self.saved.number

    @property
    def nbytes(self) -> int:
        self.wait()
        return self._nbytes

    def take(self, reply: Reply) -> None:
        """The daemon's answer."""
        if not isinstance(reply, Saved) or any(layer_of(name) not in self._shard.layers for name in reply.kinds):
            raise GarbageError("it put aside something else than its layers")
        if not all(kind.dtype in DTYPES and min(kind.shape, default=0) >= 0 for kind in reply.kinds.values()):
            raise GarbageError("it put aside what no tensor is")
        if not 0 <= sum(map(_size, reply.kinds.values())) <= reply.nbytes:
            raise GarbageError("it put aside more than it says")
        self._kinds, self._nbytes = reply.kinds, reply.nbytes

    def ready(self) -> bool:
        return self.saved is not None and self.saved.happened()

    def wait(self) -> None:
        assert self.saved is not None
        self.saved.wait()

    def windows(self, first: int = 0, count: int | None = None) -> Iterator[Tensors]:
        self.wait()
        names: list[str] = []
        size = 0
        for name, kind in self._kinds.items():
            own = _size(kind, count)
            if names and size + own > _WINDOW:
                yield self._shard.fetch(Fetch(self.number, tuple(names), first, count), self._kinds, size)
                names, size = [], 0
            names.append(name)
            size += own
        if names:
            yield self._shard.fetch(Fetch(self.number, tuple(names), first, count), self._kinds, size)


def _size(kind: Kind, count: int | None = None) -> int:
    """Bytes of a tensor, or of `count` pages of it."""
    whole = math.prod(kind.shape) * np.dtype(kind.dtype).itemsize
    return whole if count is None or not kind.paged else whole * count * PAGE // max(1, kind.shape[0])


def _done(reply: Reply) -> None:
    if not isinstance(reply, Done):
        raise GarbageError(f"it sent {type(reply).__name__} instead of Done")
