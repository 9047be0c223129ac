"""Shards of simulated devices (luce.runtime.simulated): layers that take the time which the planner predicts, or layers
that a CPU computes for the device.

The pipeline drives them as any shards: by its threads and links, in the pieces into which it cuts prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luce.backend.fastest_placement import Goal, placement_problem
from luce.backend.measured_devices import ModelOnDevices, known_figures
from luce.backend.serving_options import ServingOptions
from luce.errors import DeviceError
from luce.gguf.reader import GGUFFile
from luce.layers.state import KVPool
from luce.models.spec import ModelSpec
from luce.ops.draw import draw_tokens, with_drawn
from luce.ops.sample import argmax, mask_logits, top_k_keys, unpack_candidates
from luce.planner.layer_time import Pass
from luce.planner.shard_tables import pass_seconds, shard_tables
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.simulated import SimulatedDevice, SimulatedEvent
from luce.runtime.step import PAGE, Int32, Output, Step
from luce.shard.local import LocalEnds, LocalShard
from luce.shard.local_state import LocalState
from luce.shard.shard import Activation, DeviceInfo, Pending, Shard, ShardInfo
from luce.shard.shard_options import DeviceLayers, ShardHooks
from luce.shard.sizes import activation_widths, state_bytes

_log = logging.getLogger(__name__)


def load_simulated(
    file: GGUFFile,
    spec: ModelSpec,
    own: DeviceLayers,
    options: ServingOptions,
    pages: Sequence[int],
    hooks: ShardHooks,
    devices: Sequence[Device],
) -> Shard:
    """The shard of a simulated device. `pages` as for LocalShard; `devices`: of all shards of the model.

    Raises OutOfMemoryError, and DeviceError if layers leave experts to a CPU whose figures are not known, or if prompts
    are to be read in int8.
    """
    device = own.device
    assert isinstance(device, SimulatedDevice)
    if device.cpu is not None:
        return ComputedShard(device, LocalShard(file, spec, on_cpu(own, device.cpu), options, pages, hooks), own)
    if options.prompt_precision == "int8":
        raise DeviceError(f"{device.name}: --prompt-precision int8: simulated devices have no figures for it")
    _log.warning("%s is simulated and computes nothing: replies are none of the model", device.name)
    return SimulatedShard(device, StageTimes(file, spec, own, options, devices), spec, own, options, pages, hooks)


def on_cpu(own: DeviceLayers, cpu: Device) -> DeviceLayers:
    """The layers as a CPU holds them, which unpacks none."""
    return replace(own, device=cpu, unpack_bytes=0)


class StageTimes:
    """Seconds that a shard's device takes for a step, as the planner predicts them (pass_seconds)."""

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, own: DeviceLayers, options: ServingOptions, devices: Sequence[Device]
    ) -> None:
        options = options if own.offloaded else replace(options, experts=None)
        model = ModelOnDevices(file, spec, (own.device,), options)
        known = known_figures(model)
        if known is None:
            cpus = ", ".join(str(cpu.name) for cpu in model.expert_cpus)
            raise DeviceError(f"{own.device.name}: leaves experts to {cpus} without figures: luce doctor --measure")
        self._problem = placement_problem(model, known, Goal("balanced"))
        (self._figures,) = self._problem.devices
        self._layers, self._offloaded = own.layers, len(own.offloaded)
        rows = self._problem.piece_rows(len(devices), with_cpu=any(device.host for device in devices))
        tables = shard_tables(self._problem, self._figures, rows, offloaded=self._offloaded)
        self._unpacked = float(tables.unpacked[own.layers.start, own.layers.stop])

    def seconds(self, step: Step) -> float:
        """Seconds of a step. One with rows of prompts counts as a piece of a prompt."""
        prompt = any(span.rows > 1 and not span.speculative for span in step.spans)
        work = Pass("prompt" if prompt else "decode", step.rows, float(step.positions.mean()))
        where = self._problem, self._figures, self._layers, self._offloaded
        return pass_seconds(*where, work, self._unpacked).total


class EvenRanking:
    """See luce.shard.shard.ShardRanking. All pages get as much attention."""

    def add(self, slot: int, entries: Sequence[int], pages: Sequence[int]) -> None:
        pass

    def drop(self, slot: int) -> None:
        pass

    def rank(self, slot: int, position: int, entries: Int32) -> NDArray[np.float64]:
        return np.full((1, len(entries)), 1 / max(1, len(entries)))


