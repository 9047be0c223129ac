"""A shard in another process: what the verbs of a shard become on the wire."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError, OutOfMemoryError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile
from luce.ipc.arena import Arena, shared_arena
from luce.ipc.channel import SMALL, GarbageError
from luce.ipc.device import RemoteDevice
from luce.ipc.messages import (
    Accept,
    Announce,
    Done,
    Forward,
    Load,
    Reply,
)
from luce.ipc.supervisor import Supervisor
from luce.models.spec import ModelSpec
from luce.ops.kvtype import KVTypes
from luce.remote.activation_codec import ActivationCodec
from luce.remote.rpc import PER_BYTE, PER_ROW, Request, Requests
from luce.remote.shard_groups import RemoteEnds, RemoteRanking, RemoteState, check_done, check_ids, check_output
from luce.remote.shared_layout import ANSWER, OUTPUTS, Answer, shared_size
from luce.runtime.device import Device, Event, Flag
from luce.runtime.host import HostEvent
from luce.runtime.step import MAX_CANDIDATES, Output, Step
from luce.shard.shard import Activation, Captured, DaemonState, DeviceInfo, Pending, ShardInfo
from luce.shard.sizes import handed_widths, mirrored

_log = logging.getLogger(__name__)

#: Seconds to look for the answer to a step of few rows without sleeping, if a GPU gives it: such a step is over by
#: then, and a thread that waits in the driver for its own GPU does not sleep either.
_SPIN, _SPUN_ROWS = 20e-3, 64


def daemon_state(
    shard: int | str, device: str, daemon: Supervisor, *, shared: tuple[int, int] | None = None
) -> DaemonState:
    """What a daemon's supervisor tells of it. `shared`: bytes sent and received through memory that it may share."""
    ways = {"stream": daemon.traffic()} | ({} if shared is None else {"shared": shared})
    return DaemonState(
        shard,
        device,
        up=daemon.ready(),
        restarts=daemon.generation,
        transport="shared" if shared is not None and daemon.shares else "stream",
        words=False,
        moved={
            (way, to): n for way, counts in ways.items() for to, n in zip(("sent", "received"), counts, strict=True)
        },
        waited=None,
    )


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
        self._vocab = spec.vocab
        self._takes, self._gives = handed_widths(spec, self.layers.start), handed_widths(spec, self.layers.stop)
        wire = self._daemon.wire
        self._wires = ActivationCodec(wire, spec, self.layers.start), ActivationCodec(wire, spec, self.layers.stop)
        self._last = self.layers.stop == len(spec.layers)
        self._on_captured = on_captured
        size = shared_size(rows, self._takes, self._gives)
        self._spin = 0.0 if all(device.host for device in devices) else _SPIN
        self._arena = self._memory_of(size)
        self._answer = self._arena.take(ANSWER)
        self._outputs = [self._arena.take(4 * rows * sum(self._gives)) for _ in range(OUTPUTS)]
        self._requests = Requests(self._daemon, before=self._release)
        self._announced: _Announced | None = None
        #: whose output comes through shared memory, or came last
        self._reader: Request | None = None
        #: the last step whose captured outputs come with its answer
        self._capturing: Request | None = None
        self._words = False
        self._forwards = 0
        #: bytes of a row in shared memory, and of all that went through it, to the daemon and from it
        self._handed_row, self._taken_row = 4 * sum(self._takes), 4 * sum(self._gives)
        self._handed = self._taken = 0
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
            ranked=spec.ranked,
            spare=tuple(spare),
            rows=rows,
            peer=peer,
            arena=size,
            shared=self._daemon.shares,
            wire=wire,
        )
        self._expected = tuple(
            (str(device.name.local), (part.start, part.stop)) for device, part in zip(devices, layers, strict=True)
        )
        parts = zip(devices, layers, strict=True)
        self.info = ShardInfo(tuple(DeviceInfo(str(device.name), part, 0, 0, 0) for device, part in parts))
        self.state = RemoteState(self._requests, self.layers, mirrored(spec, self.layers), self._copy_seconds)
        self.ranking = RemoteRanking(self._requests, sum(map(spec.ranks, self.layers)), self._copy_seconds)
        self.ends = RemoteEnds(self._requests, self.device, spec.hidden, spec.vocab)
        self._daemon.begin_load(self._load, self._arena, name)

    def _memory_of(self, size: int) -> Arena:
        if self._daemon.shares:
            try:
                return shared_arena(size)
            except OutOfMemoryError as error:
                if self._daemon.required:
                    raise OutOfMemoryError(f"{self._name}: --shard-transport shared: {error}") from error
                _log.warning("%s: activations go in messages, which is slower: %s", self._name, error)
                self._daemon.shares = False
        return Arena(size, None)

    def wait_loaded(self, on_read: Callable[[], None] = lambda: None) -> None:
        """`on_read` is called meanwhile, when `read` may have changed. Raises LuceError if the daemon cannot load."""
        loaded = self._daemon.loaded(on_read)
        if tuple((part.device, part.layers) for part in loaded.parts) != self._expected:
            raise BackendError(f"{self._name}: the daemon has loaded other layers than it was asked to")
        theirs, ours = (loaded.takes, loaded.gives, loaded.vocab), (self._takes, self._gives, self._vocab)
        if theirs != ours:
            raise BackendError(f"{self._name}: the daemon sees a model of dimensions {theirs}, this process {ours}")
        self._words = loaded.words and self._daemon.shares
        self.info = ShardInfo(
            tuple(
                DeviceInfo(mine.device, mine.layers, part.weights, part.state, part.unpacked)
                for mine, part in zip(self.info.devices, loaded.parts, strict=True)
            )
        )

    @property
    def read(self) -> float:
        """Share of its layers that the daemon has read, as far as is known. Any thread may ask."""
        return self._daemon.read

    def pin(self, devices: Iterable[Device]) -> None:
        """Let the copies of neighbouring devices reach the shared memory directly."""
        for problem in self._arena.pin(devices):
            _log.warning("%s: shared memory is not pinned, copies are slower: %s", self._name, problem)

    remote = True

    def lost(self) -> str:
        why = self._requests.lost()
        if why:
            # Whatever the last daemon has left in the words, no step of the next one may take it for its own.
            for word in (self._arena.given, self._arena.told):
                if Flag(word, self._forwards).done():
                    self._forwards = int(word[0])
        return why

    def down(self) -> str:
        return self._daemon.down()

    def daemon_state(self, number: int) -> DaemonState:
        """What there is to tell of its daemon, as the shard of this number. Any thread may ask."""
        state = daemon_state(number, self.info.device, self._daemon, shared=(self._handed, self._taken))
        return replace(state, words=self._words, waited=self._requests.waited)

    def announce(self, step: Step, activation: Activation | None) -> None:
        self._release()
        self._requests.catch_up()
        source = -1 if activation is None else self._arena.place(activation[0])
        target = self._outputs[self._forwards % OUTPUTS] if self._gives else -1
        self._forwards += 1
        given = told = None
        if self._words:
            given = None if activation is None else Flag(self._arena.given, self._forwards)
            told = Flag(self._arena.told, self._forwards) if self._answers(step) else None
        values = (None if word is None else word.value for word in (given, told))
        self._requests.send(Announce(step, source, target, next(values), self._answer, next(values)))
        self._announced = _Announced(step, source, target, given, told)

    def _answers(self, step: Step) -> bool:
        """Whether the output of a step can come through shared memory."""
        if not self._last or not len(step.output_rows) or (self._reader is not None and not self._reader.read):
            return False
        # What was captured is handed to a drafter in the order of the steps.
        if self._capturing is not None and not self._capturing.over:
            return False
        try:
            Answer(step, self._vocab, self._memory())
        except BackendError:
            return False
        return True

    def _memory(self) -> NDArray[np.uint8]:
        return self._arena.memory[self._answer : self._answer + ANSWER]

    def forward(self, step: Step, activation: Activation | None) -> Activation | Pending:
        if self._announced is None or self._announced.step is not step:
            self.announce(step, activation)
        announced = self._announced
        assert announced is not None
        self._release()
        target = announced.target
        data = None
        if self._daemon.shares:
            self._handed += step.rows * self._handed_row
            self._taken += step.rows * self._taken_row
        elif activation is not None:
            data = self._wires[0].pack(self._arena.memory[announced.source :], step.rows)
        rows = len(step.output_rows)
        request = self._requests.ask(
            Forward(data),
            seconds=PER_ROW * step.rows,
            # Ids and whole logits, and as much again for what else an output may have.
            limit=SMALL + 4 * (2 * rows * self._vocab + step.rows * sum(self._gives)),
            spin=self._spin if step.rows <= _SPUN_ROWS else 0.0,
            take=lambda done: self._take(done, step, announced),
        )
        if announced.told is not None:
            answer = Answer(step, self._vocab, self._memory())
            request.expect(announced.told, lambda: self._read(answer, step, announced))
            self._taken += answer.size
            self._reader = request
        elif self._last and self._gives:
            self._capturing = request
        return request.output if self._last else self._arena.floats(target, step.rows, self._gives)

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        # Else what is saved next might be of other rows than it says, and nobody would hear of it.
        self._requests.ask(Accept(slot, tuple(rows)), seconds=0, limit=SMALL, take=check_done).wait()

    def _copy_seconds(self) -> float:
        """Seconds that copies of a sequence's state may take the daemon's devices."""
        return PER_BYTE * self.info.state

    def close(self) -> None:
        """Idempotent. The daemon ends with its devices."""
        self._arena.close()

    def _release(self) -> None:
        """Let work go on that waits for the input of an announced step, or would for ever if that has failed."""
        if self._announced is not None and self._announced.given is not None:
            self._announced.given.set()
        self._announced = None

    def _take(self, reply: Reply, step: Step, announced: _Announced) -> None:
        """Check the answer to a Forward, and put what came with it where it belongs."""
        check_done(reply)
        assert isinstance(reply, Done)
        apart = bool(self._gives) and not self._daemon.shares
        brings = self._last and announced.told is None
        if apart == (reply.data is None) or (reply.output is None) == brings:
            raise GarbageError("it answered with something else than was asked for")
        if reply.data is not None:
            try:
                self._wires[1].unpack(reply.data, self._arena.memory[announced.target :], step.rows)
            except BackendError as error:
                raise GarbageError(f"it handed on {error}") from None
        if announced.told is not None and not announced.told.done():
            raise GarbageError("it is done without the output")
        if reply.output is not None:
            if len(step.output_rows):
                self._check_step(reply.output, step)
            self._hand_captured(step, announced)

    def _read(self, answer: Answer, step: Step, announced: _Announced) -> Output:
        """The output of a step that was told. Raises GarbageError if it is none."""
        assert announced.told is not None
        if announced.told.passed(self._forwards):
            raise GarbageError("it told an output that nobody has asked for")
        output = answer.output()
        # Its shapes are this process's own.
        check_ids(self._vocab, output)
        self._hand_captured(step, announced)
        return output

    def _hand_captured(self, step: Step, announced: _Announced) -> None:
        if self._gives:
            outputs = self._arena.floats(announced.target, step.rows, self._gives)
            self._on_captured(step, [output.copy().view(np.uint16) for output in outputs])

    def _check_step(self, output: Output, step: Step) -> None:
        """Raises GarbageError unless it is an output of the step."""
        top = 0 if step.needs_candidates is None else int(np.count_nonzero(step.needs_candidates))
        check_output(
            self._vocab, output, len(step.output_rows), int(np.count_nonzero(step.needs_logits)), (top, MAX_CANDIDATES)
        )

    def _moment(self) -> Event:
        """When all that has been asked for is done."""
        return self._requests.newest or HostEvent()


@dataclass(frozen=True)
class _Announced:
    """A step whose Forward is to come, and what went with it, as in the message."""

    step: Step
    source: int
    target: int
    given: Flag | None
    told: Flag | None
