"""The layers that a daemon holds, on the devices of its process.

Work is queued on the devices; luce.remote.service.Work says when it is done, and what the response is then.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError, DeviceError, ModelError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc.arena import Arena
from luce.layers.kept_weights import KeptWeights
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.ops.handover import can_hand_over, take_over
from luce.profiles.cached_file import in_background
from luce.profiles.profile_cache import note_observed, profile_path
from luce.remote.activation_codec import ActivationCodec
from luce.remote.announced import Announced, AnnouncedStep, CopiedState, QueuedStep, announcement
from luce.remote.daemon_layers import build_layers
from luce.remote.mask_codec import MaskDecoder
from luce.remote.messages import (
    Accept,
    Announce,
    Done,
    Drop,
    Embed,
    Fetch,
    Forward,
    Load,
    Loaded,
    LoadedLayers,
    LoadState,
    Observe,
    Project,
    RankPages,
    Restore,
    Save,
    Saved,
    SavedTensor,
    Tensors,
    UpdateRanking,
)
from luce.remote.service import Service, Work
from luce.remote.shared_layout import OUTPUT_BYTES, OutputLayout, shared_size
from luce.remote.validate import check_pages, check_step, is_path, load_layers, within
from luce.runtime.device import Array, Device, Event, Flag
from luce.runtime.host import HostDevice, HostEvent
from luce.runtime.step import MAX_CANDIDATES, RowMasks, Step
from luce.runtime.transfer import DEPTH, Link, Transfer
from luce.shard.pipeline import Pipeline
from luce.shard.saved_state import HostSavedState, JoinedSavedState, StatePiece
from luce.shard.shard import Activation, ShardResult
from luce.shard.shard_options import ShardHooks
from luce.shard.sizes import activation_widths

_log = logging.getLogger(__name__)

#: a page's index in its sequence is below this
_MAX_ENTRY = 1 << 24


class _SharedMemory(HostDevice):
    """The arena as the device that input activations come from."""

    remote = True


class ServedModel(Service):
    """The layers of one Load message, on their devices. Its handlers raise LuceError for invalid requests.

    `on_progress` gets the share of the layers that are loaded, after each layer. `weights`: as for
    luce.remote.daemon.serve.
    """

    holds = "layers"

    def __init__(
        self,
        path: Path,
        load: Load,
        devices: Sequence[Device],
        arena: Arena,
        opened: contextlib.ExitStack,
        on_progress: Callable[[float], None],
        weights: KeptWeights | None = None,
    ) -> None:
        super().__init__()
        self.handlers = {
            Announce: self.announce,
            Forward: self.run,
            Embed: self.embed,
            Project: self.project,
            Accept: self.accept,
            UpdateRanking: self.update_ranking,
            RankPages: self.rank,
            Save: self.save,
            Fetch: self.fetch,
            Restore: self.restore,
            Drop: self.drop,
            LoadState: self.load_state,
            Observe: self.observe,
        }
        file = opened.enter_context(open_gguf(path))
        if fingerprint(file) != load.fingerprint:
            raise ModelError(f"{path}: the daemon's file is not the server's: their contents differ")
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors)).for_context(load.context)
        layers = load_layers(load, len(devices), spec)
        self.spec, self.load = spec, load
        self.devices, self.arena = devices, arena
        boundaries = layers[0].start, layers[-1].stop
        self.input_widths, self.output_widths = (
            activation_widths(spec, boundary, load.captured) for boundary in boundaries
        )
        self._input_codec, self._output_codec = (
            ActivationCodec(load.activations, spec, each, load.captured) for each in boundaries
        )
        self._last = layers[-1].stop == len(spec.layers)
        if load.arena != shared_size(load.rows, self.input_widths, self.output_widths):
            raise BackendError(f"{load.arena} bytes of shared memory do not suit steps of {load.rows} rows")
        problems = arena.pin(devices)
        for problem in problems:
            _log.warning("shared memory is not pinned, copies are slower: %s", problem)
        can_use_flags = load.shared and not problems and all(device.uses_flags for device in devices)
        # This thread waits in the middle of a step, and could not raise a flag that the devices wait for.
        can_use_flags = can_use_flags and not any(load.offloaded)
        #: whether the devices wait for the input flag, and raise the output flag, without the host
        self.uses_flags = can_use_flags and self._try_flags()
        self.pipeline = Pipeline(peer=load.peer, enter=self._enter, leave=self._leave)
        done, count = itertools.count(1), sum(map(len, layers))
        hooks = ShardHooks(lambda: on_progress(next(done) / count), self._copy_captured, self._output_arrays)
        build_layers(self.pipeline, file, spec, load, devices, layers, hooks, weights, opened)
        self._input_link = None
        if self.input_widths:
            size = load.rows * sum(self.input_widths)
            self._input_link = Link(_SharedMemory(), devices[0], size, peer=False, watch=lambda start, end: None)
        self._output_copies = devices[-1].copy_stream()
        #: output activations, until they have been copied
        self._copying: deque[tuple[Activation, Event]] = deque()
        #: of each device
        self._seconds_reported = [0.0] * len(devices)
        #: by number
        self._saved: dict[int, JoinedSavedState] = {}
        self._masks = MaskDecoder(spec.vocab)
        self._announced: Announced | None = None
        #: what was announced before the request that is being handled
        self._previous: Announced | None = None

    def _try_flags(self) -> bool:
        """Whether the devices succeed in waiting for a flag and in raising one."""
        try:
            for device in self.devices:
                seen = Flag(self.arena.input_flag, int(self.arena.input_flag[0]))
                device.wait_for(seen)
                if device.maps_pinned:
                    take_over(device, seen, [self.arena.scratch], [device.zeros(1)])
                device.set_flag(Flag(self.arena.output_flag, int(self.arena.output_flag[0])))
                device.synchronize()
        except DeviceError as error:
            _log.warning("GPUs cannot use flags in shared memory, steps are slower: %s", error)
            return False
        return True

    def loaded(self) -> Loaded:
        parts = (part for shard in self.pipeline.shards for part in shard.info.devices)
        layers = (
            LoadedLayers(
                part.device,
                (part.layers.start, part.layers.stop),
                part.weights,
                part.state,
                part.unpacked,
                part.offloaded_bytes,
                part.invariant_rows,
                part.shares_prompts,
            )
            for part in parts
        )
        return Loaded(tuple(layers), self.input_widths, self.output_widths, self.spec.vocab, self.uses_flags)

    @property
    def announced(self) -> bool:
        return self._announced is not None

    @property
    def frame_limit(self) -> int:
        return sum(shard.info.state for shard in self.pipeline.shards) * 2

    @property
    def failed(self) -> bool:
        return self.pipeline.failure is not None

    def settle(self) -> None:
        self.pipeline.settle()
        self._copying.clear()
        if self._input_link is not None:
            with contextlib.suppress(DeviceError):
                self._input_link.settle()

    def abandon(self) -> None:
        flag = None if self._announced is None else self._announced.message.input_flag
        if flag is not None:
            # Otherwise the device waits for ever, even if only a part of the step's work was queued.
            Flag(self.arena.input_flag, flag).set()

    def handle(self, message: Any) -> Any:
        # These may arrive between Announce and Forward; any other request ends what was announced.
        if not isinstance(message, Drop | Observe):
            self._previous, self._announced = self._announced, None
        return super().handle(message)

    def announce(self, message: Announce) -> None:
        """Queue as much as possible before the input is ready. Errors become the response to Forward."""
        try:
            check_step(message.step, self.spec.vocab, self.load)
            self._check_places(message)
            work = None
            if message.input_flag is not None:
                work = self.forward(message, Flag(self.arena.input_flag, message.input_flag))
        except Exception as error:
            self._announced = Announced(message, problem=error)
        else:
            self._announced = Announced(message, work)

    def run(self, message: Forward) -> Work:
        """The work of the announced step, queued now unless it has been queued already."""
        announced = self._previous
        if announced is None:
            raise BackendError("no step was announced")
        masks = None
        if message.masks is not None:
            # Also of a step that cannot run: later messages name masks of this one.
            masks = self._masks.decode(message.masks, len(announced.message.step.output_rows))
            if announced.work is not None or not self._last:
                raise BackendError("masks of a step that takes none")
        if announced.problem is not None:
            raise announced.problem
        if (message.data is None) != (self.load.shared or not self.input_widths):
            raise BackendError("the message has an activation that belongs in shared memory, or lacks one")
        if message.data is not None:
            memory = self.arena.memory[announced.message.source :]
            self._input_codec.unpack(message.data, memory, announced.message.step.rows)
        return announced.work or self.forward(announced.message, HostEvent(), masks)

    def _check_places(self, message: Announce) -> None:
        rows = message.step.rows
        if rows > self.load.rows and (self.input_widths or self.output_widths):
            raise BackendError(f"a step of {rows} rows, the load allows {self.load.rows}")
        for at, widths in ((message.source, self.input_widths), (message.target, self.output_widths)):
            inside = 0 <= at <= len(self.arena.memory) - 4 * rows * sum(widths) and at % 4 == 0
            if not inside if widths else at != -1:
                raise BackendError(f"offset {at} is not a place for an activation of {rows} rows")
        if message.input_flag is not None and not (self.uses_flags and self.input_widths):
            raise BackendError("no device here can wait for an input flag")
        if message.output_flag is not None and not self._has_output_at(message):
            raise BackendError(f"offset {message.output} is not a place for an Output, or the step has none")

    def _has_output_at(self, message: Announce) -> bool:
        inside = 0 <= message.output <= len(self.arena.memory) - OUTPUT_BYTES and message.output % 64 == 0
        return self.uses_flags and self._last and inside and len(message.step.output_rows) > 0

    def forward(self, message: Announce, input_ready: Event, masks: RowMasks | None = None) -> Work:
        """Queue the announced step, whose input is there once `input_ready` is done."""
        step, pipeline = AnnouncedStep.of(message, input_ready, masks), self.pipeline
        # A CPU computes during the call: activations in messages are read meanwhile, as the link is slow.
        inline = len(self.devices) == 1 and (self.load.shared or not self.devices[0].host)
        if inline or (len(step.output_rows) and pipeline.idle and pipeline.failure is None):
            # Without the pipeline's threads, as a thread takes tens of microseconds to wake up.
            result, over = pipeline.run(step)
            return Work(over, lambda: self._done(message, result))
        ran = pipeline.queue(step)
        return Work(QueuedStep(ran), lambda: self._done(message, ran.result()[0]), threaded=True)

    def _enter(self, step: Step) -> Transfer | None:
        """The input of the first shard; on its thread."""
        message, input_ready = announcement(step)
        if self._input_link is None:
            return None
        places, device = self.arena.floats(message.source, step.rows, self.input_widths), self.devices[0]
        if not (isinstance(input_ready, Flag) and can_hand_over(device, places)):
            return self._input_link.send(places, input_ready)
        begin = device.record(timing=True)
        return self._input_link.send_on(
            device, places, begin, lambda rows: take_over(device, input_ready, places, rows)
        )

    def _output_arrays(self, step: Step) -> Sequence[NDArray[Any]] | None:
        """Where the Output goes, unless it goes into the response."""
        message, _ = announcement(step)
        if message.output_flag is None:
            return None
        memory = self.arena.memory[message.output : message.output + OUTPUT_BYTES]
        return OutputLayout(step, self.spec.vocab, memory).arrays

    def _leave(self, step: Step, result: ShardResult, end: Event) -> Event:
        """Raise the output flag of a step, or copy the output activation to the arena; on the last shard's thread."""
        message, _ = announcement(step)
        last = self.devices[-1]
        if not isinstance(result, tuple):
            if message.output_flag is not None:
                last.set_flag(Flag(self.arena.output_flag, message.output_flag))
            # After the copies of captured outputs.
            return last.record()
        if len(self._copying) == DEPTH:
            # From here on, the memory of the oldest output activation is used again.
            _, copied = self._copying.popleft()
            last.wait_for(copied)
        self._output_copies.wait_for(end)
        arrays = self.arena.floats(message.target, step.rows, self.output_widths)
        for target, array in zip(arrays, result, strict=True):
            self._output_copies.copy(target, array)
        copied = self._output_copies.record()
        self._copying.append((result, copied))
        return copied

    def _done(self, message: Announce, result: object) -> Done:
        """The response to a step with this result of the last shard."""
        output = result() if callable(result) and message.output_flag is None else None
        data = None
        if self.output_widths and not self.load.shared:
            data = self._output_codec.pack(self.arena.memory[message.target :], message.step.rows)
        return Done(self.seconds(), output, data)

    def _copy_captured(self, step: Step, outputs: Sequence[Array]) -> None:
        """Copy the captured outputs of the last shard to the place of an output activation."""
        message, _ = announcement(step)
        self._output_copies.wait_for(self.devices[-1].record())
        arrays = self.arena.floats(message.target, step.rows, self.output_widths)
        for target, output in zip(arrays, outputs, strict=True):
            self._output_copies.copy(target, output.view(np.float32))
        # The next step overwrites the outputs, and the response says that the copies are there.
        self.devices[-1].wait_for(self._output_copies.record())

    def seconds(self) -> tuple[float, ...]:
        """What each device has worked since the last response."""
        self.pipeline.count_times()
        before, self._seconds_reported = self._seconds_reported, self.pipeline.work_seconds()
        return tuple(now - then for now, then in zip(self._seconds_reported, before, strict=True))

    def embed(self, message: Embed) -> Tensors:
        """Look up rows of the token table."""
        self.pipeline.wait()
        if message.tokens.ndim != 1 or not within(message.tokens, self.spec.vocab):
            raise BackendError("the tokens are not a list of ids in the vocabulary")
        rows: NDArray[np.float32] = self.devices[0].download(self.pipeline.shards[0].ends.embed(message.tokens))
        return Tensors({"rows": rows})

    def project(self, message: Project) -> Done:
        """Multiply rows with the head."""
        self.pipeline.wait()
        hidden, top = message.hidden, message.top
        if hidden.ndim != 2 or hidden.shape[1] != self.spec.hidden or not 0 <= top <= MAX_CANDIDATES:
            raise BackendError(f"rows of shape {hidden.shape} and {top} candidates cannot be projected")
        if not (0 <= message.scale < math.inf and 0 <= message.softcap < math.inf):
            raise BackendError(f"no norms of logits with scale {message.scale} and softcap {message.softcap}")
        shard, norms = self.pipeline.shards[-1], {"scale": message.scale, "softcap": message.softcap}
        return Done(output=shard.ends.project(hidden, top=top, logits=message.logits, **norms)())

    def update_ranking(self, message: UpdateRanking) -> Done:
        """Add pages to the page ranking, or drop a slot from it."""
        self.pipeline.wait()
        if not message.entries and not message.pages:
            check_pages(self.load, message.slot)
            for shard in self.pipeline.shards:
                shard.ranking.drop(message.slot)
            return Done()
        pages = [() if group.window is not None else message.pages for group in self.spec.page_groups]
        check_pages(self.load, message.slot, pages)
        entries = message.entries
        if len(entries) != len(message.pages) or not all(0 <= entry < _MAX_ENTRY for entry in entries):
            raise BackendError("the entries to rank do not fit the pages")
        for shard in self.pipeline.shards:
            shard.ranking.add(message.slot, entries, message.pages)
        return Done()

    def rank(self, message: RankPages) -> Tensors:
        """Estimate attention shares of ranked pages, by layer."""
        self.pipeline.wait()
        check_pages(self.load, message.slot)
        entries = message.entries
        ascending = entries.ndim == 1 and entries.size > 0 and entries[0] >= 0 and (np.diff(entries) > 0).all()
        if message.position < 0 or not ascending:
            raise BackendError("these entries cannot be ranked")
        scores = [shard.ranking.rank(message.slot, message.position, entries) for shard in self.pipeline.shards]
        return Tensors({"scores": np.concatenate(scores)})

    def accept(self, message: Accept) -> Done:
        """Commit draft rows."""
        self.pipeline.wait()
        check_pages(self.load, message.slot)
        if not is_path(message.rows, self.load.verify_rows):
            raise BackendError(f"rows {message.rows} cannot be accepted, the load allows {self.load.verify_rows}")
        for shard in self.pipeline.shards:
            shard.accept(message.slot, message.rows)
        return Done()

    def save(self, message: Save) -> Work:
        """Queue the copies of a state."""
        self.pipeline.wait()
        check_pages(self.load, message.slot, message.pages)
        shards = self.pipeline.shards
        parts = [shard.state.save(message.slot, message.pages, held=message.held) for shard in shards]
        saved = self._saved[message.saved] = JoinedSavedState(parts)
        return Work(CopiedState(saved), lambda: _description(saved))

    def fetch(self, message: Fetch) -> Tensors:
        """Tensors of a saved state. Waits until they are copied."""
        found: dict[str, NDArray[np.generic]] = {}
        for part in self._saved_state(message.saved).parts:
            assert isinstance(part, HostSavedState)
            part.wait()
            found |= part.rows(message.first, message.count, set(message.names) - part.mirrors)
        return Tensors(found)

    def restore(self, message: Restore) -> Done:
        """Copy a saved state into a slot and pages."""
        self.pipeline.wait()
        check_pages(self.load, message.slot, message.pages)
        for shard, part in zip(self.pipeline.shards, self._saved_state(message.saved).parts, strict=True):
            shard.state.restore(message.slot, message.pages, part, message.first)
        return Done()

    def load_state(self, message: LoadState) -> Done:
        """Copy tensors of the message into a slot and pages."""
        self.pipeline.wait()
        check_pages(self.load, message.slot, message.pages)
        for shard in self.pipeline.shards:
            shard.state.load(StatePiece(message.slot, message.pages, range(*message.layers), message.tensors))
        return Done()

    def drop(self, message: Drop) -> None:
        """Release saved states."""
        for number in message.saved:
            self._saved.pop(number, None)

    def observe(self, message: Observe) -> None:
        """Keep what was observed of a device beside its profile."""
        if not 0 <= message.device < len(self.devices) or message.observed.flaw:
            raise BackendError(f"nothing can be observed of device {message.device}: {message.observed.flaw}")
        path = profile_path(self.devices[message.device])
        in_background(functools.partial(note_observed, path, message.phase, message.observed))

    def _saved_state(self, number: int) -> JoinedSavedState:
        if number not in self._saved:
            raise BackendError(f"there is no saved state {number}")
        return self._saved[number]


def _description(saved: JoinedSavedState) -> Saved:
    tensors = {}
    for part in saved.parts:
        assert isinstance(part, HostSavedState)
        for name, tensor in part.tensors.items():
            if name not in part.mirrors:
                tensors[name] = SavedTensor(tensor.dtype.str, tensor.shape, name in part.paged)
    return Saved(tensors, saved.nbytes)
