"""Routed experts on another device than their layers: the same bits as beside them where both are CPUs, and the limits
of int8 products where the layers are on a GPU's kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import luce
from luce.backend.expert_placement import ExpertRequest, requested_layers
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
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
