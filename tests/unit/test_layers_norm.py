"""Norms before products, and results added to the stream: what one row's products do themselves, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from luce.layers.decoder_layer import Residual
from luce.layers.norm import Norm
from luce.ops.activation import add
from luce.ops.matmul import matmul
from luce.ops.norm import Unnormed
from luce.ops.weight import Weight, upload_weight
from tests.support.emulated import EmulatedDevice
from tests.support.quant_blocks import random_tensor

HIDDEN = 1024


def _floats(device: EmulatedDevice, *shape: int) -> np.ndarray:
    return device.upload(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def _weight(device: EmulatedDevice) -> Weight:
    return upload_weight(device, [random_tensor("Q8_0", HIDDEN, HIDDEN, 1)])


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({}, True),
        ({"alone": False}, False),
        ({"rows": 2}, False),
        ({"centred": True}, False),
        ({"adding": True}, False),
    ],
)
def test_a_row_is_left_to_its_products(changed: dict[str, int], left: bool) -> None:
    facts = {"alone": True, "rows": 1, "centred": False, "adding": False} | changed
    device = EmulatedDevice()
    x, delta, weight = (_floats(device, *shape) for shape in ((facts["rows"], HIDDEN), (2, HIDDEN), (HIDDEN,)))
    added = delta[: facts["rows"]] if facts["adding"] else None
    norm, reader = Norm(weight, 1e-6, centred=bool(facts["centred"])), _weight(device)
    expected = device.download(x) if added is None else device.download(x) + device.download(added)
    y = norm.of_sum(device, x, added, reader, alone=bool(facts["alone"]))
    assert isinstance(y, Unnormed) == left
    np.testing.assert_array_equal(device.download(x), expected)
    np.testing.assert_array_equal(device.download(matmul(device, y, reader)), matmul(device, norm(device, x), reader))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_product_is_added_to_the_stream(rows: int) -> None:
    device = EmulatedDevice()
    weight, start, y = _weight(device), _floats(device, rows, HIDDEN), _floats(device, rows, HIDDEN + 1)[:, :HIDDEN]
    stream = Residual(device, device.upload(device.download(start)))
    stream.add_product(y, weight)
    assert (stream.delta is None) == (rows == 1)
    add(device, start, matmul(device, y, weight))
    np.testing.assert_array_equal(device.download(stream.settle()), device.download(start))
