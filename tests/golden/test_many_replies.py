"""More replies in a step than a short prompt has rows: each has the bits that it has alone, where all products have
kernels for that."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from luce.ops.matmul import FEW_ROWS, MANY_ROWS
from luce.runtime.device import Device
from tests.support.emulated import EmulatedDevice
from tests.support.golden_checks import check_replies_together
from tests.support.make_driver import MakeDriver
from tests.support.op_checks_matmul import launched
from tests.support.reference import Reference
from tests.support.wide_model import VOCAB, open_wide

#: for the emulated device, a bound of short prompts, and more replies than that
BOUND, REPLIES = 20, 24


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["qwen3-a-F32", "qwen35-a-F32"])
def test_by_the_kernels_of_gpus(name: str, make_driver: MakeDriver) -> None:
    reference = Reference(name)
    driver = make_driver(reference, [EmulatedDevice(products=("F16", "BF16", "WGMMA"))], slots=REPLIES)
    assert driver.backend.capacity.invariant_rows > FEW_ROWS
    with mock.patch("luce.ops.matmul_prefill.BLAS_ROWS", BOUND):
        check_replies_together(driver, reference.spec.vocab, REPLIES)


@pytest.mark.emulated
def test_others_take_the_kernels_of_long_prompts(make_driver: MakeDriver) -> None:
    """Where some products have other bits in company anyway, each takes its fastest kernel."""
    reference, device = Reference("qwen35moe-a-Q4_0"), EmulatedDevice(products=("F16", "BF16", "WGMMA"))
    driver = make_driver(reference, [device], slots=REPLIES)
    assert driver.backend.capacity.invariant_rows == FEW_ROWS
    work = [(driver.start(), np.array([token], np.int32)) for token in range(REPLIES)]
    for bound, long in ((BOUND, True), (REPLIES + 1, False)):
        with mock.patch("luce.ops.matmul_prefill.BLAS_ROWS", bound), launched(device) as kernels:
            driver.feed(*work)
        assert ("arrange_rows" in kernels) is long, kernels


@pytest.mark.emulated
def test_long_prompts_keep_their_kernels(make_driver: MakeDriver) -> None:
    device = EmulatedDevice(products=("F16", "BF16", "WGMMA"))
    driver = make_driver(Reference("qwen3-a-F32"), [device])
    few_rows = mock.patch("luce.shard.local.MANY_ROWS", BOUND - 1)
    with few_rows, mock.patch("luce.ops.matmul_prefill.BLAS_ROWS", BOUND), launched(device) as kernels:
        driver.feed((driver.start(), np.zeros(BOUND, np.int32)), wanted=False)
    assert "matmul_halves" in kernels


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["", "Q4_K"])
def test_on_a_gpu(experts: str, tmp_path: Path, gpu: Device) -> None:
    count = MANY_ROWS + 57
    with ExitStack() as stack:
        driver = open_wide(stack, tmp_path, gpu, experts=experts, slots=count, context=64)
        check_replies_together(driver, VOCAB, count)
