"""Products of more than 16 quantised rows (kernels/matmul_rows.cu, matmul_rows_wgmma.cu): the bits of one row, and what
several short prompts meet."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops import matmul_rows, matmul_rows_wgmma, moe_prefill
from luce.ops.matmul import fp16_top, matmul
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.weight import upload_weight
from luce.runtime.device import Device
from tests.support import op_checks_matmul as checks
from tests.support.devices import emulated_32, emulated_wgmma, on_devices
from tests.support.quant_blocks import random_tensor

#: tiles as a whole and chains together, of check_grouped_waves
Deal = tuple[int, int] | None
#: four and eight chains, columns that end within a step, and features within a block
COMPANY = [("Q4_K", 70, 1280), ("Q5_K", 33, 2304), ("Q6_K", 37, 1280), ("Q6_K", 33, 4096)]


@on_devices(
    "name, rows, cols, counts",
    host=[],
    emulated=[],
    gpu=[
        *((name, rows, cols, [17, 32, 33, 143, 400]) for name, rows, cols in COMPANY),
        *((name, 9000, 2816, [17, 64, 400]) for name in ("Q4_K", "Q5_K", "Q6_K")),
    ],
)
def test_rows_in_company_on_a_gpu(device: Device, name: str, rows: int, cols: int, counts: list[int]) -> None:
    checks.check_company(device, [name], rows, cols, counts)


@pytest.mark.parametrize(("name", "rows", "cols"), COMPANY)
@emulated_32
def test_rows_in_company(device: Device, name: str, rows: int, cols: int) -> None:
    checks.check_company(device, [name], rows, cols, [17, 40])


@on_devices(host=[], gpu=[], emulated_devices=("emulated, 32 lanes", "emulated, wgmma"))
def test_rows_of_several_short_prompts(device: Device) -> None:
    checks.check_company(device, ["Q4_K"], 33, 1280, [BLAS_ROWS])
    # No layer makes them as fp16 before.
    weight = upload_weight(device, [random_tensor("Q4_K", 33, 1280, 5)])
    assert fp16_top(device, BLAS_ROWS, weight) is not None
    device.batch_invariant = True
    assert fp16_top(device, BLAS_ROWS, weight) is None


@emulated_wgmma
def test_several_short_prompts_do_not_meet_what_multiplies_long_ones(device: Device) -> None:
    weight = upload_weight(device, [random_tensor(name, 9, 320, 1) for name in ("F32", "Q8_0")])
    x = np.random.default_rng(4).standard_normal((BLAS_ROWS, 320)).astype(np.float32)
    few = device.download(matmul(device, device.upload(x[:40]), weight))
    device.batch_invariant = True
    with checks.launched(device) as kernels:
        together = device.download(matmul(device, device.upload(x), weight))
    assert set(kernels) == {"rows_to_fp16", "matmul_tile"}
    np.testing.assert_array_equal(together[:40], few)
    assert not moe_prefill.serves(device, BLAS_ROWS)
    device.batch_invariant = False
    with checks.launched(device) as kernels:
        matmul(device, device.upload(x), weight)
    assert "matmul_halves" in kernels and moe_prefill.serves(device, BLAS_ROWS)


@emulated_32
def test_rows_in_company_meet_several_formats(device: Device) -> None:
    checks.check_company(device, ["Q5_K", "Q4_K"], 18, 1280, [17])


@emulated_32
def test_little_shared_memory_for_rows_in_company(device: Device) -> None:
    """Then they are multiplied as fp16, as in formats without int8 products."""
    device.shared_limit = 64 << 10
    checks.check_product(device, "F16", rows=18, cols=1280, n=17)
    weight = upload_weight(device, [random_tensor("Q4_K", 18, 1280, 3)])
    assert not matmul_rows.takes_rows(device, weight.parts[0], 1280)


@on_devices(
    "name, rows, cols, n, deal",
    host=[],
    # Four and eight chains, of one length and of two; features within a tile and several tiles; each way to deal these.
    emulated=[
        ("Q4_K", 70, 1280, 17, None),
        ("Q4_K", 300, 1280, 32, (1, 1)),
        ("Q4_K", 128, 2304, 33, (0, 1)),
        ("Q4_K", 130, 4096, 64, (2, 1)),
        ("Q4_K", 257, 1280, 70, (1, 2)),  # the second tile of rows lacks a group
        ("Q5_K", 129, 2304, 17, (1, 1)),
        ("Q5_K", 33, 1280, 32, (0, 4)),
        ("Q5_K", 130, 1280, 33, None),
        ("Q5_K", 256, 1024, 64, (1, 3)),
        ("Q5_K", 1, 2304, 100, None),
        # Rows of Q6_K begin at multiples of 2, 4, 8 and 16 bytes: an odd number of units, 10, 12 and 8.
        ("Q6_K", 70, 1280, 17, None),
        ("Q6_K", 300, 2560, 32, (1, 2)),
        ("Q6_K", 129, 2304, 33, (0, 1)),
        ("Q6_K", 130, 2048, 64, (1, 1)),
        ("Q6_K", 256, 3072, 64, (0, 3)),
        ("Q6_K", 1, 2304, 100, None),
    ],
    gpu=[
        *((name, 9000, 2816, n, None) for name in ("Q4_K", "Q5_K", "Q6_K") for n in (17, 32, 64, 143)),
        *(("Q4_K", rows, 5120, 64, deal) for rows in (34816, 5120) for deal in (None, (0, 3), (10, 1))),
        *(("Q6_K", 5120, cols, 64, deal) for cols in (5120, 17408) for deal in (None, (0, 3), (10, 1))),
        ("Q5_K", 10240, 5120, 64, None),
    ],
    emulated_devices=("emulated, wgmma",),
)
def test_rows_by_groups_of_waves(device: Device, name: str, rows: int, cols: int, n: int, deal: Deal) -> None:
    x = np.random.default_rng(n).standard_normal((n, cols)).astype(np.float32)
    checks.check_grouped_waves(device, [random_tensor(name, rows, cols, seed=3, wild=True)], x, deal=deal)


@pytest.mark.parametrize("deal", [(0, 1), (0, 3), (1, 2)])
@emulated_wgmma
def test_parts_by_groups_of_waves(device: Device, deal: Deal) -> None:
    tensors = [random_tensor(name, rows, 1280, rows) for name, rows in (("Q5_K", 18), ("Q4_K", 150), ("Q6_K", 21))]
    x = np.random.default_rng(5).standard_normal((40, 1280)).astype(np.float32)
    checks.check_grouped_waves(device, tensors, x, deal=deal)


# Rows of Q6_K may begin at any even byte, and so may the first one. They are read with the bytes around them, which the
# emulated device takes for memory of others.
@on_devices("first", host=[], emulated=[8], gpu=[1, 6], emulated_devices=("emulated, wgmma",))
def test_rows_of_a_weight_by_groups_of_waves(device: Device, first: int) -> None:
    x = np.random.default_rng(8).standard_normal((20, 1280)).astype(np.float32)
    checks.check_grouped_waves(device, [random_tensor("Q6_K", 140, 1280, 9)], x, deal=(1, 1), first=first)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
@emulated_wgmma
def test_a_unit_for_each_block(device: Device, name: str) -> None:
    device.multiprocessors = 64
    x = np.random.default_rng(7).standard_normal((17, 1024)).astype(np.float32)
    checks.check_grouped_waves(device, [random_tensor(name, 130, 1024, 4)], x, deal=(0, 1))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
@on_devices("n", host=[], emulated=[17, 33], gpu=[17, 64, 100], emulated_devices=("emulated, wgmma",))
def test_largest_sums_of_groups_of_waves(device: Device, name: str, n: int) -> None:
    checks.check_largest_sums(device, name, n)


@on_devices("name", ["Q4_K", "Q5_K", "Q6_K"], host=[], emulated_devices=("emulated, wgmma",))
def test_nan_stays_in_its_row_of_groups_of_waves(device: Device, name: str) -> None:
    checks.check_nan_in_groups(device, name)


def test_blocks_without_a_tile_take_chains() -> None:
    """Of 34816 features by 132 blocks the last eight tiles' chains; of 10240 and fewer three chains or two together."""
    assert matmul_rows_wgmma.dealt(272, 1, 20, 2, 132) == (264, 1, 264 + 8 * 4)
    assert matmul_rows_wgmma.dealt(272, 3, 20, 2, 132) == (792, 1, 792 + 24 * 4)
    assert matmul_rows_wgmma.dealt(80, 1, 20, 2, 132) == (0, 3, 80 + 27)
    assert matmul_rows_wgmma.dealt(48, 1, 20, 2, 132) == (0, 2, 48 + 48)
    assert matmul_rows_wgmma.dealt(132, 1, 20, 2, 132) == (132, 4, 132)
    assert matmul_rows_wgmma.dealt(8, 1, 1, 0, 132) == (8, 1, 8)
