"""Pipelines of simulated devices against predictions: each shard takes the time that is predicted for it, and the whole
takes what is predicted of the whole.

Time passes only where a test waits, so what a test says does not depend on the machine; the threads, links and pieces
are those of the backend that serves. tools/check_predictions.py has the same in real time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType

import luce
from luce.backend import measured_devices
from luce.backend.expert_placement import ExpertRequest, requested_layers
from luce.backend.fastest_placement import Goal, known_plan
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.measured_devices import ModelOnDevices
from luce.backend.serving_options import ServingOptions
from luce.bench.measure import Stepper
from luce.errors import DeviceError, OutOfMemoryError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.planner.problem import Objective
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.simulated import SimulatedDevice
from luce.runtime.simulated_file import SimulatedMachine
from luce.runtime.step import MadeMasks, RowMasks
from tests.support.drive import Driver
from tests.support.published import PUBLISHED
from tests.support.reference import Reference
from tests.support.simulated import VirtualClock, card, machine, write
from tools.simulated_pipelines import (
    PIECES,
    PROMPT,
    compare,
    placed,
    random_layers,
    random_machine,
    ranked,
    rivals,
    scarce,
)

REFERENCE = Reference("qwen3-a-F32")
#: operations per second of attention which then takes no time, so that all pieces of a prompt take the same
AT_ONCE = 1e18
#: what is left of a share then
EXACT = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GGUFFile, ModelSpec]]:
    """A model of 28 layers: the header of its file."""
    published = next(each for each in PUBLISHED if each.name.startswith("Qwen2.5"))
    with open_gguf(published.write(tmp_path_factory.mktemp("model"))) as file:
        yield file, read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))


def changed(whole: SimulatedMachine, **figures: Any) -> SimulatedMachine:
    devices = tuple(msgspec.structs.replace(device, **figures) for device in whole.devices)
    return msgspec.structs.replace(whole, devices=devices)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_placements_take_what_is_predicted_and_rank_as_predicted(
    model: tuple[GGUFFile, ModelSpec], devices: int
) -> None:
    rng = random.Random(10 + devices)
    whole = random_machine(rng, *model, devices)
    found = []
    for layers in random_layers(rng, *model, whole, 5):
        compared = compare(*model, whole, layers, VirtualClock(), runs=1)
        assert all(PIECES[0] <= shard.piece.total <= PIECES[1] for shard in compared.prediction.shards)
        assert compared.decode == pytest.approx(compared.prediction.decode, rel=EXACT)
        # Later pieces of a prompt see more positions; the prediction has the mean of them.
        assert compared.off < 0.02
        found.append(compared)
    wrong, pairs = ranked(found)
    assert wrong == [] and pairs > 0


@pytest.mark.parametrize("goal", ["decode", "prompt", "balanced"])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_goal_is_never_slower_than_the_placement_by_memory(
    model: tuple[GGUFFile, ModelSpec], devices: int, goal: Objective
) -> None:
    rng, gained = random.Random(20 + devices), 0
    for _ in range(2):
        whole = random_machine(rng, *model, devices)
        for own in (whole, scarce(rng, *model, whole)):
            worse_by = rivals(*model, own, goal, VirtualClock(), runs=1).worse_by(goal)
            assert worse_by <= 0.03
            gained += worse_by < -0.03
    assert gained


@pytest.mark.parametrize("links", [True, False], ids=["direct", "by the host"])
def test_a_prompt_of_equal_pieces_takes_exactly_what_is_predicted(
    model: tuple[GGUFFile, ModelSpec], links: bool
) -> None:
    whole = changed(random_machine(random.Random(5), *model, 3), attention=AT_ONCE, state_read=AT_ONCE)
    whole = whole if links else msgspec.structs.replace(whole, links=())
    layers = [range(9), range(9, 20), range(20, 28)]
    compared = compare(*model, whole, layers, VirtualClock(), runs=1)
    assert compared.prediction.pieces == 8
    if links:
        assert compared.prompt == pytest.approx(compared.prediction.prompt, rel=EXACT)
    # By the host, the copy to it and the copy from it are two parts of the pipeline, of which the slowest counts.
    assert compared.prompt == pytest.approx(compared.prediction.prompt, rel=2e-3)
    assert compared.decode == pytest.approx(compared.prediction.decode, rel=EXACT)


def test_a_slow_link_sets_the_pace_of_a_prompt(model: tuple[GGUFFile, ModelSpec]) -> None:
    whole = changed(random_machine(random.Random(6), *model, 2), attention=AT_ONCE)
    slow = [msgspec.structs.replace(link, bandwidth=5e7) for link in whole.links]
    whole = msgspec.structs.replace(whole, links=tuple(slow))
    compared = compare(*model, whole, [range(14), range(14, 28)], VirtualClock(), runs=1)
    assert compared.prediction.slowest == "sim:0 > sim:1"
    assert compared.prompt == pytest.approx(compared.prediction.prompt, rel=EXACT)


def test_weights_that_do_not_stay_unpacked_take_time(model: tuple[GGUFFile, ModelSpec]) -> None:
    whole = changed(random_machine(random.Random(7), *model, 2), attention=AT_ONCE, unpack=1e12, free=6 << 30)
    layers = [range(12), range(12, 28)]
    compared = compare(*model, whole, layers, VirtualClock(), runs=1)
    assert all(shard.piece.unpacking > 0 for shard in compared.prediction.shards)
    assert compared.prompt == pytest.approx(compared.prediction.prompt, rel=EXACT)


def test_each_shard_and_link_is_asked_for_its_own_time(model: tuple[GGUFFile, ModelSpec]) -> None:
    whole = random_machine(random.Random(8), *model, 4)
    layers = [range(5), range(5, 13), range(13, 18), range(18, 28)]
    on, _, prediction = placed(*model, whole, layers, VirtualClock())
    backend = LayerSplitBackend(*model, on.devices, on.options)
    stepper = Stepper(backend, backend.options.chunk)
    stepper.move_to(0, PROMPT)
    stepper.decode([0])
    times = backend.times()
    assert [time.work.total for time in times] == pytest.approx([shard.decode.total for shard in prediction.shards])
    copies = [time.copies.total for time in times if time.copies is not None]
    assert copies == pytest.approx([link.decode for link in prediction.links])
    backend.close()


def on_machine(devices: Sequence[SimulatedDevice], **options: Any) -> LayerSplitBackend:
    file = open_gguf(REFERENCE.path)
    return LayerSplitBackend(file, REFERENCE.spec, devices, ServingOptions(slots=4, context=256, **options))


def test_memory_is_taken_by_a_load_and_given_back() -> None:
    devices = [SimulatedDevice(machine(card(1 << 24), card(1 << 24)), index, clock=VirtualClock()) for index in (0, 1)]
    backend = on_machine(devices)
    for device, part in zip(devices, backend.devices, strict=True):
        assert part.device == str(device.name)
        assert device.memory().free == (1 << 24) - part.weights - part.state < device.memory().total
    backend.close()
    backend.close()
    assert [device.memory().free for device in devices] == [1 << 24, 1 << 24]
    with pytest.raises(OutOfMemoryError, match=r"shard 0 \(sim:0\): layers 0\.\.\d+ need"):
        on_machine([SimulatedDevice(machine(card(1000)), 0)])


def test_layers_that_leave_experts_to_a_cpu_need_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_devices, "stored_profile", lambda *device, **how: None)
    reference = Reference("laguna-a-F32")
    experts = ExpertRequest(HostDevice(1), frozenset({2}))
    device = SimulatedDevice(machine(card()), 0)
    with open_gguf(reference.path) as file, pytest.raises(DeviceError, match="sim:0: leaves experts to cpu:1 without"):
        LayerSplitBackend(file, reference.spec, [device], ServingOptions(context=256, experts=experts))
    assert device.memory().free == device.memory().total


def test_prompts_in_int8_have_no_figures() -> None:
    with pytest.raises(DeviceError, match="sim:0: --prompt-precision int8: simulated devices have no figures for it"):
        on_machine([SimulatedDevice(machine(card()), 0)], prompt_precision="int8")


def slow_cpu(device: Device, types: Iterable[GGMLQuantizationType], **how: Any) -> DeviceProfile:
    """The figures of a CPU."""
    figures = FormatProfile(1e8, {1: 1e9}, None, 0.0, False, {1: 1.0})
    formats = {type.name: figures for type in types}
    return DeviceProfile(str(device.name), "slow", 0.0, 1e-3, 1e-4, LinkProfile(1e-6, 1e10), formats, routing=1e-4)


def test_experts_on_a_cpu_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_devices, "stored_profile", slow_cpu)
    reference, clock = Reference("laguna-a-F32"), VirtualClock()
    device, seconds = SimulatedDevice(machine(card()), 0, clock=clock), []
    for layers in ((), requested_layers("2", reference.spec), requested_layers("cpu", reference.spec)):
        experts = ExpertRequest(HostDevice(1), frozenset(layers)) if layers else None
        options = ServingOptions(context=256, experts=experts)
        with open_gguf(reference.path) as file:
            plan = known_plan(ModelOnDevices(file, reference.spec, [device], options), Goal("decode", prompt=64))
            assert plan is not None and plan.prediction.shards[0].shard.offloaded == len(layers)
            with contextlib.closing(LayerSplitBackend(file, reference.spec, [device], options)) as backend:
                stepper = Stepper(backend, 64)
                stepper.move_to(0, 64)
                begun = clock.now()
                stepper.decode([0])
                seconds.append(clock.now() - begun)
        assert seconds[-1] == pytest.approx(plan.prediction.decode, rel=1e-9)
    assert seconds[0] < seconds[1] < seconds[2]


def test_pages_that_are_ranked_count_alike(simulated: Path) -> None:
    settings = {"target_devices": "sim:0,sim:1", "kvflash": "512", "max_ctx": 2048}
    with luce.load(REFERENCE.path, **settings) as model:
        reply = model.generate(list(range(3, 300)) * 4, max_tokens=70, ignore_eos=True, temperature=0)
        assert [token.id for token in reply] == [REFERENCE.spec.vocab // 2] * 70
        paging = model.engine.stats().paging
        assert paging is not None and paging.swapped_out > 0 and paging.rescores > 0


def test_replies_keep_to_masks() -> None:
    backend = on_machine([SimulatedDevice(machine(card()), 0, clock=VirtualClock())])
    driver, vocab = Driver(backend), REFERENCE.spec.vocab
    step = driver.step((driver.start(), np.arange(3, dtype=np.int32)))
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    words[0, 1] = 0b1010
    masks = MadeMasks(RowMasks(np.array([1], np.int32), words))
    wanted = np.array([True, False, True])
    step = replace(step, masks=masks, needs_logits=wanted, needs_candidates=~wanted)
    output = backend.forward(step)
    assert output.ids.tolist() == [vocab // 2, 33, vocab // 2]
    assert output.logits.shape == (2, vocab) and output.logits.argmax(axis=1).tolist() == [vocab // 2] * 2
    assert output.candidates is not None
    assert output.candidates.ids[0, :2].tolist() == [33, 35]
    assert np.isneginf(output.candidates.logits[0, 2:]).all()
    backend.close()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder of a process with two simulated devices."""
    monkeypatch.setenv("LUCE_SIM_DEVICES", str(write(tmp_path / "sim.json", card(), card())))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_nothing_that_no_device_computed_is_kept(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A prefix or a drafter's success that is kept here would be found by a server that computes.
    kept: list[Path] = []
    monkeypatch.setattr("luce.assembly.keeping", lambda path: SimpleNamespace(add=kept.append(path)))
    settings = {"target_devices": "sim:0,sim:1", "kv_cache_dir": "auto", "draft": "ngram", "max_ctx": 512}
    with luce.load(REFERENCE.path, **settings) as model:
        for _ in range(2):
            reply = model.generate(list(range(3, 200)), max_tokens=90, ignore_eos=True, temperature=0)
            assert [token.id for token in reply] == [REFERENCE.spec.vocab // 2] * 90
        stats = model.engine.stats()
        assert stats.cache.hits == 1
        assert stats.draft is not None and stats.draft.proposed > 0
    assert [path for path in simulated.rglob("*") if path.is_file()] == kept == []
