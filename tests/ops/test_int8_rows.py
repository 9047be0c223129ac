"""Rows as int8 and products of them against formulas in NumPy, in which sums are exact."""

from __future__ import annotations

from unittest import mock

import numpy as np
from numpy.typing import NDArray

from luce.ops import matmul_prefill
from luce.ops.fp16 import to_fp16
from luce.ops.int8_rows import Int8Rows, empty_int8, multiply, to_int8
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import BLAS_ROWS, copy_bytes, store_copy
from luce.ops.weight import Weight, upload_weight
from luce.runtime.device import Device
from tests.support.devices import on_devices
from tests.support.quant_blocks import decoded, random_tensor

F32 = np.float32
_INF = F32(np.inf)


def _quantised(x: NDArray[np.float32], factor: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """The values and scales of rows, in float32 as the kernel rounds."""
    most = np.abs(x).max(axis=1)
    inverse = np.divide(F32(127), most, out=np.zeros_like(most), where=most > 0)
    return np.rint(x * inverse[:, None]).astype(np.int8), most / F32(127) * factor


def _rows(n: int, cols: int, seed: int) -> NDArray[np.float32]:
    x = np.random.default_rng(seed).standard_normal((n, cols)).astype(F32)
    x[:, ::97] *= 20
    return x


@on_devices("n, cols", [(1, 8), (3, 128), (5, 136), (2, 2176), (4, 5000)], host=[])
def test_rows(device: Device, n: int, cols: int) -> None:
    x = _rows(n, cols, 1)
    x[0] = 0
    x[-1] *= F32(2.0**30)
    halves = to_fp16(device, device.upload(x))
    made = empty_int8(device, n, cols)
    to_int8(device, halves, made)
    half = device.download(halves.values).astype(F32)[:, :cols]
    values, scale = _quantised(half, device.download(halves.scale))
    own = device.download(made.values)
    assert own.shape == (n, -(-cols // 128) * 128)
    np.testing.assert_array_equal(own[:, :cols], values)
    assert not own[:, cols:].any()
    np.testing.assert_array_equal(device.download(made.scale), scale)
    assert (np.abs(own[1:, :cols]).max(axis=1) == 127).all()


@on_devices("columns", [8, 72], host=[])
def test_rows_without_scales_and_with_gaps(device: Device, columns: int) -> None:
    wide = _rows(3, 160, 2).astype(np.float16)
    made = empty_int8(device, 3, columns)
    to_int8(device, device.upload(wide)[:, 16 : 16 + columns], made)
    values, scale = _quantised(wide[:, 16 : 16 + columns].astype(F32), np.ones(3, F32))
    np.testing.assert_array_equal(device.download(made.values)[:, :columns], values)
    np.testing.assert_array_equal(device.download(made.scale), scale)


@on_devices("bad", [np.inf, -np.inf, np.nan], host=[])
def test_a_row_that_is_not_finite(device: Device, bad: float) -> None:
    """Its products are NaN, those of its neighbours are as ever."""
    x = np.ones((3, 128), np.float16)
    x[1, 77] = bad
    made = empty_int8(device, 3, 128)
    to_int8(device, device.upload(x), made)
    assert (device.download(made.values)[1] == 0).all() and device.download(made.scale)[1] == _INF
    out = device.empty((3, 16))
    multiply(device, made, _ones(device, 16), out)
    got = device.download(out)
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[[0, 2]], 128, rtol=1e-6)


def _ones(device: Device, rows: int) -> Int8Rows:
    made = empty_int8(device, rows, 128)
    to_int8(device, device.upload(np.ones((rows, 128), np.float16)), made)
    return made


@on_devices(
    "n, rows, cols", [(1, 4, 16), (7, 1030, 128), (145, 36, 512)], host=[], gpu=[(145, 36, 512), (1001, 5120, 17408)]
)
def test_products_have_exact_sums(device: Device, n: int, rows: int, cols: int) -> None:
    rng = np.random.default_rng(n)
    x, weight = (rng.standard_normal((count, cols)).astype(np.float16) for count in (n, rows))
    own = [empty_int8(device, count, cols) for count in (n, rows)]
    for made, values in zip(own, (x, weight), strict=True):
        to_int8(device, device.upload(values), made)
    out = device.empty((n, rows + 8))[:, 4 : 4 + rows]
    multiply(device, *own, out)
    (q, s), (p, t) = ((device.download(r.values).astype(np.float64), device.download(r.scale)) for r in own)
    expected = (q @ p.T).astype(F32) * s[:, None] * t
    np.testing.assert_array_equal(device.download(out), expected)


def _weight(device: Device, features: int) -> Weight:
    names = {"Q4_K": features, "F32": 3, "Q6_K": 130}
    weight = upload_weight(device, [random_tensor(name, rows, 512, i) for i, (name, rows) in enumerate(names.items())])
    weight.int8 = True
    return weight


@on_devices("slice_rows", [128, 1000], host=[])
def test_a_row_s_bits_depend_on_nothing_else(device: Device, slice_rows: int) -> None:
    """Neither on the rows beside it, nor on slices, nor on whether a copy of the weight is stored."""
    x = _rows(BLAS_ROWS + 5, 512, 3)
    weight = _weight(device, 257)
    with mock.patch.object(matmul_prefill, "BUFFER_BYTES", slice_rows * 512 * 2):
        whole = device.download(matmul(device, device.upload(x), weight))
        few = device.download(matmul(device, device.upload(x[:BLAS_ROWS]), weight))
        assert copy_bytes(device, weight) == weight.rows * (512 + 4)
        store_copy(device, weight)
        for part in weight.parts:
            if part.type.name != "F32":
                device.write(part.data, np.zeros(part.data.shape, np.uint8))
        stored = device.download(matmul(device, device.upload(x), weight))
    packed = [*range(257), *range(260, 390)]
    np.testing.assert_array_equal(few[:, packed], whole[:BLAS_ROWS, packed])
    np.testing.assert_array_equal(stored[:, packed], whole[:, packed])


@on_devices(host=[])
def test_the_error_of_products(device: Device) -> None:
    """Normal rows and weights: 127 steps to the largest of 512 values, about three standard deviations, make an error
    of (3 / 127)^2 / 12 of the mean square for each factor. F32 is multiplied as ever."""
    x = np.random.default_rng(4).standard_normal((BLAS_ROWS, 512)).astype(F32)
    tensors = [random_tensor(name, rows, 512, i) for i, (name, rows) in enumerate({"Q4_K": 257, "F32": 3}.items())]
    weight = upload_weight(device, tensors)
    weight.int8 = True
    exact = x.astype(np.float64) @ np.concatenate([decoded(t) for t in tensors]).astype(np.float64).T
    error = (device.download(matmul(device, device.upload(x), weight)) - exact) ** 2 / (exact**2).mean(axis=0)
    assert 2e-5 < error[:, :257].mean() < 4e-4
    assert error[:, 257:].mean() < 1e-9


def test_rows_are_cut_with_their_scales() -> None:
    rows = Int8Rows(np.arange(6).reshape(3, 2), np.arange(3))
    np.testing.assert_array_equal(rows[1:].values, [[2, 3], [4, 5]])
    np.testing.assert_array_equal(rows[1:].scale, [1, 2])
