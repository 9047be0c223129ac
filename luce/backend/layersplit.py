"""The only backend: runs a step through its shards in order, handing the residual stream from device to device.

Devices work on their own once told what to do, so a step is only queued here, shard by shard, with events between the
devices (luce.runtime.transfer). Nothing is waited for but the output: while a shard works on one step, or on one piece
of a long step, the shard before it is at the next. A step of which no output is wanted returns at once; if it fails,
the next one does, and all that sequences keep counts as lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from luce.backend.backend import Capacity
from luce.backend.kvflash_size import Wanted
from luce.backend.microbatch import default_microbatch_rows, max_microbatch_rows, separate_prompts, split_microbatches
from luce.backend.pipeline_state import PipelineRanking, PipelineState
from luce.backend.placement import Claim, ShardPlan, group_pages, plan_pool, plan_shards
from luce.errors import BackendError, OutOfMemoryError
from luce.gguf.reader import GGUFFile
from luce.layers.features import FeatureRing
from luce.models.spec import ModelSpec
from luce.ops.kvtype import AUTO, KVTypes
from luce.remote.device import RemoteDevice, is_remote, same_daemon
from luce.remote.shard import RemoteShard
from luce.runtime.device import Array, Device, Memory
from luce.runtime.step import PAGE, Output, Step
from luce.runtime.transfer import Link
from luce.shard.local import LocalShard
from luce.shard.memory_watch import MemoryWatch
from luce.shard.page_ranking import ranking_bytes
from luce.shard.pipeline import Chain
from luce.shard.shard import DaemonState, DeviceInfo, Shard
from luce.shard.sizes import handed_on, state_bytes
from luce.shard.timing import ShardTimes

_log = logging.getLogger(__name__)


class LayerSplitBackend:
    """`spec`'s layers on `devices`, split by `weights` or by bytes (luce.backend.placement.plan_shards).

    See luce.backend.backend.Backend for the properties. `verify`: most rows of a speculative span or a tree; `pool`:
    how much of a longer sequence is on the devices; `ranked`: whether its pages can be sealed and ranked;
    `branch_pages`: of each group, for branches of trees. `ring` gets what its layers compute in every step; `claims`:
    what a drafter is going to take of the devices. `unpack`: GPUs keep matrices unpacked beside their blocks, in what
    memory can be spared, which makes prompts faster and nothing else. `piece`: rows in which long steps go through
    several shards, 0 for as many as usual. `peer`: GPUs copy to each other where the pair allows it, otherwise always
    through pinned host memory. `on_progress` gets the share of the layers that are read, after each of this process and
    about once a second from daemons. Raises UsageError if the split is impossible or the heads do not take a type of
    `kv`, OutOfMemoryError naming shard, bytes and the context that would fit. Nothing stays allocated then. The devices
    stay their owner's: they are closed after the backend.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        devices: Sequence[Device],
        *,
        weights: Sequence[float] = (),
        slots: int = 1,
        context: int = 4096,
        chunk: int = 512,
        kv: KVTypes = AUTO,
        verify: int = 0,
        pool: Wanted | None = None,
        ranked: bool = False,
        branch_pages: int = 0,
        ring: FeatureRing | None = None,
        claims: Sequence[Claim] = (),
        unpack: bool = False,
        piece: int = 0,
        peer: bool = True,
        on_progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        if ring is not None:
            spec = replace(spec, captured=ring.layers)
        spec = replace(spec, ranked=ranked)
        self.spec = spec
        self._ring = ring
        #: what is still to be put into the ring, because somebody else drives its device: on the host
        self._captured: deque[tuple[Step, list[NDArray[np.uint16]]]] = deque()
        self._kv = kv
        self._piece = piece = piece or default_microbatch_rows(len(devices))
        self.chunk = chunk
        self._chain = Chain(peer=peer)
        self._devices = tuple(devices)
        self._own = [device for device in devices if not device.remote]
        self._left = MemoryWatch(self._own)
        #: whether steps may have failed that nobody has waited for, and why one did
        self._unwaited, self._forgotten = False, ""
        planned = partial(
            plan_shards,
            file,
            spec,
            devices,
            weights=weights,
            slots=slots,
            context=context,
            chunk=chunk,
            kv=kv,
            verify=verify,
            branch_pages=branch_pages,
            claims=claims,
            piece=piece,
        )
        chosen = plan_pool(pool, planned, spec, devices, slots=slots, context=context, chunk=chunk, kv=kv)
        if chosen.reason:
            _log.info("--kvflash: %s", chosen.reason)
        own_pages = group_pages(spec, slots, context, chunk, chosen.bound)
        plan = planned(bound=chosen.bound)
        windows = tuple(group.window for group in spec.page_groups)
        #: of each device, host memory for a page of full attention
        page_bytes: Counter[Device] = Counter()
        for device, part in zip(devices, plan, strict=True):
            sizes = state_bytes(device, spec, part.layers, kv, verify).page
            page_bytes[device] += sum(size for size, w in zip(sizes, windows, strict=True) if w is None)
        pages = [count + branch_pages for count in own_pages]
        groups = _groups(devices)
        self.capacity = Capacity(
            vocab=spec.vocab,
            context=context,
            slots=slots,
            windows=windows,
            pages=own_pages,
            page_bytes=page_bytes.total(),
            max_resident_pages=chosen.bound,
            branch_pages=branch_pages,
            verify_rows=verify,
            recurrent=spec.recurrent,
            layers=tuple(range(plan[n].layers.start, plan[n + len(group) - 1].layers.stop) for n, group in groups),
            ranking_bytes=ranking_bytes(spec),
        )
        self.state = PipelineState(self._chain.shards, self._wait, page_bytes)
        self.ranking = PipelineRanking(self._chain.shards, self._wait)
        self._check_memory(plan, devices)
        spare = [shard.spare if unpack else 0 for shard in plan]
        rows = max_microbatch_rows(piece)
        # What one device would do twice at a time shares its memory for graphs.
        gpus = [group[0].name for _, group in groups if not (_remote(group) or group[0].host)]
        pieces = len(gpus) > 1 and len(set(gpus)) == len(gpus)
        remote: dict[int, RemoteShard] = {}
        read = itertools.count(1)

        def report(own: int) -> None:
            done = own + sum(shard.progress * len(shard.layers) for shard in remote.values())
            on_progress(done / len(spec.layers))

        try:
            # Daemons read their weights while this process reads its own.
            for number, group in groups:
                if _remote(group):
                    layers = [shard.layers for shard in plan[number : number + len(group)]]
                    name = f"shard {number} ({','.join(str(device.name) for device in group)})"
                    remote[number] = RemoteShard(
                        name,
                        file,
                        spec,
                        layers,
                        group,
                        pages=pages,
                        slots=slots,
                        kv=kv,
                        verify=verify,
                        spare=spare[number : number + len(group)],
                        rows=rows,
                        peer=peer,
                        on_captured=partial(self._capture, group[-1]),
                    )
            for number, group in groups:
                shard: Shard
                with _naming(number, plan[number]):
                    if number in remote:
                        shard = remote[number]
                        shard.pin([*devices[max(0, number - 1) : number], *devices[number + len(group) :][:1]])
                    else:
                        shard = LocalShard(
                            file,
                            spec,
                            plan[number].layers,
                            group[0],
                            pages=pages,
                            slots=slots,
                            kv=kv,
                            verify=verify,
                            spare=spare[number],
                            pieces=pieces,
                            on_captured=partial(self._capture, group[0]),
                            on_layer=lambda: report(next(read)),
                        )
                    self._chain.add(f"shard {number}", ",".join(str(device.name) for device in group), shard)
                    if number:
                        self._chain.link(rows * handed_on(spec, plan[number].layers.start) // 4)
            own = next(read) - 1
            for number, shard in remote.items():
                with _naming(number, plan[number], named=True):
                    shard.wait_loaded(lambda: report(own))
            self._left.look()
        except BaseException:
            for shard in remote.values():
                shard.close()
            self.close()
            raise

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in the order of their layers."""
        return tuple(self._chain.shards)

    @property
    def links(self) -> tuple[Link, ...]:
        """The ways from each shard to the next."""
        return tuple(self._chain.links)

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """What lies on each device."""
        return tuple(part for shard in self._chain.shards for part in shard.info.devices)

    def lost(self) -> str:
        if self._chain.failure is not None:
            _log.error("a step failed: %s", self._chain.failure)
            self._give_up(self._chain.failure)
        forgotten, self._forgotten = self._forgotten, ""
        if losses := "; ".join(filter(None, [shard.lost() for shard in self._chain.shards])):
            self._give_up(losses)
            forgotten, self._forgotten = losses, ""
        return forgotten

    def down(self) -> str:
        """Why steps will fail from now on; empty as long as they need not. Any thread may ask."""
        return "; ".join(filter(None, [shard.down() for shard in self.shards]))

    def memory(self) -> dict[str, Memory]:
        """What each device has left, by its name, as far as it is known: of this process's devices as of the last step,
        of a daemon's as of its last sign of life. Any thread may ask."""
        own = dict(zip((str(device.name) for device in self._own), self._left.seen, strict=False))
        there = {str(device.name): device.left() for device in self._devices if is_remote(device)}
        return own | {name: memory for name, memory in there.items() if memory is not None}

    def daemons(self) -> tuple[DaemonState, ...]:
        """The shards that are in daemons. Any thread may ask."""
        shards = enumerate(self.shards)
        return tuple(shard.daemon_state(number) for number, shard in shards if isinstance(shard, RemoteShard))

    def times(self) -> tuple[ShardTimes, ...]:
        """What the shards' work and the copies between them took since the start. Any thread may ask."""
        return self._chain.times()

    def forward(self, step: Step, queued: Callable[[], None] = lambda: None) -> Output:
        if not self._chain.shards:
            raise BackendError("the backend is closed")
        parts = separate_prompts(step)
        runs = [[part] for part in parts]
        if self._chain.links:
            # Prompts follow each other through the shards, and replies do not wait for their end.
            ahead = int(len(parts[0].output_rows) > 0)
            runs = [parts[:ahead], parts[ahead:]]
        *runs, last = filter(None, runs)
        try:
            outputs = [output for run in runs for output in self._run(run, lambda: None)]
            return self._output([*outputs, *self._run(last, queued)])
        except BaseException as error:
            self._give_up(error)
            raise

    def _run(self, parts: Sequence[Step], queued: Callable[[], None]) -> list[Output]:
        """What the pieces of parts of a step gave of which output is wanted; several parts if there are links."""
        chain = self._chain
        pieces = [piece for part in parts for piece in split_microbatches(part, self._piece)] if chain.links else parts
        if len(pieces) == 1 and (not chain.links or (len(pieces[0].output_rows) and chain.idle)):
            ran = [chain.through(pieces[0])]
        else:
            given = [chain.queue(piece) for piece in pieces]
            # What is captured is read by others as soon as `forward` returns.
            if not any(len(piece.output_rows) for piece in pieces) and self._ring is None:
                self._unwaited = True
                queued()
                return []
            ran = [result.result() for result in given]
            chain.wait()
        # What a daemon captured comes with its output.
        late = chain.shards[-1].remote
        if not late:
            self._store_captured()
            queued()
        outputs = [_output(made) for (made, _), piece in zip(ran, pieces, strict=True) if len(piece.output_rows)]
        self._left.look()
        chain.look()
        if late:
            self._store_captured()
            queued()
        self._unwaited = False
        return outputs

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        self._wait()
        try:
            for shard in self._chain.shards:
                shard.accept(slot, rows)
        except BaseException as error:
            # Some shards may have done it.
            self._give_up(error)
            self._forgotten = f"rows could not be accepted: {error}"
            raise

    def move_features(self, slot: int, position: int, path: Sequence[int]) -> None:
        if self._ring is not None:
            self._ring.move(slot, position, path)

    def close(self) -> None:
        self._chain.close()

    def _output(self, outputs: Sequence[Output]) -> Output:
        """What pieces gave, together."""
        if len(outputs) == 1:
            return outputs[0]
        return Output.joined([Output(np.empty(0, np.int32), np.empty((0, self.capacity.vocab), np.float32)), *outputs])

    def _capture(self, device: Device, step: Step, outputs: Sequence[Array]) -> None:
        """The last shard has these, on `device`, or on the host if that is a daemon's. On the shard's thread."""
        assert self._ring is not None
        if device is self._ring.device:
            self._ring.put(step, outputs)
        else:
            self._captured.append((step, list(outputs) if device.remote else [device.download(o) for o in outputs]))

    def _store_captured(self) -> None:
        while self._ring is not None and self._captured:
            step, outputs = self._captured.popleft()
            self._ring.put(step, [self._ring.device.upload(output) for output in outputs])

    def _wait(self) -> None:
        """Let nothing be queued any more by other threads."""
        try:
            self._chain.wait()
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, why: object) -> None:
        """Wait until nothing runs, whether it fails or not."""
        self._chain.settle()
        self._captured.clear()
        if self._unwaited:
            self._forgotten = f"a step before this one failed: {why}"
        self._unwaited = False

    def _check_memory(self, plan: Sequence[ShardPlan], devices: Sequence[Device]) -> None:
        """Refuse before anything is allocated; the message says what would fit."""
        bound = self.capacity.max_resident_pages
        for number, (shard, device) in enumerate(zip(plan, devices, strict=True)):
            if shard.fits:
                continue
            # Pages of a window do not become fewer with the context.
            page = state_bytes(device, self.spec, shard.layers, self._kv).page
            full = [group for group, window in enumerate(self.capacity.windows) if window is None and bound is None]
            left = shard.free - shard.needed + sum(self.capacity.pages[group] * page[group] for group in full)
            per_page = self.capacity.slots * sum(page[group] for group in full)
            fits = left // per_page * PAGE if per_page and left > 0 else 0
            advice = f"--max-ctx {fits} would fit" if fits else "not even one page of context would fit"
            draft = f" beside {shard.claimed} for the draft" if shard.claimed else ""
            if bound is not None:
                advice = "a smaller --kvflash may fit"
            handed = f", {shard.buffers} for what is handed over" if shard.buffers else ""
            raise OutOfMemoryError(
                f"{_name(number, shard)} need {shard.needed} bytes ({shard.weights} of weights, "
                f"{shard.state} of context state{handed}), {shard.free} are free{draft}; {advice}",
                param="max_ctx" if bound is None else "kvflash",
            )


