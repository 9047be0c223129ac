"""embed, take_rows and kernels/embedding.cu against the gguf package."""

from __future__ import annotations

import itertools

import numpy as np

from luce.ops.embedding import embed
from luce.ops.weight import Weight, WeightPart
from luce.runtime.device import Device
from tests.support.devices import on_devices
from tests.support.op_checks_embedding import check_embed, check_nothing, check_take_rows
from tests.support.quant_blocks import FORMATS, PLAIN, block_cols, decoded, random_tensor


@on_devices(
    "name, rows, cols, seed",
    host=[(name, 7, 2 * max(16, block_cols(name)), 3) for name in FORMATS],
    emulated=[
        *((name, 5, max(256, 3 * block_cols(name)), 1) for name in FORMATS),
        # Blocks enough to name every vector of a grid of 2048.
        *((name, 1000, 256, 1) for name in FORMATS if name.startswith(("IQ1", "IQ2", "IQ3"))),
    ],
    gpu=[(name, 301, cols, 1) for name in FORMATS for cols in (256, 5120)],
)
def test_embed_equals_gguf(device: Device, name: str, rows: int, cols: int, seed: int) -> None:
    check_embed(device, name, rows=rows, cols=cols, seed=seed)


@on_devices(
    "name, cols",
    host=[],
    emulated=itertools.product(PLAIN, [1, 3, 67]),
    gpu=itertools.product(PLAIN, [1, 3, 67, 1027]),
)
def test_embed_rows_of_any_length(device: Device, name: str, cols: int) -> None:
    check_embed(device, name, rows=6, cols=cols, seed=2)


@on_devices(
    "n, m, features",
    host=[(5, 8, 11)],
    emulated=[(1, 1, 1), (7, 3, 300), (3, 9, 33)],
    gpu=[(1, 1, 1), (700, 33, 5120), (3, 9, 33)],
)
def test_take_rows(device: Device, n: int, m: int, features: int) -> None:
    check_take_rows(device, n, m, features)


@on_devices()
def test_nothing(device: Device) -> None:
    check_nothing(device)


@on_devices(host=[], emulated=[])
def test_tables_beyond_two_gigabytes(device: Device) -> None:
    tensor = random_tensor("F16", 1, 5120, seed=9)
    rows = 2**31 // tensor.raw.shape[1] + 100
    data = device.zeros((rows, tensor.raw.shape[1]), np.uint8)
    data[rows - 1] = device.upload(tensor.raw[0])
    table = Weight(rows, 5120, (WeightPart(data, tensor.type, 0, rows),))
    actual = device.download(embed(device, table, device.upload(np.array([rows - 1, 0], np.int32))))
    np.testing.assert_array_equal(actual[0], decoded(tensor)[0])
    assert not actual[1].any()
