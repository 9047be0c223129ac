"""Loads the shards of a planned model. Daemons read their weights while this process reads its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

from luce.backend.microbatch import default_microbatch_rows, max_microbatch_rows
from luce.backend.placement import ModelPlan, ShardPlan, shard_name
from luce.backend.serving_options import ServingOptions
from luce.errors import OutOfMemoryError
from luce.gguf.reader import GGUFFile
from luce.layers.kept_weights import wanted_tensors
from luce.layers.routed_experts import ExpertOffload
from luce.models.spec import ModelSpec
from luce.remote.device import RemoteDevice, is_remote, same_daemon
from luce.remote.shard import RemoteShard
from luce.runtime.device import Device
from luce.shard.local import LocalShard
from luce.shard.pipeline import Pipeline
from luce.shard.shard import Shard
from luce.shard.shard_options import DeviceLayers, OnCaptured, ShardHooks
from luce.shard.sizes import activation_bytes


class ShardLoader:
    """Adds the shards of a plan to a pipeline.

    `on_captured` gets the device of a shard and returns the shard's hook. `on_progress` gets the share of the layers
    that are read, 0..1: after each layer of this process, and about once a second from daemons.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        plan: ModelPlan,
        options: ServingOptions,
        on_captured: Callable[[Device], OnCaptured],
        on_progress: Callable[[float], None],
    ) -> None:
        self._file = file
        self._spec = spec
        self._plan = plan
        self._options = options
        self._on_captured = on_captured
        self._on_progress = on_progress
        self._pages = [count + options.branch_pages for count in plan.pages]
        self._rows = max_microbatch_rows(options.microbatch or default_microbatch_rows(len(plan.devices)))
        self._groups = shard_groups(plan.devices)
        self._remote: dict[int, RemoteShard] = {}
        self._read = itertools.count(1)

    def load(self, pipeline: Pipeline) -> None:
        """Load all shards. Raises LuceError; then the caller closes the pipeline, and nothing stays allocated."""
        self._let_go()
        try:
            for number, group in self._groups:
                if _all_remote(group):
                    self._remote[number] = self._load_remote(number, group)
            for number, group in self._groups:
                with self._naming(number):
                    shard = self._pinned_remote(number, group) if number in self._remote else self._load_local(number)
                    pipeline.add(f"shard {number}", ",".join(str(device.name) for device in group), shard)
                    if number:
                        begin = self._plan.shards[number].layers.start
                        pipeline.link(self._rows * activation_bytes(self._spec, begin, self._options.captured) // 4)
            own = next(self._read) - 1
            for number, remote in self._remote.items():
                with self._naming(number, named=True):
                    remote.wait_loaded(lambda: self._report(own))
        except BaseException:
            for remote in self._remote.values():
                remote.close()
            raise

    def _let_go(self) -> None:
        """Free what is on this process's devices from an earlier load and is not needed there."""
        if self._options.weights is None:
            return
        wanted = {
            str(device.name): wanted_tensors(self._file, self._spec, shard.layers, shard.offloaded)
            for device, shard in zip(self._plan.devices, self._plan.shards, strict=True)
        }
        self._options.weights.retain(self._file, wanted)

    def _load_remote(self, number: int, group: list[RemoteDevice]) -> RemoteShard:
        """Begin to load the shard of a daemon."""
        return RemoteShard(
            f"shard {number} ({','.join(str(device.name) for device in group)})",
            self._file,
            self._spec,
            [self._layers(number + index) for index in range(len(group))],
            self._options,
            self._pages,
            rows=self._rows,
            on_captured=self._on_captured(group[-1]),
        )

    def _pinned_remote(self, number: int, group: Sequence[Device]) -> RemoteShard:
        """The shard of a daemon, with its shared memory pinned for the devices before and after it."""
        shard, devices = self._remote[number], self._plan.devices
        shard.pin([*devices[max(0, number - 1) : number], *devices[number + len(group) :][:1]])
        return shard

    def _load_local(self, number: int) -> Shard:
        own = self._layers(number)
        hooks = ShardHooks(lambda: self._report(next(self._read)), self._on_captured(own.device))
        if own.device.name.simulated:
            from luce.backend.simulated_shard import load_simulated

            devices = self._plan.devices
            return load_simulated(self._file, self._spec, own, self._options, self._pages, hooks, devices)
        # Several GPUs of this process replay long steps, unless a device occurs twice: two graphs that run at a time
        # would share its memory.
        gpus = [group[0].name for _, group in self._groups if not (group[0].remote or group[0].host)]
        return LocalShard(
            self._file,
            self._spec,
            own,
            self._options,
            self._pages,
            hooks,
            long_graphs=(len(gpus) > 1 or self._options.long_graphs) and len(set(gpus)) == len(gpus),
        )

    def _layers(self, number: int) -> DeviceLayers:
        shard, experts = self._plan.shards[number], self._options.experts
        unpack_bytes = shard.unpack_bytes if self._options.unpack else 0
        offload = ExpertOffload(experts.device, frozenset(shard.offloaded)) if experts and shard.offloaded else None
        device, pool = self._plan.devices[number], self._options.weights
        planned = shard.weights + shard.state - (0 if pool is None else pool.free_bytes(device))
        return DeviceLayers(device, shard.layers, unpack_bytes, offload, pool, max(0, planned))

    def _report(self, own: int) -> None:
        done = own + sum(shard.progress * len(shard.layers) for shard in self._remote.values())
        self._on_progress(done / len(self._spec.layers))

    @contextlib.contextmanager
    def _naming(self, number: int, *, named: bool = False) -> Iterator[None]:
        """Add the shard's name, unless it is there (`named`), and advice to errors of memory."""
        shard: ShardPlan = self._plan.shards[number]
        try:
            yield
        except OutOfMemoryError as error:
            # The plan fits: another program has taken memory since, or the free memory is fragmented.
            needs = f"it needs {shard.needed} bytes in all, {shard.state} of them for context"
            name = "" if named else f"{shard_name(number, shard)}: "
            raise OutOfMemoryError(
                f"{name}{error}; {needs}, which a smaller --max-ctx makes less", param="max_ctx"
            ) from error


def shard_groups(devices: Sequence[Device]) -> list[tuple[int, list[Device]]]:
    """The devices of each shard, with the index of the first one: one device, or consecutive devices of one daemon."""
    groups: list[tuple[int, list[Device]]] = []
    for number, device in enumerate(devices):
        if same_daemon(devices[number - 1] if number else None, device):
            groups[-1][1].append(device)
        else:
            groups.append((number, [device]))
    return groups


def _all_remote(group: list[Device]) -> TypeGuard[list[RemoteDevice]]:
    return all(map(is_remote, group))