def _groups(devices: Sequence[Device]) -> list[tuple[int, list[Device]]]:
    """The devices of each shard, with the place of the first: one, or all that a daemon has side by side."""
    groups: list[tuple[int, list[Device]]] = []
    for number, device in enumerate(devices):
        before = devices[number - 1] if number else None
        if same_daemon(before, device):
            groups[-1][1].append(device)
        else:
            groups.append((number, [device]))
    return groups


def _remote(group: list[Device]) -> TypeGuard[list[RemoteDevice]]:
    return group[0].remote


def _output(made: object) -> Output:
    """The output of what the last shard has made of a step."""
    assert callable(made)
    output: Output = made()
    return output


def _name(number: int, shard: ShardPlan) -> str:
    return f"shard {number} ({shard.device}): layers {shard.layers.start}..{shard.layers.stop - 1}"


@contextlib.contextmanager
def _naming(number: int, shard: ShardPlan, *, named: bool = False) -> Iterator[None]:
    """Say in errors of memory which shard lacks it, unless it is `named` there, and what would help."""
    try:
        yield
    except OutOfMemoryError as error:
        # It was planned to fit: somebody else has taken memory since, or it is in pieces.
        needs = f"it needs {shard.needed} bytes in all, {shard.state} of them for context"
        name = "" if named else f"{_name(number, shard)}: "
        raise OutOfMemoryError(
            f"{name}{error}; {needs}, which a smaller --max-ctx makes less", param="max_ctx"
        ) from error
