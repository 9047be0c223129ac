"""The only backend: runs a step through its shards in order; activations go from device to device.

The backend queues a step shard by shard, with events between the devices (luce.runtime.transfer), and waits for the
output only. While a shard works on one step, or on one microbatch of a long step, the shard before it works on the next
one. A step without output rows returns at once; if it fails, the next step fails, and the states of all sequences count
as lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Capacity
from luce.backend.loading import ShardLoader, shard_groups
from luce.backend.microbatch import PIPELINED_ROWS, default_microbatch_rows, separate_prompts, split_microbatches
from luce.backend.pipeline_state import PipelineRanking, PipelineState
from luce.backend.placement import ModelPlan, check_memory, plan_model
from luce.backend.serving_options import ServingOptions
from luce.errors import BackendError, LuceError
from luce.gguf.reader import GGUFFile
from luce.layers.features import FeatureRing
from luce.layers.kept_weights import LoadedBytes
from luce.log import event
from luce.models.spec import ModelSpec
from luce.profiles.profile import Observed, Phase
from luce.remote.device import is_remote
from luce.remote.shard import RemoteShard
from luce.runtime.device import Array, Device, Fetched, Memory
from luce.runtime.step import Output, Step
from luce.runtime.transfer import Link
from luce.shard.local import QueuedOutput
from luce.shard.memory_watch import MemoryWatch
from luce.shard.page_ranking import ranking_bytes
from luce.shard.pipeline import Pipeline, Result
from luce.shard.shard import DaemonState, DeviceInfo, Shard
from luce.shard.timing import SequenceRows, ShardTimes

_log = logging.getLogger(__name__)


class LayerSplitBackend:
    """See luce.backend.backend.Backend. Runs a model on devices, which stay open when it is closed.

    luce.backend.placement.plan_shards places the layers. `ring` stores the features of every step; its layers replace
    `options.captured`. `on_progress` gets the share of the layers that are read, 0..1.

    Raises UsageError if the split is impossible or the heads do not support a type of `options.kv`, and
    OutOfMemoryError naming shard, bytes and a context that would fit. Then nothing stays allocated.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        devices: Sequence[Device],
        options: ServingOptions,
        *,
        ring: FeatureRing | None = None,
        on_progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        if ring is not None:
            options = replace(options, captured=ring.layers)
        self.spec = spec
        #: the model file
        self.file = file
        self._ring = ring
        #: features on the host that are not in the ring yet: only the thread of `forward` drives the ring's device
        self._features: deque[tuple[Step, list[NDArray[np.uint16]]]] = deque()
        #: whether steps without output rows may have failed, as no call has waited for them
        self._unwaited = False
        #: why the states of all sequences were lost, until `lost` reports it
        self._lost = ""
        #: what the last load took, where `options.weights` are
        self.loaded = LoadedBytes(0, 0)
        #: the result of the step whose output is waited for, while another one may be queued behind it
        self._newest: Result | None = None
        #: the step that was queued behind it, and its result
        self._ahead: tuple[Step, Result] | None = None
        #: why there are no shards, if nobody loads any
        self._absent = ""
        self._load(devices, options, on_progress)

    def _load(
        self,
        devices: Sequence[Device],
        options: ServingOptions,
        on_progress: Callable[[float], None],
        before: Capacity | None = None,
    ) -> None:
        """Load the shards on devices. `before`: the capacity so far, which must stay. Raises as the constructor."""
        plan = plan_model(self.file, self.spec, devices, options)
        if plan.kvflash.reason:
            _log.info("--kvflash: %s", plan.kvflash.reason)
        check_memory(self.spec, plan, options)
        for shard in plan.shards:
            if shard.offloaded:
                away = len(shard.offloaded), shard.offloaded_bytes
                _log.info("%s: the experts of %d layers lie on the CPU: %d bytes", shard.device, *away)
        capacity = _capacity(self.spec, plan, options)
        if before is not None and (capacity.pages, capacity.context) != (before.pages, before.context):
            raise BackendError("the model would have another context on these devices")
        self.options = options
        self.capacity = capacity
        self._microbatch = options.microbatch or default_microbatch_rows(len(devices))
        offloaded = any(shard.offloaded for shard in plan.shards)
        self.asynchronous = not (offloaded or any(device.remote or device.host for device in devices))
        self._devices = tuple(devices)
        self._own = [device for device in devices if not device.remote]
        self._memory = MemoryWatch(self._own)
        self._pipeline = Pipeline(peer=options.peer)
        self.state = PipelineState(self._pipeline.shards, self._wait, plan.page_bytes)
        self.ranking = PipelineRanking(self._pipeline.shards, self._wait)
        loader = ShardLoader(
            self.file, self.spec, plan, options, lambda device: partial(self._on_captured, device), on_progress
        )
        try:
            loader.load(self._pipeline)
            self._memory.update()
        except BaseException:
            self._close_shards(keeps=before is not None)
            raise
        if options.weights is not None:
            self.loaded = options.weights.release()
        infos = [shard.info for shard in self._pipeline.shards]
        rows, shares = min(info.invariant_rows for info in infos), all(info.shares_prompts for info in infos)
        self.capacity = replace(capacity, invariant_rows=rows, shares_prompts=shares)

    def unload(self, reason: str = "") -> None:
        """Release the shards and close their devices. Steps fail until `relocate` loads the model again; with a reason
        `down` returns it. Without one, `options.weights` holds their weights until then."""
        self._absent = reason
        self._close_shards(keeps=not reason)
        for device in self._devices:
            device.close()

    def relocate(self, devices: Sequence[Device], options: ServingOptions) -> None:
        """Load the model on other devices, behind `unload`. The contents of pages and slots are undefined then.

        Raises as the constructor, and BackendError if the capacity would differ; then there are no shards. Not for a
        backend with a feature ring.
        """
        self._load(devices, options, lambda fraction: None, self.capacity)
        self._absent, self._lost, self._unwaited = "", "", False
        if self.options.weights is not None:
            event(_log, "weights loaded", read=self.loaded.read, kept=self.loaded.kept)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in the order of their layers."""
        return tuple(self._pipeline.shards)

    @property
    def links(self) -> tuple[Link, ...]:
        """The copies from each shard to the next."""
        return tuple(self._pipeline.links)

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Layers and bytes on each device."""
        return tuple(part for shard in self._pipeline.shards for part in shard.info.devices)

    def lost(self) -> str:
        if self._pipeline.failure is not None:
            _log.error("a step failed: %s", self._pipeline.failure)
            self._give_up(self._pipeline.failure)
        lost, self._lost = self._lost, ""
        if losses := "; ".join(filter(None, [shard.lost() for shard in self._pipeline.shards])):
            self._give_up(losses)
            lost, self._lost = losses, ""
        return lost

    def ready(self) -> bool:
        return bool(self.shards) and all(shard.ready() for shard in self.shards if isinstance(shard, RemoteShard))

    def down(self) -> str:
        """The reason why all further steps will fail; empty while steps can succeed. Any thread may call it."""
        if self._absent:
            return self._absent
        return "; ".join(filter(None, [shard.down() for shard in self.shards]))

    def memory(self) -> dict[str, Memory]:
        """Free memory of the devices by name, as far as it is known. Any thread may call it.

        The figures are from the last step for this process's devices, and from the last heartbeat for a daemon's.
        """
        own = dict(zip((str(device.name) for device in self._own), self._memory.seen, strict=False))
        remote = {str(device.name): device.reported_memory() for device in self._devices if is_remote(device)}
        return own | {name: memory for name, memory in remote.items() if memory is not None}

    def daemons(self) -> tuple[DaemonState, ...]:
        """The daemons that hold shards. Any thread may call it."""
        shards = enumerate(self.shards)
        return tuple(shard.daemon_state(number) for number, shard in shards if isinstance(shard, RemoteShard))

    def times(self) -> tuple[ShardTimes, ...]:
        """Seconds that the shards' work and the copies between them took since the start. Any thread may call it."""
        return self._pipeline.times()

    def watch_rows(self, device: str, on_rows: Callable[[SequenceRows, float], None]) -> None:
        """Let a function get the rows and the seconds of each step of one sequence on a device, on the thread that
        drives its shard."""
        shard, number = self._place(device)
        remote = self._pipeline.shards[shard]
        if isinstance(remote, RemoteShard):
            remote.watch_rows(number, on_rows)
        else:
            self._pipeline.watch_rows(shard, on_rows)

    def keep_observed(self, device: str, phase: Phase, observed: Observed) -> None:
        """Let a device's daemon keep what was observed of it. On the thread that drives its shard."""
        shard, number = self._place(device)
        remote = self._pipeline.shards[shard]
        assert isinstance(remote, RemoteShard)
        remote.keep_observed(number, phase, observed)

    def _place(self, device: str) -> tuple[int, int]:
        """The shard with the layers of a device, and which of its devices it is."""
        for shard, own in enumerate(self._pipeline.shards):
            for number, part in enumerate(own.info.devices):
                if part.device == device:
                    return shard, number
        raise AssertionError(f"{device} has no layers")

    def forward(self, step: Step, queued: Callable[[], None] = lambda: None) -> Output:
        if not self._pipeline.shards:
            raise BackendError(self._absent or "the backend is closed")
        ahead, self._ahead = self._ahead, None
        try:
            if ahead is not None:
                assert step.spans is ahead[0].spans, "another step is queued"
                result = self._pipeline.queue_output(ahead[1], step.masks) if step.masks_deferred else ahead[1]
                return self._outputs([step], [result], queued)[0]
            return self._join(self._forward(step, queued))
        except BaseException as error:
            self._give_up(error)
            raise

    def stage(self, step: Step) -> None:
        # Elsewhere the devices do not work meanwhile. Threads with work of their own use what this uses.
        if self.asynchronous and self._pipeline.idle:
            with contextlib.suppress(LuceError):
                for shard in self._pipeline.shards:
                    shard.stage(step)

    def follow(self, step: Step) -> bool:
        made = None if self._newest is None else self._newest[0]
        if not (self.asynchronous and isinstance(made, QueuedOutput) and isinstance(made.ids, Fetched)):
            return False
        # Features on their way to another device pass through the host, which would wait for the step.
        if self._ring is not None and self._ring.device is not self._pipeline.shards[-1].device:
            return False
        self._newest = None
        self._ahead = step, self._pipeline.run(replace(step, future_tokens=made.ids))
        return True

    def _forward(self, step: Step, queued: Callable[[], None]) -> list[Output]:
        """Run a step, in parts if it has to be. Returns the outputs of parts and microbatches with output rows."""
        shared_rows = PIPELINED_ROWS if self._pipeline.links else step.rows
        if not self.capacity.shares_prompts:
            shared_rows = 0
        parts = separate_prompts(step, self.capacity.invariant_rows, shared_rows)
        runs = [[part] for part in parts]
        if self._pipeline.links:
            # Prompts follow each other through the shards. Replies run before them, so they do not wait for prompts.
            ahead = int(len(parts[0].output_rows) > 0)
            runs = [parts[:ahead], parts[ahead:]]
        *runs, last = filter(None, runs)
        outputs = [output for run in runs for output in self._run(run, lambda: None)]
        return [*outputs, *self._run(last, queued)]

    def _run(self, parts: Sequence[Step], queued: Callable[[], None]) -> list[Output]:
        """Run parts of a step, several only if there are links. Returns the outputs of microbatches with output
        rows."""
        pipeline = self._pipeline
        batches = (
            [batch for part in parts for batch in split_microbatches(part, self._microbatch)]
            if pipeline.links
            else parts
        )
        if len(batches) == 1 and (not pipeline.links or (len(batches[0].output_rows) and pipeline.idle)):
            results = [pipeline.run(batches[0])]
        else:
            futures = [pipeline.queue(batch) for batch in batches]
            # A drafter reads captured features as soon as `forward` returns.
            if not any(len(batch.output_rows) for batch in batches) and self._ring is None:
                self._unwaited = True
                queued()
                return []
            results = [future.result() for future in futures]
            pipeline.wait()
        return self._outputs(batches, results, queued)

    def _outputs(self, batches: Sequence[Step], results: Sequence[Result], queued: Callable[[], None]) -> list[Output]:
        """Wait for steps that are queued. Returns the outputs of those with output rows."""
        pipeline = self._pipeline
        # The features that a daemon captured come with its output.
        late = pipeline.shards[-1].remote
        if not late:
            self._store_features()
            self._newest = results[0] if len(results) == 1 else None
            queued()
            self._newest = None
        outputs = [_output(made) for (made, _), batch in zip(results, batches, strict=True) if len(batch.output_rows)]
        self._memory.update()
        pipeline.count_times()
        if late:
            self._store_features()
            queued()
        self._unwaited = False
        return outputs

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        self._wait()
        try:
            for shard in self._pipeline.shards:
                shard.accept(slot, rows)
        except BaseException as error:
            # Some shards may have accepted them.
            self._give_up(error)
            self._lost = f"rows could not be accepted: {error}"
            raise

    def move_features(self, slot: int, position: int, path: Sequence[int]) -> None:
        if self._ring is not None:
            self._ring.move(slot, position, path)

    def close(self) -> None:
        self._close_shards(keeps=False)

    def _close_shards(self, *, keeps: bool) -> None:
        """Release the shards, and their weights unless they are kept for the next load."""
        weights = self.options.weights
        if weights is None:
            self._pipeline.close()
            return
        weights.keep(self._pipeline.close)
        if not keeps:
            weights.release()

    def _join(self, outputs: Sequence[Output]) -> Output:
        """Join the outputs of microbatches."""
        if len(outputs) == 1:
            return outputs[0]
        return Output.joined([Output(np.empty(0, np.int32), np.empty((0, self.capacity.vocab), np.float32)), *outputs])

    def _on_captured(self, device: Device, step: Step, outputs: Sequence[Array]) -> None:
        """Take the features of a step from the last shard's `device`; from the host if it is remote. On its thread."""
        assert self._ring is not None
        if device is self._ring.device:
            self._ring.put(step, outputs)
        else:
            self._features.append((step, list(outputs) if device.remote else [device.download(o) for o in outputs]))

    def _store_features(self) -> None:
        while self._ring is not None and self._features:
            step, outputs = self._features.popleft()
            self._ring.put(step, [self._ring.device.upload(output) for output in outputs])

    def _wait(self) -> None:
        """Wait until the pipeline's threads queue nothing more."""
        try:
            self._pipeline.wait()
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, why: object) -> None:
        """Wait until nothing runs, and ignore failures. `why`: why steps without a waiting call are lost."""
        self._pipeline.settle()
        self._features.clear()
        self._newest = self._ahead = None
        if self._unwaited:
            self._lost = f"a step before this one failed: {why}"
        self._unwaited = False


def _capacity(spec: ModelSpec, plan: ModelPlan, options: ServingOptions) -> Capacity:
    groups = shard_groups(plan.devices)
    return Capacity(
        vocab=spec.vocab,
        context=options.context,
        slots=options.slots,
        windows=tuple(group.window for group in spec.page_groups),
        pages=plan.pages,
        page_bytes=sum(plan.page_bytes.values()),
        checkpoint_bytes=plan.checkpoint_bytes,
        max_resident_pages=plan.kvflash.max_resident_pages,
        branch_pages=options.branch_pages,
        verify_rows=options.verify_rows,
        recurrent=spec.recurrent,
        layers=tuple(
            range(plan.shards[first].layers.start, plan.shards[first + len(group) - 1].layers.stop)
            for first, group in groups
        ),
        ranking_bytes=ranking_bytes(spec) if options.rank_pages else 0,
    )


def _output(made: object) -> Output:
    """The output of a step from the result of the last shard."""
    assert callable(made)
    output: Output = made()
    return output
