"""Shards in the order of their layers, and the copies between them: work is only queued here, nothing is waited for.

The backend drives the chain of a whole model, a daemon the chain of its own devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from luce.backend.shard import Activation, Pending, Shard
from luce.backend.timing import Clock, ShardTimes
from luce.errors import BackendError, DeviceError
from luce.runtime.device import Event
from luce.runtime.step import Step
from luce.runtime.transfer import Link, Passage


class Chain:
    """Shards are added in order; each hands on to the next one by a link. `peer` as in Link."""

    def __init__(self, *, peer: bool) -> None:
        self._peer = peer
        self.shards: list[Shard] = []
        #: from each shard to the next
        self.links: list[Link] = []
        self._names: list[str] = []
        self._devices: list[str] = []
        self._work: list[Clock] = []
        self._copies: list[Clock] = []

    def add(self, name: str, device: str, shard: Shard) -> None:
        """The next shard; the chain closes it. `name` stands before its device's errors, `device` in `times`."""
        self.shards.append(shard)
        self._names.append(name)
        self._devices.append(device)
        self._work.append(Clock())

    def link(self, size: int) -> None:
        """The way from the shard before the last one to the last one, for `size` float32 values at a time."""
        before, last = self.shards[-2:]
        self._copies.append(Clock())
        self.links.append(Link(before.device, last.device, size, peer=self._peer, watch=self._copies[-1].add))

    def run(self, number: int, step: Step, handed: Passage | None) -> tuple[Passage | Activation | Pending, Event]:
        """Queue a shard's work on a step, and the copy of what it hands on if another shard follows.

        Also when the shard's work is done. Raises BackendError naming the shard.
        """
        shard = self.shards[number]
        device = shard.device
        with self._naming(number):
            shard.announce(step, None if handed is None else tuple(handed.arrays))
            arrays = None if handed is None else handed.receive()
            start = device.record(timing=True)
            result = shard.forward(step, arrays)
            end = device.record(timing=True)
            self._work[number].add(start, end)
            if isinstance(result, tuple) and number < len(self.links):
                passage = self.links[number].send(result, end)
                if handed is not None:
                    # What is handed on may lie in what was handed over.
                    handed.release(passage.taken)
                return passage, end
            if handed is not None:
                handed.release(end)
            return result, end

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except DeviceError as error:
            raise BackendError(f"{self._names[number]}: {error}") from error

    def look(self) -> None:
        """Count the work that is over. Raises LuceError if some of it failed."""
        for clock in (*self._work, *self._copies):
            clock.look()

    def times(self) -> tuple[ShardTimes, ...]:
        """What the shards' work and the copies between them took since the start. Any thread may ask."""
        copies = [*(clock.durations() for clock in self._copies), None]
        return tuple(
            ShardTimes(device, work.durations(), copied)
            for device, work, copied in zip(self._devices, self._work, copies, strict=True)
        )

    def worked(self) -> float:
        """Seconds that the shards' work took since the start, as far as it has been counted."""
        return sum(clock.total for clock in self._work)

    def settle(self) -> None:
        """Wait until nothing runs, whether it fails or not."""
        for waiting in (*(shard.device.synchronize for shard in self.shards), *(link.settle for link in self.links)):
            with contextlib.suppress(DeviceError, BackendError):
                waiting()
        for clock in (*self._work, *self._copies):
            clock.forget()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.settle()
        self.links.clear()
        for shard in reversed(self.shards):
            shard.close()
        self.shards.clear()
