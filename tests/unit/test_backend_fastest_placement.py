"""The fastest placement of a model: figures that are stored, measured, or missing, and what then fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luce.backend import measured_devices
from luce.backend.draft_load import DraftingDevice, DraftLoad
from luce.backend.expert_placement import ExpertRequest
from luce.backend.fastest_placement import (
    Goal,
    choose,
    known_plan,
    nothing_fits,
    placement_problem,
    predicted_placement,
)
from luce.backend.fastest_placement import (
    fastest_placement as fastest_placement_of,
)
from luce.backend.measured_devices import ModelOnDevices, measured
from luce.backend.model_work import model_work, weight_tensors
from luce.backend.placement import plan_shards
from luce.backend.serving_options import Claim, ServingOptions
from luce.config.resolve import resolve
from luce.errors import DeviceError, OutOfMemoryError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.planner.draft_time import DraftWork
from luce.planner.search import best_placement
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.device import Device
from tests.support.reference import Reference
from tests.support.sized_device import GIB, Sized

MODEL = Reference("qwen3-a-F32").path
SPEEDS = {"cuda:0": 1.0, "cuda:1": 0.01, "cuda:2": 0.9}


def profile(device: Device) -> DeviceProfile:
    speed = SPEEDS.get(str(device.name), 0.1)
    figures = FormatProfile(1e9 * speed, {1: 1e9 * speed, 512: 1e10 * speed}, None, 0.1, False)
    return DeviceProfile(str(device.name), "x", 0.0, 1e-5, 1e-6, LinkProfile(1e-6, 1e9), {"F32": figures})


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, DeviceProfile]:
    """The profiles that are stored, by device; measuring makes those of `profile`."""
    known: dict[str, DeviceProfile] = {}

    def measure(device: Device, types: Any, **how: Any) -> DeviceProfile:
        how["how"].on_figure(str(device.name))
        return profile(device)

    monkeypatch.setattr(measured_devices, "stored_profile", lambda device, types, **how: known.get(str(device.name)))
    monkeypatch.setattr(measured_devices, "profile_of", measure)
    return known


@pytest.fixture
def model() -> Iterator[Any]:
    with open_gguf(MODEL) as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))

        def made(*devices: Device, **options: Any) -> ModelOnDevices:
            return ModelOnDevices(file, spec, devices, ServingOptions(context=256, chunk=64, **options))

        yield made


def planned_alone(model: Any) -> int:
    """Bytes that the model takes on one device."""
    on = model(Sized("cuda:0", GIB))
    return plan_shards(on.file, on.spec, on.devices, on.options)[0].needed


def silent(figure: str) -> None:
    """For callers that look at no progress."""


def test_a_slow_device_is_left_out_and_the_order_is_changed(stored: dict[str, DeviceProfile], model: Any) -> None:
    both = model(Sized("cuda:1", GIB), Sized("cuda:0", GIB))
    found = choose(both, Goal("decode"), 10, silent)
    assert (found.devices, found.layers) == (("cuda:0",), (range(len(both.spec.layers)),))
    assert found.plan.facts["left_out"] == ["cuda:1"]
    assert "left out: cuda:1" in found.plan.text
    pinned = choose(both, Goal("decode", pinned=True), 10, silent)
    assert pinned.devices == ("cuda:1", "cuda:0")
    # As few layers as possible on the slow one.
    assert pinned.layers[0] == range(1)


def test_what_is_found_fits_as_it_is_loaded(stored: dict[str, DeviceProfile], model: Any) -> None:
    whole = planned_alone(model)
    # Within a few bytes, a device holds a layer less or more.
    for free in range(int(whole * 0.6), int(whole * 0.7), 1009):
        both = model(Sized("cuda:0", free), Sized("cuda:2", GIB))
        found = choose(both, Goal("decode", pinned=True), 10, silent)
        options = ServingOptions(context=256, chunk=64, layers=found.layers)
        assert all(shard.fits for shard in plan_shards(both.file, both.spec, both.devices, options))


@pytest.mark.parametrize("first", [0, 1])
def test_keys_and_values_count_as_each_device_holds_them(
    first: int, stored: dict[str, DeviceProfile], model: Any
) -> None:
    class Halves(Sized):
        kv_dtype = np.dtype(np.float16)

    devices: list[Device] = [Halves("cuda:0", GIB), Sized("cuda:2", GIB)]
    both = model(*devices[first:], *devices[:first])
    found = choose(both, Goal("decode", pinned=True), 10, silent)
    options = ServingOptions(context=256, chunk=64, layers=found.layers)
    shards = plan_shards(both.file, both.spec, both.devices, options)
    states = {stage["device"]: stage["state"] for stage in found.plan.facts["stages"]}
    assert states == {shard.device: shard.state for shard in shards}


@pytest.mark.parametrize("objective", ["decode", "prompt", "balanced"])
@pytest.mark.parametrize("names", ["cuda:0,cuda:1", "cuda:1,cuda:0", "cuda:0,cuda:2", "cuda:2,cuda:1,cuda:0"])
def test_it_is_never_predicted_worse_than_the_placement_by_memory(
    objective: Any, names: str, stored: dict[str, DeviceProfile], model: Any
) -> None:
    whole = planned_alone(model)
    for free in (GIB, int(whole * 0.75)):
        on = model(*(Sized(name, free) for name in names.split(",")))
        found = choose(on, Goal(objective), 10, silent)
        today = predicted_placement(on, found.problem)
        assert today is not None
        assert found.plan.prediction.value <= today.value * 1.03


def test_claims_and_margins_are_left_free(stored: dict[str, DeviceProfile], model: Any) -> None:
    device = Sized("cuda:0", GIB)
    assert choose(model(device), Goal("decode"), 10, silent).devices == ("cuda:0",)
    with pytest.raises(OutOfMemoryError, match="no placement fits"):
        choose(model(device, claims=(Claim(device, GIB - 1000),)), Goal("decode"), 10, silent)
    device.margin = GIB - 1000
    with pytest.raises(OutOfMemoryError, match="no placement fits"):
        choose(model(device), Goal("decode"), 10, silent)


def test_devices_without_figures_are_measured_in_turn(stored: dict[str, DeviceProfile], model: Any) -> None:
    devices = Sized("cuda:0", GIB), Sized("cuda:1", GIB)
    stored["cuda:1"] = profile(devices[1])
    told: list[str] = []
    assert set(measured(model(*devices), on_figure=told.append).profiles) == {"cuda:0", "cuda:1"}
    assert told == ["cuda:0"]
    told.clear()
    measured(model(*devices), anew=True, on_figure=told.append)
    assert told == ["cuda:0", "cuda:1"]
    with pytest.raises(DeviceError, match=r"cuda:0: not measured within 0 s \(--measure-budget\)"):
        measured(model(*devices), seconds=0)
    stored["cuda:0"] = profile(devices[0])
    assert measured(model(*devices), seconds=0).profiles.keys() == {"cuda:0", "cuda:1"}


def test_a_placement_is_predicted_where_all_devices_have_figures(stored: dict[str, DeviceProfile], model: Any) -> None:
    devices = Sized("cuda:0", GIB), Sized("cuda:1", GIB)
    goal = Goal("balanced")
    assert known_plan(model(*devices), goal) is None
    stored.update({str(device.name): profile(device) for device in devices})
    plan = known_plan(model(*devices), goal)
    assert plan is not None
    on = model(*devices)
    planned = plan_shards(on.file, on.spec, on.devices, on.options)
    assert [shard.shard.layers for shard in plan.prediction.shards] == [shard.layers for shard in planned]
    assert plan.facts["profiles"]["cuda:0"]["noisy"] == []
    assert known_plan(model(Sized("cuda:0", 1000)), goal) is None


@pytest.mark.parametrize(
    ("given", "objective"),
    [
        ({}, None),
        ({"target_devices": "auto"}, "balanced"),
        ({"target_devices": "cuda:0,cuda:1"}, None),
        ({"target_devices": "auto", "optimize": "memory"}, None),
        ({"target_devices": "cuda:0,cuda:1", "optimize": "decode"}, "decode"),
        ({"target_devices": "auto", "target_layer_split": "1,2"}, None),
        ({"target_devices": "auto", "kvflash": "512"}, None),
    ],
)
def test_the_goal_of_settings(given: dict[str, str], objective: str | None) -> None:
    goal = Goal.of(resolve(given, env={}))
    assert (None if goal is None else goal.objective) == objective


class TestExpertsOnTheCpu:
    """A model of experts on invented devices: a fast one that cannot hold all, and a slow one beside the CPU."""

    @pytest.fixture
    def mixture(self) -> Iterator[Any]:
        with open_gguf(Reference("qwen35moe-b-Q4_K_M").path) as file:
            spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))

            def made(*devices: Device, **options: Any) -> ModelOnDevices:
                return ModelOnDevices(file, spec, devices, ServingOptions(context=256, chunk=64, **options))

            yield made

    @pytest.fixture(autouse=True)
    def figures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def figures_of(device: Device, types: Any, **how: Any) -> DeviceProfile:
            speed = SPEEDS.get(str(device.name), 0.1)
            one = FormatProfile(1e9 * speed, {1: 1e9 * speed, 512: 1e10 * speed}, None, 0.1, False, {1: 0.5, 16: 0.5})
            formats = {type.name: one for type in types}
            return DeviceProfile(str(device.name), "x", 0.0, 1e-5, 1e-6, LinkProfile(1e-6, 1e9), formats)

        monkeypatch.setattr(measured_devices, "stored_profile", figures_of)

    def test_the_search_leaves_the_fewest_experts_to_a_cpu_that_holds_no_layers(self, mixture: Any) -> None:
        whole = mixture(Sized("cuda:0", GIB))
        (shard,) = plan_shards(whole.file, whole.spec, whole.devices, whole.options)
        auto = ExpertRequest(Sized("cpu:0", GIB), auto=True)
        for share, least in ((1.2, 0), (0.8, 1), (0.65, 2)):
            model = mixture(Sized("cuda:0", int(shard.needed * share)), experts=auto)
            found = choose(model, Goal("decode"), 10, silent)
            assert found.devices == ("cuda:0",) and len(found.offloaded) >= least
            assert found.offloaded == tuple(range(4))[4 - len(found.offloaded) :]
            assert [stage["offloaded"] for stage in found.plan.facts["stages"]] == [len(found.offloaded)]
            options = replace(model.options, experts=replace(auto, layers=frozenset(found.offloaded), auto=False))
            assert all(part.fits for part in plan_shards(model.file, model.spec, model.devices, options))

    def test_the_host_has_to_hold_them(self, mixture: Any) -> None:
        whole = mixture(Sized("cuda:0", GIB))
        (shard,) = plan_shards(whole.file, whole.spec, whole.devices, whole.options)
        device = Sized("cuda:0", int(shard.needed * 0.65))
        for free, fits in ((shard.experts * 2, True), (1000, False)):
            model = mixture(device, experts=ExpertRequest(Sized("cpu:0", free), auto=True))
            problem = placement_problem(model, measured(model), Goal("decode"))
            assert (best_placement(problem) is not None) == fits

    def test_what_is_found_fits_the_host_as_it_is_loaded(self, mixture: Any) -> None:
        whole = mixture(Sized("cuda:0", GIB))
        (shard,) = plan_shards(whole.file, whole.spec, whole.devices, whole.options)
        gpus, one = (Sized("cuda:0", GIB), Sized("cuda:2", GIB)), shard.experts // 4
        unlike = 0
        # The plan also counts the pinned memory between the GPUs.
        for free in (*range(2 * one, 3 * one, one // 8), 8 * one):
            cpu = Sized("cpu:0", free)
            cpu.margin = 0
            model = mixture(*gpus, experts=ExpertRequest(cpu, frozenset((2, 3))))
            profiles = measured(model)
            problem = placement_problem(model, profiles, Goal("decode", pinned=True))
            found = fastest_placement_of(model, problem, profiles)
            unlike += (found is None) != (best_placement(problem) is None)
            if found is not None:
                options = replace(model.options, layers=found.layers)
                assert all(part.fits for part in plan_shards(model.file, model.spec, gpus, options))
        assert found is not None and unlike > 0

    def test_a_fast_device_with_its_experts_beside_it_wins_over_a_slow_one(self, mixture: Any) -> None:
        whole = mixture(Sized("cuda:0", GIB))
        (shard,) = plan_shards(whole.file, whole.spec, whole.devices, whole.options)
        devices = Sized("cuda:0", int(shard.needed * 0.8)), Sized("cuda:1", GIB)
        auto = ExpertRequest(Sized("cpu:0", GIB), auto=True)
        assert choose(mixture(*devices, experts=auto), Goal("decode"), 10, silent).devices == ("cuda:0",)
        assert "cuda:1" in choose(mixture(*devices), Goal("decode"), 10, silent).devices

    def test_numbers_of_layers_and_given_layers_are_predicted(self, mixture: Any) -> None:
        cpu, goal = Sized("cpu:0", GIB), Goal("decode")
        rates = []
        for layers in ((), (3,), (2, 3), (0, 1, 2, 3)):
            model = mixture(Sized("cuda:0", GIB), experts=ExpertRequest(cpu, frozenset(layers)))
            plan = known_plan(model, goal)
            assert plan is not None and plan.prediction.shards[0].shard.offloaded == len(layers)
            rates.append(plan.prediction.decode_rate)
            assert len(choose(model, goal, 10, silent).offloaded) == len(layers)
        assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]
        ranges = mixture(Sized("cuda:0", GIB), experts=ExpertRequest(cpu, frozenset((0, 2))))
        plan = known_plan(ranges, goal)
        assert plan is not None and plan.prediction.decode_rate == pytest.approx(rates[2])

    def test_the_message_names_the_setting(self, mixture: Any) -> None:
        whole = mixture(Sized("cuda:0", GIB))
        (shard,) = plan_shards(whole.file, whole.spec, whole.devices, whole.options)
        one = shard.experts // 4
        for memory, fits in ((one + one // 10, True), (one // 2, False)):
            devices = Sized("cuda:0", shard.needed - one // 2), Sized("cpu:0", memory)
            for device in devices:
                device.margin = 0
            model = mixture(*devices)
            problem = placement_problem(model, measured(model), Goal("decode"))
            assert best_placement(problem) is None
            assert ("; --experts-on auto would fit" in nothing_fits(problem)) == fits


def test_layers_of_experts_by_name_are_no_goal() -> None:
    auto = {"target_devices": "auto"}
    assert Goal.of(resolve({**auto, "experts_on": "auto"}, spell=str)) is not None
    assert Goal.of(resolve({**auto, "experts_on": "2"}, spell=str)) is not None
    assert Goal.of(resolve({**auto, "experts_on": "1-2"}, spell=str)) is None


def drafted(on: ModelOnDevices, device: Device | None, **fields: Any) -> ModelOnDevices:
    """Drafting by a model like the first layer, in 5 passes."""
    work = model_work(on.file, on.spec, Sized("cuda:0", GIB), on.options)
    one = DraftWork(work.layers[:1], work.head, 5, 1, 100)
    tensors = tuple(weight_tensors(on.file, on.spec))
    load = DraftLoad(6, on=None if device is None else DraftingDevice(device, 1234, one, tensors))
    return replace(on, draft=replace(load, **fields))


def test_steps_with_drafts_have_their_rows_tokens_and_time(stored: dict[str, DeviceProfile], model: Any) -> None:
    device = Sized("cuda:0", GIB)
    plain, on = model(device), drafted(model(device), device)
    stored["cuda:0"] = profile(device)
    known = measured(on)
    problem = placement_problem(on, known, Goal("decode", prompt=50))
    draft, load = problem.drafting, on.draft
    assert draft is not None and load is not None and load.on is not None
    assert (problem.load.rows, draft.tokens, draft.measured) == (6, 1.0, False)
    assert (draft.device, draft.bytes) == ("cuda:0", 1234)
    layer = load.on.work.layers[0]
    size, seen = layer.bytes + load.on.work.head.bytes, layer.kv * 50
    # cuda:0 reads 1e9 B/s; a launch takes 1 us, a step 10 us.
    expected = 5 * (1e-5 + (size + seen) / 1e9 + 1e-6 * (layer.launches + load.on.work.head.launches))
    assert draft.seconds == pytest.approx(expected)
    assert placement_problem(plain, known, Goal("decode")).drafting is None
    facts = choose(drafted(model(device), device, tokens=2.5), Goal("decode", prompt=50), 10, silent).plan.facts
    assert facts["draft"] == {
        "device": "cuda:0",
        "bytes": 1234,
        "rows": 6,
        "tokens_per_step": 2.5,
        "measured": True,
        "decode_s": pytest.approx(draft.seconds),
    }
    # A drafter that looks tokens up takes no time of a device.
    facts = choose(drafted(model(device), None), Goal("decode"), 10, silent).plan.facts
    assert (facts["draft"]["device"], facts["draft"]["decode_s"]) == (None, 0.0)


def test_a_drafter_on_a_device_of_its_own_is_measured_and_holds_no_layers(
    stored: dict[str, DeviceProfile], model: Any
) -> None:
    target, own = Sized("cuda:2", GIB), Sized("cuda:0", GIB)
    on = drafted(model(target), own)
    found = choose(on, Goal("decode"), 10, silent)
    assert found.devices == ("cuda:2",)
    assert [device.name for device in found.problem.devices] == ["cuda:2"]
    assert found.problem.expert_cpus == ()
    assert found.problem.drafting is not None
    assert found.problem.drafting.seconds
    # Without its figures a running server predicts the rest.
    stored["cuda:2"] = profile(target)
    plan = known_plan(on, Goal("decode"))
    assert plan is not None
    assert plan.facts["draft"]["decode_s"] is None
    stored["cuda:0"] = profile(own)
    plan = known_plan(on, Goal("decode"))
    assert plan is not None
    assert plan.facts["draft"]["decode_s"] == found.problem.drafting.seconds