class SimulatedShard:
    """See luce.shard.shard.Shard. Layers that take time, and compute nothing.

    Its replies consist of the token in the middle of the vocabulary, or of the first one that a mask leaves.
    """

    remote = False

    def __init__(
        self,
        device: SimulatedDevice,
        times: StageTimes,
        spec: ModelSpec,
        own: DeviceLayers,
        options: ServingOptions,
        pages: Sequence[int],
        hooks: ShardHooks,
    ) -> None:
        self.device = device
        self._times, self._hooks = times, hooks
        self._give_back = device.hold(own.planned_bytes)
        layers = own.layers
        self._first, self._last = layers.start == 0, layers.stop == len(spec.layers)
        self._widths = activation_widths(spec, layers.stop, options.captured)
        self._captured, self._hidden, self._vocab = options.captured, spec.hidden, spec.vocab
        # A byte for each position stands for the keys of a page group, so that saved states have their pages.
        groups = {spec.group_of(layer): layer for layer in layers}
        pools = {
            layer: KVPool(device.zeros((pages[group] * PAGE, 1, 1), np.uint8), None)
            for group, layer in groups.items()
            if group is not None
        }
        self.state = LocalState(device, pools, (), {layer: spec.group_of(layer) for layer in pools})
        self.ranking = EvenRanking()
        self.ends = LocalEnds(device, layers, None, None)
        held = state_bytes(device, spec, layers, options).total(pages, options.slots)
        part = DeviceInfo(str(device.name), layers, max(0, own.planned_bytes - held), held, 0)
        self.info = ShardInfo((replace(part, offloaded=own.offloaded),))
        for _ in layers:
            hooks.on_layer()

    def lost(self) -> str:
        return ""

    def down(self) -> str:
        return ""

    def announce(self, step: Step, activation: Activation | None) -> None:
        if self._first:
            # The step's arrays come from the host, while the device works on steps before it.
            clock = self.device.clock
            self.device.wait_for(SimulatedEvent(clock, clock.now() + self.device.figures.way.latency))

    def stage(self, step: Step) -> None:
        pass

    def forward(self, step: Step, activation: Activation | None) -> Activation | Pending:
        device, way = self.device, self.device.figures.way
        device.queue.take(self._times.seconds(step))
        if not self._last:
            return tuple(device.empty((step.rows, width)) for width in self._widths)
        if self._captured:
            outputs = [device.zeros((step.rows, self._hidden), np.uint16) for _ in self._captured]
            self._hooks.on_captured(step, outputs)
        output = self._output(step)
        done = device.record().at + way.latency + output.logits.nbytes / way.bandwidth
        return lambda: self._wait(done, output)

    def _wait(self, done: float, output: Output) -> Output:
        self.device.clock.wait_until(done)
        return output

    def _output(self, step: Step) -> Output:
        count, host = len(step.output_rows), HostDevice()
        if not count:
            return Output(np.empty(0, np.int32), np.empty((0, 0), np.float32))
        logits = np.zeros((count, self._vocab), np.float32)
        logits[:, self._vocab // 2] = 1
        if step.masks is not None:
            masks = step.masks.wait()
            mask_logits(host, logits, masks.rows, masks.words)
        found = None
        if step.needs_candidates is not None and step.needs_candidates.any():
            found = unpack_candidates(top_k_keys(host, logits[step.needs_candidates]))
        ids = argmax(host, logits)
        if step.draws is not None:
            keys = top_k_keys(host, logits[step.draws.drawn])
            ids = with_drawn(ids, step.draws, draw_tokens(host, keys, step.draws, step.next_positions, ids))
        return Output(ids, logits[step.needs_logits], found)

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        self.state.close()
        self._give_back()


class ComputedShard:
    """See luce.shard.shard.Shard. The shard of a CPU that computes for a simulated device.

    Pages, recurrent states and results lie in the host's memory, and everything is computed during the calls.
    """

    remote = False

    def __init__(self, device: SimulatedDevice, shard: LocalShard, own: DeviceLayers) -> None:
        self.device = device
        self._shard = shard
        self._give_back = device.hold(own.planned_bytes)
        self.state, self.ranking, self.ends = shard.state, shard.ranking, shard.ends
        (part,) = shard.info.devices
        self.info = ShardInfo((replace(part, device=str(device.name)),))
        self.lost, self.down, self.accept = shard.lost, shard.down, shard.accept
        self.announce, self.stage, self.forward = shard.announce, shard.stage, shard.forward

    def close(self) -> None:
        self._shard.close()
        self._give_back()
