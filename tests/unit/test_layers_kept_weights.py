"""Weights that stay on their devices from one load to the next one: which do, what they count as, and when they go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from luce.backend.placement import free_bytes
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.kept_weights import KeptWeights, LoadedBytes, wanted_tensors
from luce.layers.weights import WeightLoader
from luce.ops.weight import Int8Experts, Weight
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device, DeviceName
from luce.runtime.host import HostDevice
from tests.support.reference import Reference

SMALL, OTHER, MIXTURE = Reference("qwen3-a-F32"), Reference("qwen35-a-Q8_0"), Reference("qwen35moe-b-Q4_K_M")


def queries(file: GGUFFile, layer: int, device: Device, kept: KeptWeights, *, int8: bool = False) -> Weight:
    name = f"blk.{layer}.attn_q.weight"
    cols, rows = file.tensors[name].shape
    return WeightLoader(file, device, kept, int8=int8).matrix([name], cols, [rows])


def closing(*held: list[Weight]) -> None:
    for each in held:
        each.clear()


def test_what_the_next_load_needs_stays_and_the_rest_goes() -> None:
    kept, device, layers = KeptWeights(), HostDevice(), list[Weight]()
    with open_gguf(SMALL.path) as file:
        layers += [queries(file, layer, device, kept) for layer in range(2)]
        one = layers[0].nbytes
        assert kept.release() == LoadedBytes(2 * one, 0) and kept.free_bytes(device) == 0
        layers[0].copy = np.zeros((1, 1), np.float16)
        layers[0].int8_experts = Int8Experts(np.zeros((1, 1, 8192), np.int8), np.zeros(64), 1, 64, gated=False)
        first = layers[0]
        kept.keep(layers.clear)
        assert kept.free_bytes(device) == 2 * one and first.copy is None and first.int8_experts is None
        kept.retain(file, {"cpu:0": wanted_tensors(file, SMALL.spec, range(1))})
        assert kept.free_bytes(device) == one
        assert queries(file, 0, device, kept) is first
        layers.append(queries(file, 1, device, kept))
        assert kept.release() == LoadedBytes(one, one) and kept.free_bytes(device) == 0


def test_nothing_stays_that_nobody_held() -> None:
    kept, device, layers = KeptWeights(), HostDevice(), list[Weight]()
    with open_gguf(SMALL.path) as file:
        layers.append(queries(file, 0, device, kept))
        kept.keep(layers.clear)
        kept.release()
        layers.append(queries(file, 0, device, kept))
        assert kept.release() == LoadedBytes(layers[0].nbytes, 0)


def test_another_file_device_or_type_finds_nothing() -> None:
    kept, device, layers = KeptWeights(), HostDevice(), list[Weight]()
    with open_gguf(SMALL.path) as file, open_gguf(OTHER.path) as other:
        first = queries(file, 0, device, kept)
        layers.append(first)
        kept.keep(layers.clear)
        assert queries(file, 0, HostDevice(1), kept) is not first
        assert queries(file, 0, CpuDevice(), kept) is not first
        assert queries(file, 0, device, kept, int8=True) is not first
        kept.retain(file, {"cpu:1": wanted_tensors(file, SMALL.spec, range(1))})
        assert kept.free_bytes(device) == 0
        kept.keep(lambda: None)
        kept.retain(other, {"cpu:0": wanted_tensors(file, SMALL.spec, range(1))})
        assert kept.free_bytes(device) == 0


def test_experts_that_go_to_the_cpu_do_not_stay_with_their_layer() -> None:
    with open_gguf(MIXTURE.path) as file:
        own, away = (wanted_tensors(file, MIXTURE.spec, range(2), offloaded) for offloaded in ((), (1,)))
        assert {name for name in own - away if "_exps" in name and name.startswith("blk.1.")} == own - away != set()


def test_what_is_held_counts_as_free_unless_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, layers = KeptWeights(), list[Weight]()
    copied = tmp_path / "model.gguf"
    copied.write_bytes(OTHER.path.read_bytes())
    device, packed = HostDevice(), CpuDevice(1)
    with open_gguf(copied) as file:
        layers += [queries(file, 3, device, kept), queries(file, 3, packed, kept)]
        mapped = layers[1].nbytes
        size = layers[0].nbytes
        kept.keep(layers.clear)
        # One memory, whichever of its devices is asked.
        assert kept.free_bytes(device) == kept.free_bytes(packed) in (size, size + mapped)
        monkeypatch.setattr(HostDevice, "memory", lambda self: type("M", (), {"free": 1000})())
        assert free_bytes(device, kept) == 1000 + kept.free_bytes(device) and free_bytes(device) == 1000
    # A daemon says what it holds.
    far: Any = SimpleNamespace(remote=True, kept=7, memory=lambda: SimpleNamespace(free=1000))
    assert free_bytes(far, kept) == 1007


def test_gpus_hold_apart_what_they_hold() -> None:
    kept, layers, gpu = KeptWeights(), list[Weight](), HostDevice()
    gpu.name = DeviceName("cuda", 0)
    same, other = (SimpleNamespace(name=DeviceName("cuda", index), host=False) for index in range(2))
    with open_gguf(OTHER.path) as file:
        layers.append(queries(file, 3, gpu, kept))
        size = layers[0].nbytes
        kept.keep(layers.clear)
        assert [kept.free_bytes(device) for device in cast("list[Device]", [same, other, HostDevice()])] == [size, 0, 0]
