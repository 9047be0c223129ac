"""embed and take_rows on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

from luce.ops.embedding import embed
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Device
from tests.support.op_checks_embedding import check_embed, check_nothing, check_take_rows
from tests.support.quant_blocks import FORMATS, PLAIN, decoded, random_tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cols", [256, 5120])
def test_embed_equals_gguf(gpu: Device, name: str, cols: int) -> None:
    check_embed(gpu, name, rows=301, cols=cols, seed=1)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("cols", [1, 3, 67, 1027])
def test_embed_rows_of_any_length(gpu: Device, name: str, cols: int) -> None:
    check_embed(gpu, name, rows=6, cols=cols, seed=2)


@pytest.mark.parametrize(("n", "m", "features"), [(1, 1, 1), (700, 33, 5120), (3, 9, 33)])
def test_take_rows(gpu: Device, n: int, m: int, features: int) -> None:
    check_take_rows(gpu, n, m, features)


def test_nothing(gpu: Device) -> None:
    check_nothing(gpu)


def test_tables_beyond_two_gigabytes(gpu: Device) -> None:
    tensor = random_tensor("F16", 1, 5120, seed=9)
    rows = 2**31 // tensor.raw.shape[1] + 100
    data = gpu.zeros((rows, tensor.raw.shape[1]), np.uint8)
    data[rows - 1] = gpu.upload(tensor.raw[0])
    table = Weight(rows, 5120, (WeightPart(data, tensor.type, 0, rows),))
    actual = gpu.download(embed(gpu, table, gpu.upload(np.array([rows - 1, 0], np.int32))))
    np.testing.assert_array_equal(actual[0], decoded(tensor)[0])
    assert not actual[1].any()
