"""matmul_vec, matmul_int8, quantise, matmul_tile, half and dequant of kernels/ on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from luce.models.spec import Activation
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.weight import upload_weight
from luce.runtime.device import Device
from tests.support import op_checks_matmul as checks
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import FORMATS, PLAIN, block_cols, decoded, random_tensor
from tests.support.quantised import BYTES

# Row counts one below, at and above what a variant of matmul_vec holds would compile them all for every format; each
# format meets one variant here, and one format meets all of them below.
FEW = {name: (1, 2, 4)[i % 3] for i, name in enumerate(FORMATS)}


@pytest.mark.parametrize("name", FORMATS)
def test_few_rows(emulated: Device, name: str) -> None:
    check = checks.check_product
    check(emulated, name, rows=9, cols=max(64, 5 * block_cols(name)), n=FEW[name])


@pytest.mark.parametrize("name", FORMATS)
def test_many_rows(emulated: Device, name: str) -> None:
    checks.check_product(emulated, name, rows=131, cols=max(96, block_cols(name)), n=17)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("n", [FEW["F32"], 17])
@pytest.mark.parametrize("cols", [1, 3, 71])
def test_rows_of_any_length(emulated: Device, name: str, n: int, cols: int) -> None:
    checks.check_product(emulated, name, rows=3, cols=cols, n=n)


@pytest.fixture
def tiles() -> Iterator[EmulatedDevice]:
    """A device with products of tiles of bfloat16."""
    device = EmulatedDevice(32, products=["F16", "BF16"])
    yield device
    device.close()


@pytest.mark.parametrize("n", [1, 8, 9, 16])
@pytest.mark.parametrize(("rows", "cols"), [(37, 352), (1, 32), (4099, 32)])
def test_bfloat16_in_tiles(tiles: Device, rows: int, cols: int, n: int) -> None:
    checks.check_product(tiles, "BF16", rows=rows, cols=cols, n=n)


def test_company_in_tiles_does_not_matter(tiles: Device) -> None:
    checks.check_company(tiles, "BF16", rows=37, cols=352, counts=[1, 2, 8, 9, 16])


def test_infinities_in_tiles(tiles: Device) -> None:
    tensor, x = random_tensor("BF16", 5, 64, seed=3), np.ones((3, 64), np.float32)
    x[1, 7], x[2, 9] = np.inf, np.nan
    actual = tiles.download(matmul(tiles, tiles.upload(x), upload_weight(tiles, [tensor])))
    assert np.isfinite(actual[0]).all() and np.isnan(actual[2]).all()
    np.testing.assert_array_equal(actual[1], np.where(decoded(tensor)[:, 7] > 0, np.inf, -np.inf))


@pytest.mark.parametrize(("rows", "n"), [(1, 65), (128, 64), (129, 130)])
def test_tiles_of_every_shape(emulated: Device, rows: int, n: int) -> None:
    checks.check_product(emulated, "Q8_0", rows=rows, cols=96, n=n)


@pytest.mark.parametrize(("name", "cols"), [("F16", 1280), ("Q5_1", 320)])
def test_company_of_few_rows_does_not_matter(emulated: Device, name: str, cols: int) -> None:
    checks.check_company(emulated, name, rows=11, cols=cols, counts=checks.each_few())


@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [
        *(("Q4_K", 37, 1280), ("Q5_K", 9, 768), ("Q6_K", 21, 1280), ("Q8_0", 19, 1312), ("Q4_0", 7, 96)),
        *(("Q4_K", 18, 2304), ("Q6_K", 21, 4352), ("Q4_0", 18, 2080)),  # eight chains
    ],
)
def test_company_in_bytes_does_not_matter(emulated: Device, name: str, rows: int, cols: int) -> None:
    checks.check_company(emulated, name, rows, cols, counts=[1, 2, 3, 8, 9, 16])


@pytest.mark.parametrize(("name", "cols"), [("Q4_K", 2304), ("Q5_K", 2048)])
def test_three_tiles_a_block(name: str, cols: int) -> None:
    device = EmulatedDevice()
    with checks.tiles(3):
        checks.check_company(device, name, rows=70, cols=cols, counts=[1, 16])
    device.close()


@pytest.mark.parametrize(("name", "cols"), [("Q8_0", 1312), ("Q4_0", 2080)])
def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch, name: str, cols: int) -> None:
    device = EmulatedDevice()
    monkeypatch.setattr(device, "shared_limit", 64 << 10)
    checks.check_company(device, name, rows=20, cols=cols, counts=[1, 8, 16])
    device.close()


@pytest.mark.parametrize("name", BYTES)
def test_steps_that_end_with_the_row(name: str) -> None:
    device = EmulatedDevice()
    for n in (3, 16):
        checks.check_product(device, name, rows=20, cols=4096, n=n)
    device.close()


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("n", [1, 7, 16])
def test_bytes_are_the_same_on_all_devices(name: str, n: int) -> None:
    devices = [EmulatedDevice(32), EmulatedDevice(64)]
    for rows, cols in ((18, 5 * block_cols(name)), (3, block_cols(name))):
        checks.check_same_everywhere(devices, name, rows, cols, n)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("n", "cols"), [(1, 32), (2, 512), (5, 320), (16, 96)])
def test_quantise(emulated: Device, n: int, cols: int, group: int) -> None:
    checks.check_quantise(emulated, n, cols, group)


@pytest.mark.parametrize("name", BYTES)
def test_nan_stays_in_its_row(emulated: Device, name: str) -> None:
    checks.check_nan_in_bytes(emulated, name)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("n", "cols"), [(1, 32), (3, 352)])
def test_quantised_gate(emulated: Device, activation: Activation, n: int, cols: int, group: int) -> None:
    checks.check_quantised_gate(emulated, activation, n, cols, group)


@pytest.mark.parametrize("n", [2, 17])
def test_parts_lie_side_by_side(emulated: Device, n: int) -> None:
    checks.check_parts(emulated, n)


@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize(("first", "second"), [("Q5_K", "Q4_K"), ("Q4_K", "Q6_K")])
def test_two_formats_in_one_launch(emulated: Device, first: str, second: str, n: int) -> None:
    checks.check_pair(emulated, first, second, n)


@pytest.mark.parametrize(("name", "cols"), [("F32", 37), ("Q4_K", 256)])
@pytest.mark.parametrize("n", [3, 18])
def test_row_stride(emulated: Device, name: str, cols: int, n: int) -> None:
    checks.check_row_stride(emulated, name, n, cols)


@pytest.mark.parametrize("n", [3, 19])
def test_infinities(emulated: Device, n: int) -> None:
    checks.check_infinities(emulated, n)


@pytest.mark.parametrize("n", [19, BLAS_ROWS])
def test_rows_beyond_the_range_of_halves(emulated: Device, n: int) -> None:
    checks.check_range(emulated, "Q4_K", n)
    checks.check_outliers(emulated, n)


@pytest.mark.parametrize(("rows", "cols"), [(3, 2176), (130, 3072)])
def test_columns_in_parts(emulated: Device, rows: int, cols: int) -> None:
    checks.check_product(emulated, "Q8_0", rows=rows, cols=cols, n=18)
    checks.check_company(emulated, "Q8_0", rows=3, cols=cols, counts=[17, 18, 70])


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "Q6_K"])
def test_enough_rows_for_a_library(emulated: Device, name: str) -> None:
    checks.check_product(emulated, name, rows=131, cols=256, n=BLAS_ROWS)


@pytest.mark.parametrize("cols", [3, 71])
def test_columns_that_a_library_does_not_take(emulated: Device, cols: int) -> None:
    checks.check_product(emulated, "F16", rows=3, cols=cols, n=BLAS_ROWS)


@pytest.mark.parametrize("features", [1, 1000])
def test_slices_of_features(emulated: Device, features: int) -> None:
    checks.check_slices(emulated, BLAS_ROWS, features)


@pytest.mark.parametrize(
    ("shape", "slots"), [((5, 7), False), ((4, 1024), False), ((4, 2100), False), ((4, 3, 72), True)]
)
def test_halves(emulated: Device, shape: tuple[int, ...], slots: bool) -> None:
    checks.check_halves(emulated, shape, slots=slots)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "F32"])
def test_unpacked_weights(emulated: Device, name: str) -> None:
    checks.check_unpacked(emulated, name, 2 * max(256, block_cols(name)))


def test_empty(emulated: Device) -> None:
    checks.check_empty(emulated)
