"""Where a file's layers go on devices, what each shard reads, and that the plan's bytes are those of the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.microbatch import default_microbatch_rows, max_microbatch_rows
from luce.backend.placement import ShardPlan, default_chunk, default_context, plan_shards
from luce.backend.serving_options import ServingOptions
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers import build
from luce.layers.tensors import shard_tensors
from luce.layers.weight_pool import WeightPool
from luce.layers.weights import WeightLoader
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.emulated import EmulatedDevice
from tests.support.published import PUBLISHED
from tests.support.reference import Reference, references
from tests.support.sized_device import GIB, Sized


def plan(reference: Reference, devices: Sequence[Device], **options: Any) -> tuple[ShardPlan, ...]:
    with open_gguf(reference.path) as file:
        return plan_shards(file, reference.spec, devices, ServingOptions(**options))


#: by model and the GiB of devices, where shards ended before placements were predicted: with one sequence of 8192
#: tokens, and with four of 32768
BY_MEMORY: dict[str, dict[str, tuple[list[int], list[int]]]] = {
    "Qwen3.6-27B": {
        "cuda:0=24 cuda:1=24": ([35, 64], [36, 64]),
        "cuda:0=24 cuda:1=16": ([44, 64], [44, 64]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([6, 25, 64], [7, 31, 64]),
        "cuda:0=6 cpu:0=64": ([25, 64], [31, 64]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([17, 35, 53, 64], [18, 36, 54, 64]),
    },
    "Qwen3.6-35B-A3B": {
        "cuda:0=24 cuda:1=24": ([21, 40], [21, 40]),
        "cuda:0=24 cuda:1=16": ([25, 40], [25, 40]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([5, 21, 40], [5, 22, 40]),
        "cuda:0=6 cpu:0=64": ([21, 40], [22, 40]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([10, 20, 31, 40], [10, 20, 31, 40]),
    },
    "Gemma4-E2B": {
        "cuda:0=24 cuda:1=24": ([14, 35], [14, 35]),
        "cuda:0=24 cuda:1=16": ([14, 35], [14, 35]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([11, 34, 35], [9, 34, 35]),
        "cuda:0=6 cpu:0=64": ([24, 35], [18, 35]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([12, 21, 29, 35], [10, 20, 28, 35]),
    },
    "Gemma4-26B-A4B": {
        "cuda:0=24 cuda:1=24": ([16, 30], [16, 30]),
        "cuda:0=24 cuda:1=16": ([19, 30], [19, 30]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([3, 11, 30], [3, 12, 30]),
        "cuda:0=6 cpu:0=64": ([11, 30], [12, 30]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([8, 16, 24, 30], [8, 16, 24, 30]),
    },
    "Laguna-XS.2": {
        "cuda:0=24 cuda:1=24": ([21, 40], [21, 40]),
        "cuda:0=24 cuda:1=16": ([25, 40], [25, 40]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([6, 21, 40], [6, 22, 40]),
        "cuda:0=6 cpu:0=64": ([21, 40], [22, 40]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([11, 21, 31, 40], [11, 21, 31, 40]),
    },
    "Qwen2.5-7B": {
        "cuda:0=24 cuda:1=24": ([15, 28], [15, 28]),
        "cuda:0=24 cuda:1=16": ([18, 28], [18, 28]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([7, 27, 28], [5, 21, 28]),
        "cuda:0=6 cpu:0=64": ([5, 28], [3, 28]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([7, 15, 22, 28], [7, 15, 22, 28]),
    },
    "gpt-oss-20b": {
        "cuda:0=24 cuda:1=24": ([13, 24], [13, 24]),
        "cuda:0=24 cuda:1=16": ([15, 24], [15, 24]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([2, 9, 24], [2, 8, 24]),
        "cuda:0=6 cpu:0=64": ([5, 24], [6, 24]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([6, 13, 19, 24], [6, 13, 19, 24]),
    },
    "DeepSeek-V2-Lite": {
        "cuda:0=24 cuda:1=24": ([14, 27], [14, 27]),
        "cuda:0=24 cuda:1=16": ([17, 27], [17, 27]),
        "cuda:0=8 cuda:1=24 cpu:0=64": ([4, 14, 27], [3, 12, 27]),
        "cuda:0=6 cpu:0=64": ([3, 27], [3, 27]),
        "cuda:0=12 cuda:1=12 cuda:2=12 cuda:3=12": ([7, 14, 21, 27], [7, 14, 21, 27]),
    },
}


def splits(layers: int) -> list[int]:
    return sorted({1, 2, min(3, layers), layers})


class Loaders:
    """In the place of WeightLoader: remembers every loader by its device."""

    def __init__(self) -> None:
        self.used: dict[str, set[str]] = {}

    def __call__(
        self, file: GGUFFile, device: Device, pool: WeightPool | None = None, *, int8: bool = False
    ) -> WeightLoader:
        loader = WeightLoader(file, device, pool, int8=int8)
        self.used[str(device.name)] = loader.used
        return loader


def wanted(file: GGUFFile, spec: ModelSpec) -> set[str]:
    """Tensors that the family uses: all but those of skipped layers, projections of borrowing layers and divisors of
    rotary frequencies for longer contexts than are asked for."""
    skipped = tuple(f"blk.{layer}." for layer in spec.skipped_layers)
    found = {name for name in file.tensors if not (skipped and name.startswith(skipped))} - {"rope_factors_long.weight"}
    borrowing = [layer for layer in range(len(spec.layers)) if spec.donor(layer) is not None]
    return found - {f"blk.{i}.{part}.weight" for i in borrowing for part in ("attn_k", "attn_v", "attn_k_norm")}


@pytest.mark.parametrize("reference", references(), ids=lambda r: r.name)
def test_each_shard_reads_its_own_tensors(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = reference.spec
    layers = len(spec.layers)
    for count in splits(layers):
        loaders = Loaders()
        monkeypatch.setattr(build, "WeightLoader", loaders)
        devices = [HostDevice(index) for index in range(count)]
        options: dict[str, Any] = {
            "layer_split": (1,) * count,
            "slots": 2,
            "context": 256,
            "kv": KVTypes("f16", "bf16"),
        }
        with open_gguf(reference.path) as file:
            planned = plan_shards(file, spec, devices, ServingOptions(**options))
            backend = LayerSplitBackend(file, spec, devices, ServingOptions(**options))
            try:
                read = list(loaders.used.values())
                assert [shard.info.layers for shard in backend.shards] == [shard.layers for shard in planned]
                for shard, expected, names in zip(backend.shards, planned, read, strict=True):
                    assert names == shard_tensors(file, spec, expected.layers)
                    info = (shard.info.device, shard.info.weights, shard.info.state)
                    assert info == (expected.device, expected.weights, expected.state)
                    assert expected.fits
            finally:
                backend.close()
            assert set().union(*read) == wanted(file, spec)
            blocks = [{name for name in names if name.startswith("blk.")} for names in read]
            assert sum(map(len, blocks)) == len(set().union(*blocks)), "a block is read once"
            head = {"output.weight", f"{spec.final_norm}.weight"} & file.tensors.keys()
            assert [head <= names for names in read] == [False] * (count - 1) + [True]
            assert not any(head & names for names in read[:-1])
            table = ["token_embd.weight" in names for names in read]
            assert table == [i == 0 or (spec.tied_head and i == count - 1) for i in range(count)]


@pytest.mark.parametrize("name", ["gemma4-e-F32", "gemma4-e-Q4_0", "gemma4-eb-Q4_K_M", "gemma4-moe-F32"])
def test_planned_bytes_on_a_gpu(name: str) -> None:
    # As on a GPU, tables are loaded, of the per-layer one each shard's own columns, and tensors stay as stored.
    reference = Reference(name)
    spec = reference.spec
    for count in splits(len(spec.layers)):
        devices = [EmulatedDevice() for _ in range(count)]
        options: dict[str, Any] = {"layer_split": (1,) * count, "context": 64}
        with open_gguf(reference.path) as file:
            planned = plan_shards(file, spec, devices, ServingOptions(**options))
            backend = LayerSplitBackend(file, spec, devices, ServingOptions(**options))
            loaded = [(shard.info.weights, shard.info.state) for shard in backend.shards]
            backend.close()
            sizes = {name: info.nbytes for name, info in file.tensors.items()}
            second = shard_tensors(file, spec, planned[1].layers) if count == len(spec.layers) else set()
        assert loaded == [(shard.weights, shard.state) for shard in planned]
        if table := second & {"per_layer_token_embd.weight"}:
            columns = loaded[1][0] - sum(sizes[name] for name in second - table)
            assert columns * count == sum(sizes[name] for name in table)


@pytest.mark.parametrize("name", ["qwen35-a-F32", "qwen35moe-a-Q4_0", "qwen3-b-Q4_K_M", "laguna-a-F32"])
def test_equal_devices_get_equal_bytes(name: str) -> None:
    reference = Reference(name)
    ends = {"token_embd.weight", "output.weight", "output_norm.weight"}
    for count in (2, 3):
        gpus = [Sized(f"cuda:{index}", 8 * GIB) for index in range(count)]
        with open_gguf(reference.path) as file:
            stored = {name: info.nbytes for name, info in file.tensors.items()}
            shards = plan_shards(file, reference.spec, gpus, ServingOptions(context=64, microbatch=1))
            names = [shard_tensors(file, reference.spec, shard.layers) for shard in shards]
        sizes = [
            shard.needed - sum(stored[name] for name in ends & read) for shard, read in zip(shards, names, strict=True)
        ]
        # Whole layers only: of so few none is more than half of a shard.
        assert max(sizes) - min(sizes) <= max(sizes) / 2


def test_devices_of_the_host_share_its_memory() -> None:
    reference = Reference("qwen3-a-F32")
    for weights in ((), (5, 1, 1)):
        shards = plan(reference, [Sized(f"cpu:{index}", GIB) for index in range(3)], layer_split=weights)
        left = int(GIB * 0.94)
        for shard in shards:
            assert shard.free == left
            left -= shard.needed
    taken = [shard.needed for shard in shards]
    tight = [Sized(f"cpu:{index}", int((sum(taken) - 1) / 0.94)) for index in range(3)]
    assert [shard.fits for shard in plan(reference, tight, layer_split=(5, 1, 1))] == [True, True, False]
    mixed = plan(reference, [Sized("cuda:0", 8 * GIB), Sized("cpu:0", 4 * GIB)])
    assert [shard.free for shard in mixed] == [int(size * GIB * 0.94) for size in (8, 4)]
    three = plan(reference, [Sized("cuda:0", GIB), Sized("cuda:1", GIB), Sized("cpu:0", 4 * GIB)])
    assert three[2].free == int(4 * GIB * 0.94) - three[1].pinned and three[1].pinned == three[1].buffers > 0
    assert (
        mixed[0].buffers
        == 0
        < mixed[1].buffers
        == 2 * max_microbatch_rows(default_microbatch_rows(2)) * mixed[0].activation
    )


def test_the_cpu_gets_what_the_gpu_cannot_hold() -> None:
    reference = Reference("qwen35-a-F32")
    layers = len(reference.spec.layers)
    big, host = Sized("cuda:0", GIB), Sized("cpu:0", 64 * GIB)
    assert [len(shard.layers) for shard in plan(reference, [big, host])] == [layers - 1, 1]
    whole = plan(reference, [big], context=64)[0]
    small = Sized("cuda:0", (whole.weights + whole.state) * 2 // 3)
    shards = plan(reference, [small, host], context=64)
    assert 1 < len(shards[1].layers) < layers - 1 and all(shard.fits for shard in shards)
    more = plan(
        reference, [small, host], context=64, layer_split=(len(shards[0].layers) + 1, len(shards[1].layers) - 1)
    )
    assert [shard.fits for shard in more] == [False, True]


def test_what_does_not_fit_is_planned_all_the_same() -> None:
    shards = plan(Reference("qwen3-a-F32"), [Sized("cuda:0", 0), Sized("cuda:1", 0)])
    assert not any(shard.fits for shard in shards)
    assert [shard.free for shard in shards] == [0, 0]


def test_sequences_and_context_count() -> None:
    reference, device = Reference("qwen35-a-F32"), Sized("cuda:0", GIB)
    sizes = [plan(reference, [device], slots=n, context=64 * n)[0].state for n in (1, 2)]
    attending = [b.mixer for b in reference.spec.layers if hasattr(b.mixer, "kv_heads")]
    pages = sum(64 * 2 * m.kv_heads * m.head_dim * 4 for m in attending)
    # Twice the slots; twice the pages for each of them.
    assert sizes[1] - 2 * sizes[0] == 2 * pages


def test_chunk() -> None:
    small, large, host = Sized("cuda:0", 69 * GIB), Sized("cuda:1", 70 * GIB), HostDevice(0)
    assert default_chunk([large], 0) == 8192
    # Every device has to hold the arrays of a step.
    assert default_chunk([small], 0) == default_chunk([large, small], 0) == 2048
    assert default_chunk([large, host], 0) == 512
    assert default_chunk([large], 100) == default_chunk([host], 100) == 100


def test_context() -> None:
    spec = Reference("qwen3-a-F32").spec
    assert default_context(spec, 0) == min(spec.context_length, 8192)
    assert default_context(spec, 100) == 100
    with pytest.raises(UsageError, match=f"--max-ctx {spec.context_length + 1}: the model was trained for"):
        default_context(spec, spec.context_length + 1)


def test_more_devices_than_layers() -> None:
    reference = Reference("qwen3-a-F32")
    count = len(reference.spec.layers) + 1
    for weights in ((), [1] * count):
        with pytest.raises(UsageError, match=f"bad layer split for {count} devices and {count - 1} layers"):
            plan(reference, [HostDevice(index) for index in range(count)], layer_split=weights)


@pytest.mark.parametrize("name", BY_MEMORY)
def test_placements_by_memory_stay_what_they_were(name: str, tmp_path: Path) -> None:
    (published,) = (each for each in PUBLISHED if each.name == name)
    with open_gguf(published.write(tmp_path)) as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        for machine, ends in BY_MEMORY[name].items():
            sizes = [word.partition("=") for word in machine.split()]
            devices = [Sized(device, int(gibibytes) * GIB) for device, _, gibibytes in sizes]
            for load, expected in zip(((1, 8192), (4, 32768)), ends, strict=True):
                options = ServingOptions(slots=load[0], context=load[1])
                shards = plan_shards(file, spec, devices, options)
                assert [shard.layers.stop for shard in shards] == expected, (machine, load)
