"""Rows as int8 and products of them against formulas in NumPy, in which sums are exact."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.models.spec import Activation
from luce.ops import matmul_prefill
from luce.ops.fp16 import to_fp16
from luce.ops.int8_rows import Int8Rows, Int8Sums, empty_int8, gated_to_int8, multiply, to_floats, to_int8
from luce.ops.matmul import matmul
from luce.ops.matmul_prefill import BLAS_ROWS, copy_bytes, int8_sums, multiplies_int8, store_copy
from luce.ops.norm import rms_norm_to_int8
from luce.ops.weight import Weight, upload_weight
from luce.runtime.device import Device
from tests.support.devices import on_devices
from tests.support.op_checks_activation import gated
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
    multiply(device, own[0], own[1], out)
    (q, s), (p, t) = ((device.download(r.values).astype(np.float64), device.download(r.scale)) for r in own)
    expected = (q @ p.T).astype(F32) * s[:, None] * t
    np.testing.assert_array_equal(device.download(out), expected)


def _near(rows: Int8Rows, device: Device, exact: NDArray[np.float64]) -> None:
    """Rows are `exact`, rounded: by half a step, and what float32 adds."""
    n, cols = exact.shape
    values, scale = device.download(rows.values), device.download(rows.scale)
    assert values.shape == (n, -(-cols // 128) * 128) and not values[:, cols:].any()
    np.testing.assert_allclose(scale, np.abs(exact).max(axis=1) / 127, rtol=1e-5)
    error = np.abs(values[:, :cols] * scale[:, None].astype(np.float64) - exact).max(axis=1)
    assert (error <= scale * 0.5001 + 1e-6 * np.abs(exact).max(axis=1)).all()


@on_devices(
    "cols, activation",
    [(8, "silu"), (136, "gelu"), (520, "clamped_swiglu"), (4400, "silu")],
    host=[],
    gpu=[(17408, "silu"), (21504, "gelu")],
)
def test_gates_of_sums(device: Device, cols: int, activation: Activation) -> None:
    """Longer rows than a block keeps in shared memory too."""
    rng, n = np.random.default_rng(cols), 3
    sums = rng.integers(-(1 << 20), 1 << 20, (n, 2 * cols), np.int32)
    rows, features = rng.random(n).astype(F32) + F32(0.5), (rng.random(2 * cols) * 1e-5).astype(F32)
    both = (sums.astype(np.float64) * rows[:, None] * features).astype(np.float64)
    with mock.patch.object(device, "shared_limit", 4096 if cols == 4400 else device.shared_limit):
        made = gated_to_int8(device, Int8Sums(*map(device.upload, (sums, rows, features))), activation)
    assert made.shape == (n, cols)
    _near(made, device, gated(both[:, :cols], both[:, cols:], activation))


@on_devices("d", [8, 136, 5128], host=[])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("beside, more_beside", [(0, 0), (1, 0), (0, 1)])
def test_norms(device: Device, d: int, added: bool, beside: int, more_beside: int) -> None:
    """`beside`: columns of the stream behind the d of its rows; `more_beside`: of what is added."""
    rng = np.random.default_rng(d)
    x, delta, weight = (rng.standard_normal(shape).astype(F32) for shape in ((3, d), (3, d), d))
    stream = device.upload(np.pad(x, ((0, 0), (0, beside))))[:, :d]
    more = device.upload(np.pad(delta, ((0, 0), (0, more_beside))))[:, :d] if added else None
    made = rms_norm_to_int8(device, stream, more, device.upload(weight), 1e-6)
    total = x + delta if added else x
    np.testing.assert_array_equal(device.download(stream), total)
    exact = total.astype(np.float64)
    _near(made, device, exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-6) * weight)


@on_devices("d", [8, 136, 5128], host=[])
def test_norms_after_sums(device: Device, d: int) -> None:
    """The delta as sums gives the stream and the rows that the delta as floats gives."""
    rng = np.random.default_rng(d)
    x, weight = (rng.standard_normal(shape).astype(F32) for shape in ((3, d), d))
    values = rng.integers(-(1 << 20), 1 << 20, (3, d), np.int32)
    rows, features = rng.random(3).astype(F32), (rng.random(d) * 1e-6).astype(F32)
    sums = Int8Sums(*map(device.upload, (values, rows, features)))
    streams = [device.upload(x), device.upload(x)]
    made = [
        rms_norm_to_int8(device, stream, delta, device.upload(weight), 1e-6)
        for stream, delta in zip(
            streams, (sums, device.upload(values.astype(F32) * rows[:, None] * features)), strict=True
        )
    ]
    for own, other in zip(
        (streams[0], made[0].values, made[0].scale), (streams[1], made[1].values, made[1].scale), strict=True
    ):
        np.testing.assert_array_equal(device.download(own), device.download(other))
    np.testing.assert_array_equal(device.download(streams[0]), x + values.astype(F32) * rows[:, None] * features)
    floats = to_floats(device, sums)
    np.testing.assert_array_equal(device.download(floats), values.astype(F32) * rows[:, None] * features)


@on_devices("stored", [False, True], host=[])
def test_sums_are_those_of_products(device: Device, stored: bool) -> None:
    """In slices of the weight, or by its copy: sums times scales are the bits of the product."""
    x = device.upload(_rows(BLAS_ROWS, 512, 5))
    weight = upload_weight(device, [random_tensor(name, 260, 512, i) for i, name in enumerate(("Q4_K", "Q6_K"))])
    assert not multiplies_int8(device, BLAS_ROWS, weight)
    weight.int8 = True
    assert multiplies_int8(device, BLAS_ROWS, weight) and not multiplies_int8(device, BLAS_ROWS - 1, weight)
    device.batch_invariant = True
    assert not multiplies_int8(device, BLAS_ROWS, weight), "short prompts have the bits of each"
    device.batch_invariant = False
    assert not multiplies_int8(device, BLAS_ROWS, _weight(device, 257))
    if stored:
        store_copy(device, weight)
    with mock.patch.object(matmul_prefill, "BUFFER_BYTES", 128 * 512 * 2):
        sums = int8_sums(device, x, weight)
        product = device.download(matmul(device, x, weight))
    values, rows, features = (device.download(part) for part in (sums.values, sums.rows, sums.features))
    np.testing.assert_array_equal(values.astype(F32) * rows[:, None] * features, product)


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
    rows = Int8Rows(2, np.arange(6).reshape(3, 2), np.arange(3))
    assert rows[1:].shape == (2, 2)
    np.testing.assert_array_equal(rows[1:].values, [[2, 3], [4, 5]])
    np.testing.assert_array_equal(rows[1:].scale, [1, 2])
