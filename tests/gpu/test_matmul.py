"""matmul on the GPU: every format and row count, sums of real length, equal bits where they are promised."""

from __future__ import annotations

import numpy as np
import pytest

from luce.models.spec import Activation
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import BLAS_ROWS
from luce.ops.weight import Weight, WeightPart, upload_weight
from luce.runtime.device import Device
from tests.support import op_checks_matmul as checks
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import FORMATS, PLAIN, block_cols, decoded, random_tensor
from tests.support.quantised import BYTES, seen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
def test_company_of_few_rows_does_not_matter(gpu: Device, name: str) -> None:
    checks.check_company(gpu, name, rows=133, cols=2816, counts=checks.each_few())


@pytest.mark.parametrize("name", BYTES)
def test_company_of_blocks_of_three_tiles_does_not_matter(gpu: Device, name: str) -> None:
    checks.check_company(gpu, name, rows=4300, cols=6144, counts=[1, 3, 8, 9, 16])


@pytest.mark.parametrize(("first", "second"), [("Q5_K", "Q4_K"), ("Q4_K", "Q6_K")])
@pytest.mark.parametrize("n", [1, 2, 8, 16])
def test_two_formats_in_one_launch(gpu: Device, first: str, second: str, n: int) -> None:
    checks.check_pair(gpu, first, second, n)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 33, 100, BLAS_ROWS + 8])
def test_product(gpu: Device, name: str, n: int) -> None:
    checks.check_product(gpu, name, rows=133, cols=2816, n=n)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("n", [1, 16, 33, BLAS_ROWS])
@pytest.mark.parametrize("cols", [1, 3, 71, 1027])
def test_rows_of_any_length(gpu: Device, name: str, n: int, cols: int) -> None:
    checks.check_product(gpu, name, rows=5, cols=cols, n=n)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize("n", [1, 16, 512])
def test_product_of_real_size(gpu: Device, name: str, n: int) -> None:
    checks.check_product(gpu, name, rows=1024, cols=17408, n=n)


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
def test_equal_steps_give_equal_bits(gpu: Device, name: str) -> None:
    tensor = random_tensor(name, 1024, 5120, seed=1)
    x = gpu.upload(np.random.default_rng(2).standard_normal((600, 5120)).astype(np.float32))
    weight = upload_weight(gpu, [tensor])
    results = [gpu.download(matmul(gpu, x, weight)) for _ in range(3)]
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


def test_a_library_waits_for_weights_on_their_way(gpu: Device) -> None:
    rng = np.random.default_rng(4)
    x, matrix = (rng.standard_normal((rows, 8192)).astype(np.float32) for rows in (200, 4096))
    there, results = gpu.upload(x), []
    for wait in (lambda: None, gpu.synchronize):
        weight, out = gpu.load(matrix), gpu.empty((200, 4096))
        wait()
        gpu.gemm(there, weight, out)
        results.append(gpu.download(out))
        # What the next array finds in this memory.
        gpu.write(weight, np.zeros_like(matrix))
        del weight
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("n", [19, BLAS_ROWS])
def test_rows_beyond_the_range_of_halves(gpu: Device, n: int) -> None:
    checks.check_range(gpu, "Q4_K", n)
    checks.check_outliers(gpu, n)


@pytest.mark.parametrize("features", [1, 1000])
def test_slices_of_features(gpu: Device, features: int) -> None:
    checks.check_slices(gpu, BLAS_ROWS, features)


@pytest.mark.parametrize(("shape", "slots"), [((5, 7), False), ((40, 17408), False), ((50, 8, 512), True)])
def test_halves(gpu: Device, shape: tuple[int, ...], slots: bool) -> None:
    checks.check_halves(gpu, shape, slots=slots)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "F32"])
def test_unpacked_weights(gpu: Device, name: str) -> None:
    checks.check_unpacked(gpu, name, 2816)


def test_company_of_many_rows_does_not_matter(gpu: Device) -> None:
    checks.check_company(gpu, "Q4_K", rows=300, cols=2816, counts=[17, 63, 64, 65, 128, BLAS_ROWS - 1])


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("lanes", [32, 64])
def test_bytes_are_the_same_on_all_devices(gpu: Device, name: str, lanes: int) -> None:
    for n in (1, 2, 8, 16):
        checks.check_same_everywhere([gpu, EmulatedDevice(lanes)], name, 40, 5 * block_cols(name), n)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("n", "cols"), [(1, 5120), (5, 320), (16, 17408)])
def test_quantise(gpu: Device, n: int, cols: int, group: int) -> None:
    checks.check_quantise(gpu, n, cols, group)


@pytest.mark.parametrize("name", BYTES)
def test_nan_stays_in_its_row(gpu: Device, name: str) -> None:
    checks.check_nan_in_bytes(gpu, name)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_quantised_gate(gpu: Device, activation: Activation, n: int, group: int) -> None:
    checks.check_quantised_gate(gpu, activation, n, 17408, group)


@pytest.mark.parametrize("n", [1, 2, 16, 17, 100])
def test_parts_lie_side_by_side(gpu: Device, n: int) -> None:
    checks.check_parts(gpu, n)


@pytest.mark.parametrize(("name", "cols"), [("F32", 37), ("F16", 91), ("Q4_K", 256), ("Q8_0", 96)])
@pytest.mark.parametrize("n", [1, 3, 16, 18])
def test_row_stride(gpu: Device, name: str, cols: int, n: int) -> None:
    checks.check_row_stride(gpu, name, n, cols)


@pytest.mark.parametrize("n", [3, 16, 19])
def test_infinities(gpu: Device, n: int) -> None:
    checks.check_infinities(gpu, n)


def test_empty(gpu: Device) -> None:
    checks.check_empty(gpu)


@pytest.mark.parametrize("n", [1, 17])
def test_weights_beyond_two_gigabytes(gpu: Device, n: int) -> None:
    tensor = random_tensor("Q8_0", 1, 32768, seed=9)
    rows = 2**31 // tensor.raw.shape[1] + 100
    data = gpu.zeros((rows, tensor.raw.shape[1]), np.uint8)
    data[rows - 1] = gpu.upload(tensor.raw[0])
    weight = Weight(rows, 32768, (WeightPart(data, tensor.type, 0, rows),))
    x = np.random.default_rng(1).standard_normal((n, 32768)).astype(np.float32)
    actual = gpu.download(matmul(gpu, gpu.upload(x), weight))
    w = decoded(tensor)[0].astype(np.float64)
    x = seen(gpu, "Q8_0", x)
    limit = checks.product_limit(x, w[None], halves=checks.rounds_to_halves(gpu, "Q8_0", n))[:, 0]
    assert (np.abs(actual[:, -1] - x.astype(np.float64) @ w) <= limit).all()
    assert not actual[:, :-1].any()
