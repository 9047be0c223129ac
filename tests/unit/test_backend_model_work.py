"""What layers ask of devices, against the sizes of the file's tensors and the memory that a load takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from luce.backend.model_work import model_work, weight_tensors
from luce.backend.placement import plan_shards
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import GGUFFile, open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.runtime.cpu import CpuDevice
from luce.runtime.host import HostDevice
from tests.support.reference import Reference

OPTIONS = ServingOptions(slots=2, context=256, chunk=64)


@contextlib.contextmanager
def opened(name: str) -> Iterator[tuple[GGUFFile, ModelSpec]]:
    with open_gguf(Reference(name).path) as file:
        yield file, read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))


@pytest.mark.parametrize("name", ["qwen35-a-F32", "qwen35moe-a-Q4_0", "laguna-b-Q4_K_M", "qwen2-a-F32"])
@pytest.mark.parametrize("packed", [True, False])
def test_the_parts_are_what_a_load_takes(name: str, packed: bool) -> None:
    device = CpuDevice() if packed else HostDevice()
    with opened(name) as (file, spec):
        work = model_work(file, spec, device, OPTIONS)
        (shard,) = plan_shards(file, spec, [device], OPTIONS)
        layers = sum(layer.bytes + (0 if layer.experts is None else layer.experts.bytes) for layer in work.layers)
        assert not spec.tied_head
        assert layers + work.embedding + work.head.bytes == shard.weights
        if all(layer.window is None for layer in work.layers):
            states = sum(2 * (layer.kv * 256 + layer.slot) for layer in work.layers)
            assert states == shard.state


def test_multiply_adds_are_elements_of_matrices() -> None:
    with opened("qwen35moe-a-F32") as (file, spec):
        work = model_work(file, spec, HostDevice(), OPTIONS)
        elements = sum(tensor.rows * tensor.cols for tensor in weight_tensors(file, spec))
        dense = sum(layer.macs for layer in work.layers)
        # 10 experts of which a row chooses 4, in the README of the reference files.
        experts = [layer.experts for layer in work.layers if layer.experts is not None]
        assert dense + sum(10 * own.macs for own in experts) == elements
        assert {(own.count, own.used) for own in experts} == {(10, 4)}
        assert work.head.macs == spec.vocab * spec.hidden


def test_recurrent_layers_move_their_state_and_have_no_keys() -> None:
    # Full attention at layers 3 and 7.
    with opened("qwen35-a-F32") as (file, spec):
        work = model_work(file, spec, HostDevice(), OPTIONS)
    assert [index for index, layer in enumerate(work.layers) if layer.kv] == [3, 7]
    assert [index for index, layer in enumerate(work.layers) if not layer.slot_moved] == [3, 7]
    assert [index for index, layer in enumerate(work.layers) if layer.attention] == [3, 7]


def test_borrowing_layers_have_no_keys_and_their_boundaries_are_wider() -> None:
    # The last 3 layers share keys and values, and the window is 32.
    with opened("gemma4-e-F32") as (file, spec):
        work = model_work(file, spec, HostDevice(), OPTIONS)
    count = len(work.layers)
    assert [layer.kv > 0 for layer in work.layers] == [True] * (count - 3) + [False] * 3
    assert {layer.window for layer in work.layers} == {32, None}
    assert work.boundaries[0] == 0
    assert work.boundaries[count - 1] > work.boundaries[1] >= 2 * 4 * spec.hidden
