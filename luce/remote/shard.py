"""A shard in a daemon: its verbs become requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError, DeviceError, OutOfMemoryError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile
from luce.ipc.arena import Arena, shared_arena
from luce.ipc.channel import SMALL_FRAME, ProtocolError
from luce.ipc.supervisor import Supervisor
from luce.models.spec import ModelSpec
from luce.ops.handover import hand_over
from luce.profiles.profile import Observed, Phase
from luce.remote.activation_codec import ActivationCodec
from luce.remote.device import is_remote
from luce.remote.mask_codec import MaskEncoder
from luce.remote.messages import Accept, Announce, Done, Forward, Load, Loaded, Observe, Response
from luce.remote.rpc import PER_BYTE, PER_ROW, Expected, Request, Requests
from luce.remote.shard_groups import RemoteEnds, RemoteRanking, RemoteState, check_ids, check_output
from luce.remote.shared_layout import OUTPUT_BUFFERS, OUTPUT_BYTES, OutputLayout, shared_size
from luce.runtime.device import Device, Event, Flag
from luce.runtime.host import HostEvent
from luce.runtime.step import MAX_CANDIDATES, Output, Step
from luce.shard.graphs import MAX_ROWS
from luce.shard.pipeline import sequence_rows
from luce.shard.shard import Activation, DaemonState, DeviceInfo, Pending, ShardInfo
from luce.shard.shard_options import DeviceLayers, OnCaptured, ShardOptions
from luce.shard.sizes import activation_widths, mirrored
from luce.shard.timing import SequenceRows

_log = logging.getLogger(__name__)

#: Seconds to poll for the response to a step of up to _SPIN_ROWS rows without sleeping, if a GPU computes it. Such a
#: step is done by then, and a thread that waits in the driver for its own GPU does not sleep either.
_SPIN, _SPIN_ROWS = 20e-3, 64


def daemon_state(
    shard: int | str, device: str, daemon: Supervisor, *, shared: tuple[int, int] | None = None
) -> DaemonState:
    """The state of a daemon. `shared`: bytes sent and received through shared memory; None if it cannot have any."""
    traffic = {"stream": daemon.traffic()} | ({} if shared is None else {"shared": shared})
    return DaemonState(
        shard,
        device,
        up=daemon.ready(),
        restarts=daemon.generation,
        transport="stream",
        gpu_waits=False,
        moved={
            (way, to): n for way, counts in traffic.items() for to, n in zip(("sent", "received"), counts, strict=True)
        },
        waited=None,
    )


class RemoteShard:
    """Layers of a file on the devices of one daemon, a range for each. Loads in the background: see `wait_loaded`.

    `name` is its name in messages; `parts`: its layers and devices; `pages` of each page group; `rows`: most rows of a
    step, if activations cross a boundary; `on_captured` as in ShardHooks. Raises OutOfMemoryError for the shared
    memory.
    """

    remote = True

    def __init__(
        self,
        name: str,
        file: GGUFFile,
        spec: ModelSpec,
        parts: Sequence[DeviceLayers],
        options: ShardOptions,
        pages: Sequence[int],
        *,
        rows: int,
        on_captured: OnCaptured = lambda step, outputs: None,
    ) -> None:
        layers = [part.layers for part in parts]
        devices = [part.device for part in parts if is_remote(part.device)]
        self.device = devices[0]
        self.layers = range(layers[0].start, layers[-1].stop)
        self._name = name
        self._daemon: Supervisor = devices[0].daemon
        self._vocab = spec.vocab
        self._last = self.layers.stop == len(spec.layers)
        self._on_captured = on_captured
        self._spin = 0.0 if all(device.host for device in devices) else _SPIN
        boundaries = self.layers.start, self.layers.stop
        self._input_widths, self._output_widths = (
            activation_widths(spec, boundary, options.captured) for boundary in boundaries
        )
        activations = devices[0].transport.activations
        self._input_codec, self._output_codec = (
            ActivationCodec(activations, spec, each, options.captured) for each in boundaries
        )
        size = shared_size(rows, self._input_widths, self._output_widths)
        self._arena = self._make_arena(size)
        self._shared = self._arena.fd is not None
        self._output_at = self._arena.allocate(OUTPUT_BYTES)
        self._output_buffers = [
            self._arena.allocate(4 * rows * sum(self._output_widths)) for _ in range(OUTPUT_BUFFERS)
        ]
        self._requests = Requests(self._daemon, before=self._release)
        self._announced: _Announced | None = None
        #: the last request whose Output comes through shared memory
        self._reader: Request | None = None
        #: the last request whose captured outputs come with its response
        self._capturing: Request | None = None
        self._masks = MaskEncoder()
        #: whether the daemon's devices wait for the arena's flags, and raise them, without the host
        self._uses_flags = False
        #: whether the device before may raise the input flag
        self._hands_over = False
        #: by the number of the device in `info`, what gets the position and the seconds of decoding steps of one row
        self._watching: dict[int, Callable[[SequenceRows, float], None]] = {}
        #: how many steps have been announced: the values of the arena's flags
        self._steps = 0
        #: bytes that went through shared memory, to the daemon and from it
        self._shared_sent = self._shared_received = 0
        for device in devices:
            device.arena, device.last_event = self._arena, self._last_event
        ranges = tuple((part.start, part.stop) for part in layers)
        self._expected = tuple(zip((str(device.name.local) for device in devices), ranges, strict=True))
        self.info = ShardInfo(
            tuple(DeviceInfo(str(part.device.name), part.layers, 0, 0, 0, part.offloaded) for part in parts)
        )
        self.state = RemoteState(self._requests, self.layers, mirrored(spec, self.layers), self._copy_seconds)
        self.ranking = RemoteRanking(
            self._requests, sum(options.ranks(spec, layer) for layer in self.layers), self._copy_seconds
        )
        self.ends = RemoteEnds(self._requests, self.device, spec.hidden, spec.vocab)
        load = _load_message(file, spec, parts, options, pages, rows)
        load = msgspec.structs.replace(load, arena=size, shared=self._shared, activations=activations)
        self._daemon.begin_load(load, Loaded, arena=self._arena, name=name)

    def _make_arena(self, size: int) -> Arena:
        transport = self.device.transport
        if transport.shared:
            try:
                return shared_arena(size)
            except OutOfMemoryError as error:
                if transport.required:
                    raise OutOfMemoryError(f"{self._name}: --shard-transport shared: {error}") from error
                _log.warning("%s: activations are sent in messages, which is slower: %s", self._name, error)
        return Arena(size, None)

    def wait_loaded(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Wait for the daemon. `on_progress` is called when `progress` may have changed. Raises LuceError."""
        loaded = self._daemon.wait_loaded(Loaded, on_progress)
        if tuple((part.device, part.layers) for part in loaded.parts) != self._expected:
            raise BackendError(f"{self._name}: the daemon has loaded other layers than it was asked to")
        theirs = loaded.input_widths, loaded.output_widths, loaded.vocab
        ours = self._input_widths, self._output_widths, self._vocab
        if theirs != ours:
            raise BackendError(f"{self._name}: the daemon sees a model of dimensions {theirs}, this process {ours}")
        self._uses_flags = loaded.flags and self._shared
        parts = zip(self.info.devices, loaded.parts, strict=True)
        self.info = ShardInfo(
            tuple(
                replace(
                    own,
                    weights=part.weights,
                    state=part.state,
                    unpacked=part.unpacked,
                    offloaded_bytes=part.offloaded,
                    # The message takes any number.
                    invariant_rows=min(part.invariant_rows, MAX_ROWS),
                    shares_prompts=part.shares_prompts,
                )
                for own, part in parts
            )
        )

    @property
    def progress(self) -> float:
        """Share of its layers that the daemon has loaded, as known here. Any thread may read it."""
        return self._daemon.progress

    def pin(self, devices: Iterable[Device]) -> None:
        """Pin the shared memory, so that neighbouring devices access it directly."""
        neighbours = list(devices)
        problems = self._arena.pin(neighbours)
        for problem in problems:
            _log.warning("%s: shared memory is not pinned, copies are slower: %s", self._name, problem)
        self._hands_over = not problems and all(map(self._can_raise, neighbours))

    def _can_raise(self, device: Device) -> bool:
        """Whether a device that is to hand over rows succeeds in it; compiles the kernel now, and not in a step."""
        if not device.maps_pinned:
            return True
        try:
            hand_over(device, [device.zeros(1)], [self._arena.scratch], Flag(self._arena.input_flag, self._steps))
            device.synchronize()
        except DeviceError as error:
            _log.warning("%s: %s cannot hand over rows, steps are slower: %s", self._name, device.name, error)
            return False
        return True

    def lost(self) -> str:
        why = self._requests.lost()
        if why:
            self._masks = MaskEncoder()
            # The last daemon may have left any value in a flag; no step of the next one may take it for its own.
            for flag in (self._arena.input_flag, self._arena.output_flag):
                if Flag(flag, self._steps).done():
                    self._steps = int(flag[0])
        return why

    def ready(self) -> bool:
        """Whether the daemon has its layers. Any thread may call it."""
        return self._daemon.ready()

    def down(self) -> str:
        return self._daemon.down()

    def daemon_state(self, number: int) -> DaemonState:
        """The state of its daemon, as that of the shard of this number. Any thread may call it."""
        shared = self._shared_sent, self._shared_received
        state = daemon_state(number, self.info.device, self._daemon, shared=shared)
        transport = "shared" if self._shared else "stream"
        return replace(state, transport=transport, gpu_waits=self._uses_flags, waited=self._requests.waited)

    def watch_rows(self, number: int, on_rows: Callable[[SequenceRows, float], None]) -> None:
        """As Pipeline.watch_rows, for a device of the daemon by its number in `info`."""
        self._watching[number] = on_rows

    def keep_observed(self, number: int, phase: Phase, observed: Observed) -> None:
        """Let the daemon keep what was observed of a device beside its profile, before the next request."""
        self._requests.later.append(Observe(number, phase, observed))

    def announce(self, step: Step, activation: Activation | None) -> Flag | None:
        source = -1 if activation is None else self._arena.offset(activation[0])
        if self._announced is None or self._announced.step is not step or self._announced.source != source:
            self._announced = self._announce(step, source)
        return self._announced.input_flag if self._hands_over else None

    def _announce(self, step: Step, source: int) -> _Announced:
        self._release()
        self._requests.catch_up()
        target = self._output_buffers[self._steps % OUTPUT_BUFFERS] if self._output_widths else -1
        self._steps += 1
        input_flag = output_flag = None
        # The masks come with Forward, and nothing of such a step is queued before.
        masked = self._last and step.masks is not None
        if self._uses_flags:
            input_flag = None if source < 0 or masked else Flag(self._arena.input_flag, self._steps)
            output_flag = Flag(self._arena.output_flag, self._steps) if self._can_share_output(step) else None
        values = (None if flag is None else flag.value for flag in (input_flag, output_flag))
        sent = step if step.masks is None else replace(step, masks=None)
        self._requests.send(Announce(sent, source, target, next(values), self._output_at, next(values)))
        return _Announced(step, source, target, input_flag, output_flag)

    def _can_share_output(self, step: Step) -> bool:
        """Whether the Output of a step can come through shared memory."""
        if not self._last or not len(step.output_rows) or (self._reader is not None and not self._reader.is_read):
            return False
        # A drafter gets captured outputs in the order of the steps.
        if self._capturing is not None and not self._capturing.is_over:
            return False
        try:
            OutputLayout(step, self._vocab, self._output_memory())
        except BackendError:
            return False
        return True

    def _output_memory(self) -> NDArray[np.uint8]:
        return self._arena.memory[self._output_at : self._output_at + OUTPUT_BYTES]

    def stage(self, step: Step) -> None:
        pass

    def forward(self, step: Step, activation: Activation | None) -> Activation | Pending:
        if self._announced is None or self._announced.step is not step:
            self.announce(step, activation)
        announced = self._announced
        assert announced is not None
        self._release()
        data = None
        if self._shared:
            self._shared_sent += 4 * step.rows * sum(self._input_widths)
            self._shared_received += 4 * step.rows * sum(self._output_widths)
        elif activation is not None:
            data = self._input_codec.pack(self._arena.memory[announced.source :], step.rows)
        expected = Expected(
            take=lambda response: self._take(response, announced),
            seconds=PER_ROW * step.rows,
            # Ids and full logits, and as much again for other arrays of an Output.
            limit=SMALL_FRAME + 4 * (2 * len(step.output_rows) * self._vocab + step.rows * sum(self._output_widths)),
            spin=self._spin if step.rows <= _SPIN_ROWS else 0.0,
        )
        masks = None
        if self._last and step.masks is not None:
            masks = self._masks.encode(step.masks.wait(), self._vocab)
        request = self._requests.ask(Forward(data, masks), expected)
        if announced.output_flag is not None:
            layout = OutputLayout(step, self._vocab, self._output_memory())
            request.expect_output(announced.output_flag, lambda: self._read(layout, announced))
            self._shared_received += layout.size
            self._reader = request
        elif self._last and self._output_widths:
            self._capturing = request
        if self._last:
            return request.output
        return self._arena.floats(announced.target, step.rows, self._output_widths)

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        # It waits: otherwise the state that is saved next might include other rows without an error.
        self._requests.ask(Accept(slot, tuple(rows))).wait()

    def _copy_seconds(self) -> float:
        """Seconds that the daemon's devices may take to copy a sequence's state."""
        return PER_BYTE * self.info.state

    def close(self) -> None:
        """Idempotent. The daemon ends with its devices."""
        self._arena.close()

    def _release(self) -> None:
        """Raise the input flag of an announced step: its input is ready, or the step has failed."""
        if self._announced is not None and self._announced.input_flag is not None:
            self._announced.input_flag.set()
        self._announced = None

    def _take(self, response: Response, announced: _Announced) -> None:
        """Check the response to a Forward, and copy its activation to the arena."""
        if not isinstance(response, Done):
            raise ProtocolError(f"it sent {type(response).__name__} instead of Done")
        needs_data = bool(self._output_widths) and not self._shared
        needs_output = self._last and announced.output_flag is None
        if needs_data == (response.data is None) or needs_output == (response.output is None):
            raise ProtocolError("it sent another result of the step than it was asked for")
        step = announced.step
        self._take_seconds(response.seconds, step)
        if response.data is not None:
            try:
                self._output_codec.unpack(response.data, self._arena.memory[announced.target :], step.rows)
            except BackendError as error:
                raise ProtocolError(f"it sent {error}") from None
        if announced.output_flag is not None and not announced.output_flag.done():
            raise ProtocolError("it has finished the step without raising the output flag")
        if response.output is not None:
            if len(step.output_rows):
                self._check_step_output(response.output, step)
            self._hand_on_captured(announced)

    def _take_seconds(self, seconds: Sequence[float], step: Step) -> None:
        """Check what the devices worked on a step, and tell whoever watches them."""
        if len(seconds) != len(self.info.devices) or not all(0 <= one < math.inf for one in seconds):
            raise ProtocolError(f"it sent {seconds} as the seconds of {len(self.info.devices)} devices")
        rows = sequence_rows(step)
        if rows is not None:
            for number, on_rows in self._watching.items():
                on_rows(rows, seconds[number])

    def _read(self, layout: OutputLayout, announced: _Announced) -> Output:
        """The Output of a step whose output flag is raised. Raises ProtocolError for ids outside the vocabulary."""
        assert announced.output_flag is not None
        if announced.output_flag.passed(self._steps):
            raise ProtocolError("it raised the output flag beyond the last step")
        output = layout.output()
        # Its shapes do not come from the daemon.
        check_ids(output, self._vocab, announced.step.draws)
        self._hand_on_captured(announced)
        return output

    def _hand_on_captured(self, announced: _Announced) -> None:
        if self._output_widths:
            outputs = self._arena.floats(announced.target, announced.step.rows, self._output_widths)
            self._on_captured(announced.step, [output.copy().view(np.uint16) for output in outputs])

    def _check_step_output(self, output: Output, step: Step) -> None:
        """Raises ProtocolError unless the Output belongs to the step."""
        full = int(np.count_nonzero(step.needs_logits))
        rows = 0 if step.needs_candidates is None else int(np.count_nonzero(step.needs_candidates))
        check_output(output, self._vocab, len(step.output_rows), full, (rows, MAX_CANDIDATES), step.draws)

    def _last_event(self) -> Event:
        """Done when all requests so far are done."""
        return self._requests.newest or HostEvent()


