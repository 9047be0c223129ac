"""Which layers leave their experts to the CPU, and what a plan then counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from luce.backend.expert_placement import ExpertRequest, requested_layers
from luce.backend.placement import ShardPlan, check_memory, plan_model, plan_shards
from luce.backend.serving_options import Claim, ServingOptions
from luce.config.values import expert_layers
from luce.errors import OutOfMemoryError, UsageError
from luce.gguf.reader import open_gguf
from luce.runtime.device import Device, DeviceName
from tests.support.reference import Reference
from tests.support.sized_device import GIB, Sized

MODEL, DENSE, LATER = Reference("qwen35moe-b-Q4_K_M"), Reference("qwen3-a-F32"), Reference("deepseek2-a-F32")
CPU = Sized("cpu:0", GIB)
AUTO = ExpertRequest(CPU, auto=True)


def plan(devices: Sequence[Device], experts: ExpertRequest | None, **options: Any) -> tuple[ShardPlan, ...]:
    with open_gguf(MODEL.path) as file:
        return plan_shards(file, MODEL.spec, devices, ServingOptions(context=256, experts=experts, **options))


def test_layers_by_name() -> None:
    def asked(text: str, reference: Reference = MODEL) -> list[int]:
        return sorted(requested_layers(expert_layers(text), reference.spec))

    assert [asked(text) for text in ("cpu", "auto", "1", "3", "1-2", "0-0,3-3")] == [
        [0, 1, 2, 3],
        [],
        [3],
        [1, 2, 3],
        [1, 2],
        [0, 3],
    ]
    # The first layers of this model have no experts.
    dense = next(layer for layer in range(9) if LATER.spec.mixture(layer) is not None)
    assert dense > 0 and asked("cpu", LATER)[0] == asked(f"0-{dense}", LATER)[0] == dense


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        ("cpu", DENSE, "--experts-on cpu: the model has no experts"),
        ("auto", DENSE, "--experts-on auto: the model has no experts"),
        ("5", MODEL, "--experts-on 5: 4 layers have experts"),
        ("2-4", MODEL, "--experts-on 2-4: layers 0..3 of 4 have experts"),
        ("0-0", LATER, "--experts-on 0-0: layers "),
    ],
)
def test_layers_that_a_model_lacks(text: str, reference: Reference, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        requested_layers(text, reference.spec)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["", "gpu", "0", "-1", "3-1", "1-2,", "1-2,4", "a-b", "1-2-3", "cpu:0", "1 - 2"])
def test_values_without_a_meaning(text: str) -> None:
    with pytest.raises(ValueError):
        expert_layers(text)


def test_auto_moves_the_fewest_last_layers() -> None:
    (whole,) = plan([Sized("cuda:0", GIB)], None)
    (roomy,) = plan([Sized("cuda:0", GIB)], AUTO)
    assert roomy.offloaded == () and roomy.weights == whole.weights
    one = whole.experts // 4
    for missing, away in ((1, 1), (one - 1000, 1), (one + 1000, 2), (3 * one + 1000, 4)):
        free = whole.needed - missing
        device = Sized("cuda:0", free)
        device.margin = 0
        (shard,) = plan([device], AUTO)
        assert shard.offloaded == tuple(range(4))[4 - away :]
        assert shard.fits and shard.weights + shard.offloaded_bytes == whole.weights
        assert shard.experts == whole.experts - shard.offloaded_bytes
        assert shard.needed <= free


def test_what_not_even_all_experts_make_fit() -> None:
    (whole,) = plan([Sized("cuda:0", GIB)], None)
    device = Sized("cuda:0", whole.needed - whole.experts - 1)
    device.margin = 0
    (shard,) = plan([device], AUTO)
    assert shard.offloaded == (0, 1, 2, 3) and not shard.fits


def test_experts_go_to_the_cpu_before_layers_do() -> None:
    (whole,) = plan([Sized("cuda:0", GIB)], None)
    gpu, cpu = Sized("cuda:0", int(whole.needed * 0.7)), Sized("cpu:1", GIB)
    without, experts = plan([gpu, cpu], None), plan([gpu, cpu], AUTO)
    assert len(without[1].layers) > len(experts[1].layers) == 1
    assert experts[0].offloaded and not experts[1].offloaded


def test_two_gpus_move_as_few_layers_as_they_can() -> None:
    (whole,) = plan([Sized("cuda:0", GIB)], None)
    sizes = int(whole.needed * 0.4), int(whole.needed * 0.6)
    shards = plan([Sized(f"cuda:{i}", size) for i, size in enumerate(sizes)], AUTO)
    assert all(shard.fits for shard in shards)
    away = sum(len(shard.offloaded) for shard in shards)
    for boundary in range(1, 4):
        ranges = (range(boundary), range(boundary, 4))
        other = plan([Sized(f"cuda:{i}", size) for i, size in enumerate(sizes)], AUTO, layers=ranges)
        if all(shard.fits for shard in other):
            assert sum(len(shard.offloaded) for shard in other) >= away
    assert away > 0


def test_given_layers_leave_their_experts_on_every_device() -> None:
    request = ExpertRequest(CPU, frozenset({1, 3}))
    shards = plan([Sized("cuda:0", GIB), Sized("cuda:1", GIB)], request, layer_split=(1, 1))
    assert [shard.offloaded for shard in shards] == [(1,), (3,)]
    assert all(shard.offloaded_bytes > 0 for shard in shards)


def test_the_host_must_hold_them() -> None:
    (whole,) = plan([Sized("cuda:0", GIB)], None)
    small = Sized("cpu:0", whole.experts)
    request = ExpertRequest(small, frozenset(range(4)))
    gpus = [Sized("cuda:0", GIB), Sized("cuda:1", GIB)]
    first, second = plan(gpus, request, layer_split=(1, 1))
    assert first.fits and not second.fits
    assert first.offload_free - first.offloaded_bytes == second.offload_free
    # Nothing is known of the memory of another machine.
    gpus[1].name = DeviceName("cuda", 1, "tcp://there:1/")
    assert plan(gpus, request, layer_split=(1, 1))[1].fits
    # A draft on the CPU takes memory too.
    claim = Claim(Sized("cpu:1", GIB), 1000)
    assert plan(gpus, request, layer_split=(1, 1), claims=(claim,))[0].offload_free == first.offload_free - 1000


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (ExpertRequest(Sized("cpu:0", 1000), frozenset({1, 3})), "the experts of 2 layers need .* bytes on the CPU"),
        (None, "; --experts-on auto may fit"),
    ],
)
def test_what_the_error_says(experts: ExpertRequest | None, message: str) -> None:
    (whole,) = plan([Sized("cuda:0", GIB)], None)
    device = Sized("cuda:0", GIB if experts else int(whole.needed / 0.94) - 1000)
    options = ServingOptions(context=256, experts=experts)
    with open_gguf(MODEL.path) as file:
        planned = plan_model(file, MODEL.spec, [device], options)
    with pytest.raises(OutOfMemoryError, match=message):
        check_memory(MODEL.spec, planned, options)
