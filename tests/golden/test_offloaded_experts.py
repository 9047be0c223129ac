"""Routed experts on another device than their layers: the same bits as beside them where both are CPUs, and the limits
of int8 products where the layers are on a GPU's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

import luce
from luce.backend import measured_devices
from luce.backend.expert_placement import ExpertBytes, ExpertRequest, requested_layers
from luce.backend.placement import RESERVE, plan_shards
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from luce.runtime.simulated import SimulatedDevice
from luce.shard.local import LocalShard
from tests.support.capturing import CapturingDevice, SharingDevice
from tests.support.daemons import with_flags
from tests.support.drive import Driver
from tests.support.emulated import EmulatedDevice
from tests.support.golden_checks import (
    check_greedy_tokens,
    check_logits_in_chunks,
    check_replayed,
    typical_error,
)
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, check_logits, references
from tests.support.simulated import card, machine, write

MIXTURES = [r for r in references() if any(r.spec.mixture(layer) for layer in range(len(r.spec.layers)))]


def request(reference: Reference, device: Device, layers: str = "cpu") -> ExpertRequest:
    return ExpertRequest(device, requested_layers(layers, reference.spec))


def logits(driver: Driver, reference: Reference) -> NDArray[np.float32]:
    """A prompt of many rows, one of few, a row beside another sequence, and a row behind a restore."""
    long, short = reference.expected["prompt_long"][:40], reference.expected["prompt_17"]
    first, second, third = driver.start(), driver.start(), driver.start()
    parts = [driver.feed((first, long))[0], driver.feed((second, short))[0]]
    parts += driver.feed((first, short[:1]), (second, short[1:3]))
    driver.restore(third, driver.save(first))
    parts += driver.feed((third, short[3:4]))
    return np.concatenate(parts)


def test_the_families_with_experts() -> None:
    found = {reference.spec.family for reference in MIXTURES}
    assert found >= {"qwen35moe", "qwen3moe", "gemma4", "gpt-oss", "deepseek2", "olmoe", "ernie4_5-moe", "glm4moe"}
    assert found >= {"granitemoe", "laguna", "lfm2moe", "minimax-m2", "qwen3next"}


@pytest.mark.parametrize("reference", MIXTURES, ids=lambda r: r.name)
def test_float32_bits_are_those_of_one_cpu(reference: Reference, make_driver: MakeDriver) -> None:
    whole, offloaded = (
        make_driver(reference, [HostDevice(0)], experts=experts)
        for experts in (None, request(reference, HostDevice(1)))
    )
    (part,), (beside,) = offloaded.backend.devices, whole.backend.devices
    assert part.offloaded_bytes > 0 and part.weights + part.offloaded_bytes == beside.weights
    np.testing.assert_array_equal(logits(offloaded, reference), logits(whole, reference))


@pytest.mark.parametrize("name", ["qwen35moe-a-Q4_0", "laguna-b-Q4_K_M"])
@pytest.mark.parametrize("layers", ["cpu", "1"])
def test_packed_bits_are_those_of_one_cpu(name: str, layers: str, make_driver: MakeDriver) -> None:
    reference = Reference(name)
    experts = request(reference, CpuDevice(1), layers)
    whole, split, offloaded = (
        logits(make_driver(reference, devices, experts=own), reference)
        for devices, own in (
            ([CpuDevice(0)], None),
            ([CpuDevice(0), CpuDevice(2)], experts),
            ([CpuDevice(0)], experts),
        )
    )
    np.testing.assert_array_equal(split, whole)
    np.testing.assert_array_equal(offloaded, whole)


# A shared MLP with a gate; biases, and no shared MLP; a dense MLP beside the experts; groups of experts.
@pytest.mark.emulated
@pytest.mark.parametrize("name", ["qwen35moe-a-Q4_0", "gptoss-a-F32", "gemma4-moe-F32", "deepseek2-a-F32"])
def test_layers_on_a_gpu(name: str, make_driver: MakeDriver) -> None:
    reference = Reference(name)
    driver = make_driver(reference, [EmulatedDevice()], experts=request(reference, CpuDevice()))
    rows = {}
    for prompt in ("1", "17"):
        (rows[f"logits_{prompt}"],) = driver.feed((driver.start(), reference.expected[f"prompt_{prompt}"]))
    check_logits(reference, reference.kind(1), rows)


@pytest.mark.emulated
@pytest.mark.parametrize("device", [CapturingDevice, SharingDevice])
def test_replayed_steps_stop_at_the_experts(device: type[CapturingDevice], make_driver: MakeDriver) -> None:
    reference, capturing = Reference("qwen35moe-a-Q4_0"), device()
    drivers = (
        make_driver(reference, [own], experts=request(reference, CpuDevice())) for own in (capturing, EmulatedDevice())
    )
    check_replayed(reference, *drivers)
    assert capturing.captured == 4 and capturing.launched == 8


def test_drafts_the_prefix_cache_and_kvflash_change_nothing() -> None:
    reference = Reference("laguna-a-F32")
    prompt = np.resize(reference.expected["prompt_long"], 700).tolist()
    common = {"max_ctx": 1024, "kvflash": "512", "draft": "ngram", "kv_cache_dir": "off", "cpu_weights": "float32"}
    replies = []
    for place in ("device", "cpu"):
        with luce.load(reference.path, target_device="cpu:0", experts_on=place, **common) as model:
            for _ in range(2):
                generation = model.generate(prompt, max_tokens=24, ignore_eos=True, temperature=0)
                replies.append([token.id for token in generation])
            stats = model.engine.stats()
            assert stats.cache.hits == 1
            assert stats.paging is not None and stats.paging.swapped_out > 0
            assert stats.draft is not None and stats.draft.proposed > 0
            assert bool(model.placement[0]["experts_on_cpu"]) == (place == "cpu")
    assert replies[0] == replies[1] == replies[2] == replies[3]


def test_devices_of_a_daemon_wait_for_no_flags(tmp_path: Path) -> None:
    reference = Reference("qwen35moe-a-F32")
    prompt, greedy = reference.expected["prompt_17"].tolist(), reference.expected["greedy_17"][:6].tolist()
    where = {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": with_flags(tmp_path / "python")}
    for place, waits in (("device", True), ("cpu", False)):
        settings = {**where, "max_ctx": 256, "kv_cache_dir": "off", "cpu_weights": "float32", "experts_on": place}
        with luce.load(reference.path, **settings) as model:
            assert [daemon.gpu_waits for daemon in model.daemons()] == [waits]
            generation = model.generate(prompt, max_tokens=6, ignore_eos=True, temperature=0)
            assert [token.id for token in generation] == greedy


@pytest.mark.gpu
@pytest.mark.parametrize("reference", MIXTURES, ids=lambda r: r.name)
def test_layers_on_this_gpu(reference: Reference, make_driver: MakeDriver, gpu: Device) -> None:
    driver = make_driver(reference, [gpu], slots=8, experts=request(reference, CpuDevice()))
    prompts = check_logits_in_chunks(reference, driver, reference.kind(7), 7)
    check_greedy_tokens(reference, driver, prompts, typical_error(reference, driver))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen35moe-b-Q4_K_M", "gptoss-a-F32", "gemma4-moe-F32"])
def test_replayed_steps_on_this_gpu(name: str, make_driver: MakeDriver, gpu: Device) -> None:
    reference = Reference(name)
    drivers = []
    for captures in (True, False):
        device = GpuDevice("cuda" if gpu.name.kind == "cuda" else "hip", gpu.name.index)
        device.captures = captures
        drivers.append(make_driver(reference, [device], experts=request(reference, CpuDevice())))
    check_replayed(reference, *drivers)
    (shard,) = drivers[0].backend.shards
    assert isinstance(shard, LocalShard) and shard.replayed > 0


def card_of(free: int, cpu: Device) -> SimulatedDevice:
    """A simulated card with so many bytes, for which a CPU computes."""
    return SimulatedDevice(machine(card(free, computes=True)), 0, cpu)


def room(reference: Reference, cpu: Device, layers: int) -> int:
    """Bytes of a card that holds the model with the experts of so many of its layers."""
    with open_gguf(reference.path) as file:
        options = ServingOptions(slots=4, context=256)
        (whole,) = plan_shards(file, reference.spec, [card_of(1 << 40, cpu)], options)
        away = sorted(requested_layers("cpu", reference.spec))[layers:]
        placed = ExpertBytes(file, reference.spec, None).placed(away, cpu)
    return int((whole.needed - placed) / (1 - RESERVE)) + 1


# A MoE model's experts by F32 on NumPy, and by K quants on compiled kernels.
@pytest.mark.parametrize("name", ["gemma4-moe-F32", "laguna-a-F32", "laguna-b-Q4_K_M"])
def test_a_simulated_card_leaves_out_what_it_cannot_hold(name: str, make_driver: MakeDriver) -> None:
    reference = Reference(name)
    made: Callable[[int], Device] = CpuDevice if "Q4" in name else HostDevice
    present = sorted(requested_layers("cpu", reference.spec))
    found = {}
    for kept in (len(present), 1, 0):
        device = card_of(room(reference, made(0), kept), made(0))
        driver = make_driver(reference, [device], experts=ExpertRequest(made(1), auto=True))
        (part,) = driver.backend.devices
        assert part.device == "sim:0" and list(part.offloaded) == present[kept:]
        found[kept] = logits(driver, reference)
    whole = logits(make_driver(reference, [made(0)]), reference)
    for kept, rows in found.items():
        np.testing.assert_array_equal(rows, whole, err_msg=f"experts of {kept} layers on the card")


def slow_cpu(device: Device, types: Iterable[GGMLQuantizationType], **how: Any) -> DeviceProfile:
    """The figures of a CPU on which no layer is worth while."""
    figures = FormatProfile(1e6, {1: 1e6}, None, 0.0, False, {1: 1.0})
    formats = {type.name: figures for type in types}
    return DeviceProfile(str(device.name), "slow", 0.0, 1e-3, 1e-3, LinkProfile(1e-6, 1e10), formats)


@pytest.mark.parametrize("name", ["gemma4-moe-F32", "laguna-a-F32"])
def test_a_plan_leaves_out_what_a_card_cannot_hold(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured_devices, "profile_of", slow_cpu)
    monkeypatch.setattr(measured_devices, "stored_profile", lambda *device, **how: None)
    reference, file = Reference(name), tmp_path / "sim.json"
    monkeypatch.setenv("LUCE_SIM_DEVICES", str(file))
    prompt, present = reference.expected["prompt_17"].tolist(), sorted(requested_layers("cpu", reference.spec))
    for kept in (len(present), 1, 0):
        write(file, card(room(reference, HostDevice(), kept), computes=True))
        settings = {
            "target_devices": "sim:0,cpu:0",
            "optimize": "decode",
            "experts_on": "auto",
            "max_ctx": 256,
            "parallel": 4,
        }
        with luce.load(reference.path, **settings) as model:
            generation = model.generate(prompt, max_tokens=12, ignore_eos=True, temperature=0)
            assert [token.id for token in generation] == reference.expected["greedy_17"][:12].tolist()
            (stage,) = model.placement
            assert stage["device"] == "sim:0" and stage["experts_on_cpu"] == present[kept:]
