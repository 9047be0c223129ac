"""The only backend: runs a step through its shards in order, handing the residual stream from device to device.

Devices work on their own once told what to do, so a step is only queued here, shard by shard, with events between the
devices (luce.runtime.transfer). Nothing is waited for but the output: while a shard works on one step, or on one piece
of a long step, the shard before it is at the next. A step of which no output is wanted returns at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from luce.backend.local import LocalShard
from luce.backend.pieces import cut, largest_piece
from luce.backend.placement import ShardPlan, plan_shards
from luce.backend.plan import handed_on, pages_for, state_bytes
from luce.backend.shard import Pending, Shard
from luce.backend.timing import Clock, ShardTimes
from luce.errors import BackendError, DeviceError, OutOfMemoryError
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Device, Event
from luce.runtime.step import PAGE, Output, Step
from luce.runtime.transfer import Link, Passage

#: Rows of a piece. More make better matrix products, fewer fill and drain the shards sooner. A 27B model on two H200,
#: pieces of 512, 1024 and 2048: prompts of 2048 at 9700, 10100 and 8900 tok/s, of 8192 at 10600, 12000 and 12400.
_PIECE = 1024
#: Pieces per shard that may be queued and not done: enough that no shard waits for the host.
_AHEAD = 2


class LayerSplitBackend:
    """`spec`'s layers on `devices`, split by `weights` or by bytes (luce.backend.placement.plan_shards).

    See luce.backend.backend.Backend for the properties. `piece`: rows in which long steps go through several shards.
    `peer`: GPUs copy to each other where the pair allows it, otherwise always through pinned host memory.
    Raises UsageError if the split is impossible or the heads do not take a type of `kv`, OutOfMemoryError naming shard,
    bytes and the context that would fit. Nothing stays allocated then.
    The devices stay their owner's: they are closed after the backend.
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
        piece: int = _PIECE,
        peer: bool = True,
    ) -> None:
        self.spec = spec
        self._kv = kv
        self._piece = piece
        self.vocab = spec.vocab
        self.slots = slots
        self.context = context
        self.chunk = chunk
        self.recurrent = spec.recurrent
        self.windows = tuple(group.window for group in spec.page_groups)
        self.pages = tuple(slots * pages_for(window, context, chunk) for window in self.windows)
        self._shards: list[Shard] = []
        self._links: list[Link] = []
        self._queued: deque[Event] = deque()
        plan = plan_shards(file, spec, devices, weights=weights, slots=slots, context=context, chunk=chunk, kv=kv)
        self._check_memory(plan, devices)
        self._names = [shard.device for shard in plan]
        self._work = [Clock() for _ in plan]
        self._copies = [Clock() for _ in plan[1:]]
        try:
            for number, (shard, device) in enumerate(zip(plan, devices, strict=True)):
                with _naming(number, shard):
                    self._shards.append(
                        LocalShard(file, spec, shard.layers, device, pages=self.pages, slots=slots, kv=kv)
                    )
            for number, (source, target) in enumerate(pairwise(devices)):
                with _naming(number + 1, plan[number + 1]):
                    size = largest_piece(piece) * handed_on(spec, plan[number].layers.stop) // 4
                    self._links.append(Link(source, target, size, peer=peer, watch=self._copies[number].add))
        except BaseException:
            self.close()
            raise
        # In each round GPUs get their work before hosts, which do theirs at once.
        self._order = sorted(range(len(plan)), key=lambda number: devices[number].host)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in the order of their layers."""
        return tuple(self._shards)

    @property
    def layers(self) -> tuple[range, ...]:
        return tuple(shard.info.layers for shard in self._shards)

    @property
    def links(self) -> tuple[Link, ...]:
        """The ways from each shard to the next."""
        return tuple(self._links)

    def times(self) -> tuple[ShardTimes, ...]:
        """What the shards' work and the copies between them took since the start. Any thread may ask."""
        copies = [*(clock.durations() for clock in self._copies), None]
        return tuple(
            ShardTimes(device, work.durations(), copied)
            for device, work, copied in zip(self._names, self._work, copies, strict=True)
        )

    def forward(self, step: Step) -> Output:
        if not self._shards:
            raise BackendError("the backend is closed")
        try:
            pieces = cut(step, self._piece) if self._links else [step]
            results = self._queue(pieces)
            outputs = [result() for result, piece in zip(results, pieces, strict=True) if len(piece.wanted)]
            for clock in (*self._work, *self._copies):
                clock.look()
        except BaseException:
            self._settle()
            raise
        if len(outputs) == 1:
            return outputs[0]
        return Output.joined([Output(np.empty(0, np.int32), np.empty((0, self.vocab), np.float32)), *outputs])

    def save(self, slot: int | None, pages: Sequence[Sequence[int]]) -> dict[str, NDArray[np.generic]]:
        return {name: tensor for shard in self._shards for name, tensor in shard.save(slot, pages).items()}

    def restore(
        self, slot: int | None, pages: Sequence[Sequence[int]], tensors: Mapping[str, NDArray[np.generic]]
    ) -> None:
        for shard in self._shards:
            shard.restore(slot, pages, tensors)

    def close(self) -> None:
        self._settle()
        self._links.clear()
        for shard in reversed(self._shards):
            shard.close()
        self._shards.clear()

    def _queue(self, pieces: Sequence[Step]) -> list[Pending]:
        """Queue the pieces in rounds: in each, every shard gets the piece that the shard before it got in the last."""
        handed: list[Passage | None] = [None] * len(pieces)
        results: list[Pending] = []
        for number in range(len(pieces) + len(self._shards) - 1):
            for shard in self._order:
                index = number - shard
                if 0 <= index < len(pieces):
                    result = self._run(shard, pieces[index], handed[index])
                    if isinstance(result, Passage):
                        handed[index] = result
                    else:
                        results.append(result)
        return results

    def _run(self, number: int, step: Step, handed: Passage | None) -> Passage | Pending:
        """Queue a shard's work and the copy of what it hands on."""
        shard = self._shards[number]
        device = shard.device
        try:
            arrays = None if handed is None else handed.receive()
            start = device.record(timing=True)
            result = shard.forward(step, arrays)
            end = device.record(timing=True)
            self._work[number].add(start, end)
            if isinstance(result, tuple):
                passage = self._links[number].send(result, end)
                if handed is not None:
                    # What is handed on may lie in what was handed over.
                    handed.release(passage.taken)
                return passage
            if handed is not None:
                handed.release(end)
            self._queued.append(end)
            if len(self._queued) > _AHEAD * len(self._shards):
                self._queued.popleft().wait()
            return result
        except DeviceError as error:
            raise BackendError(f"shard {number}: {error}") from error

    def _settle(self) -> None:
        """Wait until nothing runs, whether it fails or not."""
        self._queued.clear()
        for waiting in (*(shard.device.synchronize for shard in self._shards), *(link.settle for link in self._links)):
            with contextlib.suppress(DeviceError):
                waiting()
        for clock in (*self._work, *self._copies):
            clock.forget()

    def _check_memory(self, plan: Sequence[ShardPlan], devices: Sequence[Device]) -> None:
        """Refuse before anything is allocated; the message says what would fit."""
        for number, (shard, device) in enumerate(zip(plan, devices, strict=True)):
            if shard.fits:
                continue
            # Pages of a window do not become fewer with the context.
            page = state_bytes(device, self.spec, shard.layers, self._kv).page
            full = [group for group, window in enumerate(self.windows) if window is None]
            left = shard.free - shard.weights - shard.state + sum(self.pages[group] * page[group] for group in full)
            per_page = self.slots * sum(page[group] for group in full)
            fits = left // per_page * PAGE if per_page and left > 0 else 0
            advice = f"--max-ctx {fits} would fit" if fits else "not even one page of context would fit"
            raise OutOfMemoryError(
                f"{_name(number, shard)} need {shard.weights + shard.state} bytes ({shard.weights} of weights, "
                f"{shard.state} of context state), {shard.free} are free; {advice}",
                param="max_ctx",
            )


def _name(number: int, shard: ShardPlan) -> str:
    return f"shard {number} ({shard.device}): layers {shard.layers.start}..{shard.layers.stop - 1}"


@contextlib.contextmanager
def _naming(number: int, shard: ShardPlan) -> Iterator[None]:
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{_name(number, shard)}: {error}") from error
