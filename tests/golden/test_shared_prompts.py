"""Short prompts that share a step: each has the bits that it has alone, on every device that says so."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from luce.ops.matmul import FEW_ROWS
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.step import Step
from luce.shard.local import LocalShard
from luce.shard.shard import Activation, ShardInfo, ShardResult
from tests.support.emulated import EmulatedDevice
from tests.support.golden_checks import check_prompts_together
from tests.support.make_driver import MakeDriver
from tests.support.op_checks_matmul import launched
from tests.support.reference import Reference
from tests.support.told_shards import tell_shares_prompts
from tests.support.wide_model import VOCAB, open_wide

#: more rows together than a short prompt has
LENGTHS = (70, 17, 64, 143)
#: for the emulated device, and a bound of short prompts that they pass together
FEW_LENGTHS, BOUND = (20, 17, 18), 40
NAMES = ("qwen35-a-Q8_0", "qwen35moe-a-Q4_0", "gemma4-e-Q4_0", "deepseek2-a-F32", "gemma3n-a-F32", "qwen3-a-MIX")


@pytest.mark.emulated
@pytest.mark.parametrize("products", [(), ("F16", "BF16"), ("F16", "BF16", "WGMMA")])
@pytest.mark.parametrize("name", NAMES)
def test_by_the_kernels_of_gpus(name: str, products: tuple[str, ...], make_driver: MakeDriver) -> None:
    reference = Reference(name)
    driver = make_driver(reference, [EmulatedDevice(products=products)])
    with mock.patch("luce.ops.matmul_prefill.BLAS_ROWS", BOUND):
        check_prompts_together(driver, reference.spec.vocab, FEW_LENGTHS)


@pytest.mark.emulated
def test_kernels_of_few_rows_are_not_launched(make_driver: MakeDriver) -> None:
    """Attention's and DeltaNet's have one for spans of few rows, which a step of long and short ones needs as well."""
    reference, device = Reference("qwen35-a-Q8_0"), EmulatedDevice()
    driver = make_driver(reference, [device])
    few = {"attention_few", "attention_fold", "delta_steps"}
    for lengths in ((17, 18), (17, 5)):
        step = driver.step(*((driver.start(), reference.expected["prompt_long"][:count]) for count in lengths))
        with launched(device) as kernels:
            driver.backend.shards[0].forward(step, None)
        assert few & set(kernels) == (few if min(lengths) <= FEW_ROWS else set()), kernels


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, "qwen35-b-Q4_K_M", "qwen35moe-b-Q4_K_M", "laguna-b-Q4_K_M"])
def test_on_a_gpu(name: str, make_driver: MakeDriver, gpu: Device) -> None:
    reference = Reference(name)
    check_prompts_together(make_driver(reference, [gpu]), reference.spec.vocab, LENGTHS)


@pytest.mark.gpu
def test_wide_matrices_on_a_gpu(tmp_path: Path, gpu: Device) -> None:
    for experts in ("", "Q4_K", "Q5_1"):
        with ExitStack() as stack:
            check_prompts_together(open_wide(stack, tmp_path, gpu, experts=experts, context=192), VOCAB, LENGTHS)


@pytest.mark.parametrize(
    ("shards", "lengths", "parts"),
    [(1, LENGTHS, [294]), (2, LENGTHS, [151, 143]), (2, (17, 18, 19), [54])],
    ids=["one shard", "two", "few rows"],
)
def test_prompts_share_steps(
    shards: int, lengths: tuple[int, ...], parts: list[int], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that follow each other get several steps, so that all of them work."""
    seen: list[int] = []
    forward = LocalShard.forward

    def note(shard: LocalShard, step: Step, activation: Activation | None) -> ShardResult:
        if activation is None and step.rows > len(lengths):
            seen.append(step.rows)
        return forward(shard, step, activation)

    monkeypatch.setattr(LocalShard, "forward", note)
    for shares, expected in ((True, parts), (False, [*lengths])):
        tell_shares_prompts(monkeypatch, shares=shares)
        reference = Reference("qwen35-a-Q8_0")
        driver = make_driver(reference, [CpuDevice(number) for number in range(shards)])
        assert driver.backend.capacity.shares_prompts is shares
        check_prompts_together(driver, reference.spec.vocab, lengths)
        assert seen == [*lengths, *expected]
        seen.clear()


@pytest.mark.emulated
def test_what_devices_say(make_driver: MakeDriver) -> None:
    reference = Reference("qwen3-a-F32")
    for devices, shares in (
        ([CpuDevice()], False),
        ([HostDevice()], False),
        ([EmulatedDevice()], True),
        ([EmulatedDevice(), CpuDevice()], False),
    ):
        driver = make_driver(reference, devices)
        assert driver.backend.capacity.shares_prompts is shares
    # Of a daemon with two devices.
    (part,) = driver.backend.shards[0].info.devices
    for second in (False, True):
        info = ShardInfo((part, replace(part, shares_prompts=second)))
        assert info.shares_prompts is second
