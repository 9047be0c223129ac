"""Products on the CPU with packed weights: matmul_packed and kernels of luce/cpu, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from luce.ops.matmul import matmul
from luce.ops.weight import upload_weight
from luce.runtime.cpu import CpuDevice
from tests.support import op_checks_matmul as checks
from tests.support.quant_blocks import FORMATS, PLAIN, block_cols, decoded, random_tensor, whole_blocks
from tests.support.quantised import seen


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    return CpuDevice()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "n"), [(16, 1), (37, 2), (9, 3), (131, 8), (48, 15), (33, 300)])
def test_product(device: CpuDevice, name: str, rows: int, n: int) -> None:
    for cols in (block_cols(name), 3 * whole_blocks(name, 96)):
        checks.check_product(device, name, rows=rows, cols=cols, n=n)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("cols", [1, 15, 17, 71])
def test_rows_of_floats_of_any_length(device: CpuDevice, name: str, cols: int) -> None:
    checks.check_product(device, name, rows=5, cols=cols, n=3)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_their_neighbours(device: CpuDevice, name: str) -> None:
    checks.check_neighbours(
        device, name, rows=37, cols=3 * block_cols(name), counts=[1, 2, 3, 7, 8, 9, 16, 17, 257, 300]
    )


@pytest.mark.parametrize("name", FORMATS)
def test_an_infinity_is_its_own_rows(device: CpuDevice, name: str) -> None:
    if name not in PLAIN:
        checks.check_nan_in_int8(device, name)


@pytest.mark.parametrize("name", ["NVFP4", "IQ1_M", "MXFP4"])
def test_scales_of_every_size(device: CpuDevice, name: str) -> None:
    """Nothing, subnormal and large ones, and what is no number: each weight row by itself, as one may dwarf others."""
    tensor = random_tensor(name, 40, whole_blocks(name, 96), 11, wild=True)
    x = np.random.default_rng(6).standard_normal((3, tensor.cols)).astype(np.float32)
    actual, w = matmul(device, x, upload_weight(device, [tensor])), decoded(tensor).astype(np.float64)
    errors = np.abs(actual - seen(device, name, x) @ w.T)
    assert (errors <= 2e-5 * (np.abs(x) @ np.abs(w).T) + 1e-30).all()


def test_parts_of_several_types(device: CpuDevice) -> None:
    tensors = [
        random_tensor(name, rows, 256, 7) for name, rows in (("Q4_K", 48), ("F16", 5), ("Q6_K", 17), ("Q8_0", 3))
    ]
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    actual = matmul(device, x, upload_weight(device, tensors))
    expected = [seen(device, t.type.name, x) @ decoded(t).astype(np.float64).T for t in tensors]
    np.testing.assert_allclose(actual, np.concatenate(expected, axis=1), rtol=0, atol=2e-5 * np.abs(actual).max())


def test_rows_that_are_apart(device: CpuDevice) -> None:
    tensors = [random_tensor("Q4_0", 20, 64, 1), random_tensor("F32", 4, 64, 2)]
    wide = np.random.default_rng(4).standard_normal((5, 200)).astype(np.float32)
    weight = upload_weight(device, tensors)
    np.testing.assert_array_equal(matmul(device, wide[:, 30:94], weight), matmul(device, wide[:, 30:94].copy(), weight))


def test_weights_stay_as_the_file_holds_them(device: CpuDevice) -> None:
    tensor = random_tensor("Q6_K", 18, 512, 5)
    (part,) = upload_weight(device, [tensor]).parts
    np.testing.assert_array_equal(part.data, tensor.raw)


def test_many_threads_at_the_same_time(device: CpuDevice) -> None:
    """Shards of one process share the pool: each result is that of its own product, also of the same weight."""
    from concurrent.futures import ThreadPoolExecutor

    weights = [upload_weight(device, [random_tensor("Q4_K", 512, 512, seed)]) for seed in range(6)]
    x = np.random.default_rng(5).standard_normal((3, 512)).astype(np.float32)
    rows = [x, x[::-1].copy()]
    alone = [[matmul(device, own, weight) for weight in weights] for own in rows]

    def again(number: int) -> bool:
        weight, own = number % len(weights), number // len(weights)
        return all((matmul(device, rows[own], weights[weight]) == alone[own][weight]).all() for _ in range(200))

    with ThreadPoolExecutor(2 * len(weights)) as threads:
        assert all(threads.map(again, range(2 * len(weights))))