@dataclass(frozen=True)
class _Announced:
    """A step whose Forward follows, with the offsets and flags of its Announce."""

    step: Step
    source: int
    target: int
    input_flag: Flag | None
    output_flag: Flag | None


def _load_message(
    file: GGUFFile,
    spec: ModelSpec,
    parts: Sequence[DeviceLayers],
    options: ShardOptions,
    pages: Sequence[int],
    rows: int,
) -> Load:
    """What the daemon loads, without the fields about its transport."""
    offloads = [part.offload for part in parts if part.offload is not None]
    return Load(
        path=str(file.paths[0].resolve()),
        fingerprint=fingerprint(file),
        layers=tuple((part.layers.start, part.layers.stop) for part in parts),
        pages=tuple(pages),
        slots=options.slots,
        kv=(options.kv.k, options.kv.v),
        verify_rows=options.verify_rows,
        captured=options.captured,
        rank_pages=options.rank_pages,
        prompt_precision=options.prompt_precision,
        unpack_bytes=tuple(part.unpack_bytes for part in parts),
        rows=rows,
        peer=options.peer,
        arena=0,
        shared=False,
        offloaded=tuple(part.offloaded for part in parts) if offloads else (),
        offloaded_packed=all(offload.device.packed for offload in offloads),
        context=spec.context_length,
        devices=tuple(part.device.number for part in parts if is_remote(part.device)),
    )
