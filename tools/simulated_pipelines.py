"""Pipelines of simulated devices: what is predicted for a placement, and what it takes.

A placement runs in the backend that serves, with its threads, links and pieces of prompts; the devices are those of
luce.runtime.simulated, and the steps those of `luce bench`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from luce.backend.fastest_placement import Goal, choose, placement_problem
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.measured_devices import ModelOnDevices, measured
from luce.backend.model_work import model_work
from luce.backend.placement import plan_shards
from luce.backend.serving_options import ServingOptions
from luce.bench.measure import Stepper
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.planner.prediction import PlacedShard, Prediction, predict, value_of
from luce.planner.problem import Objective, Problem
from luce.runtime.simulated import SYSTEM_CLOCK, Clock, SimulatedDevice
from luce.runtime.simulated_file import SimulatedFigures, SimulatedLink, SimulatedMachine, SimulatedWay
from luce.runtime.step import PAGE

#: tokens of the prompt
PROMPT = 4096
#: seconds that a shard takes at least and at most for a piece of a prompt
PIECES = 0.02, 0.08
#: a piece's seconds that devices of middling speed take, and how much faster or slower they are
_PIECE, _SPEEDS = 0.045, (0.7, 1.5)
_OPTIONS = ServingOptions(context=PROMPT + PAGE, chunk=2048)
# A share of predicted values below which the order of two placements does not matter.
_ALIKE = 0.1


@dataclass(frozen=True)
class Compared:
    """A placement as predicted, and its seconds."""

    problem: Problem
    prediction: Prediction
    decode: float
    prompt: float

    @property
    def off(self) -> float:
        """The larger share by which decoding and the prompt take longer or shorter than predicted."""
        return max(abs(self.decode / self.prediction.decode - 1), abs(self.prompt / self.prediction.prompt - 1))

    @property
    def values(self) -> dict[str, tuple[float, float]]:
        """By goal, what the search makes small: as predicted, and as it was."""
        balanced = value_of(self.problem, self.decode, self.prompt)
        return {
            "decode": (self.prediction.decode, self.decode),
            "prompt": (self.prediction.prompt, self.prompt),
            "balanced": (self.prediction.value, balanced),
        }


def placed(
    file: GGUFFile,
    spec: ModelSpec,
    machine: SimulatedMachine,
    layers: Sequence[range],
    clock: Clock = SYSTEM_CLOCK,
    numbers: Sequence[int] = (),
) -> tuple[ModelOnDevices, Problem, Prediction]:
    """A placement on devices of a machine, and its prediction. `numbers`: of the devices, the first ones by default."""
    devices = [SimulatedDevice(machine, number, clock=clock) for number in numbers or range(len(layers))]
    model = ModelOnDevices(file, spec, devices, replace(_OPTIONS, layers=tuple(layers)))
    problem = placement_problem(model, measured(model), Goal("balanced", prompt=PROMPT, pinned=True))
    shards = [PlacedShard(str(device.name), own) for device, own in zip(devices, layers, strict=True)]
    prediction = predict(problem, shards)
    assert prediction is not None
    return model, problem, prediction


def compare(
    file: GGUFFile,
    spec: ModelSpec,
    machine: SimulatedMachine,
    layers: Sequence[range],
    clock: Clock = SYSTEM_CLOCK,
    runs: int = 5,
    numbers: Sequence[int] = (),
) -> Compared:
    """Medians of decoding steps behind the prompt, and of the prompt. `numbers` as in `placed`."""
    model, problem, prediction = placed(file, spec, machine, layers, clock, numbers)
    with contextlib.closing(LayerSplitBackend(file, spec, model.devices, model.options)) as backend:
        timed = TimedSteps(backend, PROMPT, clock)
        timed.prompt()
        found = [statistics.median(once() for _ in range(runs)) for once in (timed.decode, timed.prompt)]
    return Compared(problem, prediction, *found)


class TimedSteps:
    """Times a backend's prompts of so many tokens, and decoding steps behind them."""

    def __init__(self, backend: LayerSplitBackend, tokens: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._stepper, self._tokens, self._clock = Stepper(backend, backend.options.chunk), tokens, clock

    def prompt(self) -> float:
        """Seconds of a prompt."""
        self._stepper.move_to(0, 0)
        return self._seconds(lambda: self._stepper.read(0, self._tokens))

    def decode(self, steps: int = 1) -> float:
        """Seconds of a decoding step, the mean of several in a row."""
        self._stepper.move_to(0, self._tokens)

        def decode() -> None:
            for _ in range(steps):
                self._stepper.decode([0])

        return self._seconds(decode) / steps

    def _seconds(self, work: Callable[[], object]) -> float:
        began = self._clock.now()
        work()
        return self._clock.now() - began


@dataclass(frozen=True)
class Rivals:
    """The placement that a goal gets, and the one by free memory."""

    fastest: Compared
    by_memory: Compared

    def worse_by(self, goal: Objective) -> float:
        """The share by which the goal's placement takes longer; negative where it is faster."""
        return self.fastest.values[goal][1] / self.by_memory.values[goal][1] - 1


def rivals(
    file: GGUFFile,
    spec: ModelSpec,
    machine: SimulatedMachine,
    goal: Objective,
    clock: Clock = SYSTEM_CLOCK,
    runs: int = 5,
) -> Rivals:
    """Both placements on a machine, each as it was."""
    devices = [SimulatedDevice(machine, number) for number in range(len(machine.devices))]
    model = ModelOnDevices(file, spec, devices, _OPTIONS)
    by_memory = [shard.layers for shard in plan_shards(file, spec, devices, _OPTIONS)]
    found = choose(model, Goal(goal, prompt=PROMPT), 0, lambda figure: None)
    numbers = [[str(device.name) for device in devices].index(name) for name in found.devices]
    return Rivals(
        compare(file, spec, machine, found.layers, clock, runs, numbers),
        compare(file, spec, machine, by_memory, clock, runs),
    )


def scarce(rng: random.Random, file: GGUFFile, spec: ModelSpec, machine: SimulatedMachine) -> SimulatedMachine:
    """The machine, with devices of random memory that hold the model together, with some to spare."""
    (whole,) = plan_shards(file, spec, [SimulatedDevice(machine, 0)], _OPTIONS)
    shares = [rng.uniform(0.4, 1.0) for _ in machine.devices]
    scale = rng.uniform(1.3, 2.5) * whole.needed / sum(shares)
    devices = (
        msgspec.structs.replace(device, free=int(scale * share))
        for device, share in zip(machine.devices, shares, strict=True)
    )
    return SimulatedMachine(tuple(devices), machine.links)


def random_machine(rng: random.Random, file: GGUFFile, spec: ModelSpec, devices: int) -> SimulatedMachine:
    """Devices of unlike speeds in random order, with random links. Shards of equal sizes take 30 to 65 ms there for a
    decoding step, and for a piece of a prompt."""
    machine = _machine(1.0, 1.0, [1.0] * devices, SimulatedWay(1e-4, 1e10), SimulatedWay(1e-4, 1e10))
    work = model_work(file, spec, SimulatedDevice(machine, 0), ServingOptions())
    rows = 1024 if devices == 2 else 512
    whole = devices * _PIECE
    read = (sum(layer.bytes for layer in work.layers) + work.head.bytes) / whole
    rate = 2 * rows * sum(layer.macs for layer in work.layers) / whole
    link = SimulatedWay(rng.uniform(1e-4, 1e-3), rng.uniform(1e9, 1e10))
    way = SimulatedWay(rng.uniform(1e-5, 1e-4), rng.uniform(1e10, 3e10))
    slowest, fastest = _SPEEDS
    speeds = [slowest + (fastest - slowest) * number / max(1, devices - 1) for number in range(devices)]
    return _machine(read, rate, rng.sample(speeds, devices), way, link)


def _machine(
    read: float, rate: float, speeds: Sequence[float], way: SimulatedWay, link: SimulatedWay
) -> SimulatedMachine:
    devices = tuple(
        SimulatedFigures(f"card {number}", 1 << 40, read * speed, {1: rate * speed}, 0.0, 1e-4, way)
        for number, speed in enumerate(speeds)
    )
    names = [f"sim:{number}" for number in range(len(speeds))]
    pairs = itertools.permutations(names, 2)
    return SimulatedMachine(devices, tuple(SimulatedLink(*pair, link.latency, link.bandwidth) for pair in pairs))


def random_layers(
    rng: random.Random, file: GGUFFile, spec: ModelSpec, machine: SimulatedMachine, count: int
) -> list[list[range]]:
    """Random placements on all devices of a machine whose pieces of prompts take as long as PIECES says."""
    found: list[list[range]] = []
    while len(found) < count:
        edges = [0, *sorted(rng.sample(range(1, len(spec.layers)), len(machine.devices) - 1)), len(spec.layers)]
        layers = [range(*ends) for ends in itertools.pairwise(edges)]
        _, _, prediction = placed(file, spec, machine, layers)
        pieces = [shard.piece.total for shard in prediction.shards]
        if layers not in found and PIECES[0] <= min(pieces) and max(pieces) <= PIECES[1]:
            found.append(layers)
    return found


def ranked(found: Sequence[Compared]) -> tuple[list[str], int]:
    """Goals and values of pairs of placements whose order is not the predicted one, of those whose predicted values
    differ by more than 10 %; and how many pairs these are."""
    wrong, pairs = list[str](), 0
    for a, b in itertools.combinations(found, 2):
        for goal in a.values:
            (expected_a, was_a), (expected_b, was_b) = a.values[goal], b.values[goal]
            if max(expected_a, expected_b) <= (1 + _ALIKE) * min(expected_a, expected_b):
                continue
            pairs += 1
            if (expected_a < expected_b) != (was_a < was_b):
                wrong.append(f"{goal}: {expected_a:.3f} and {expected_b:.3f} predicted, {was_a:.3f} and {was_b:.3f} s")
    return wrong, pairs
