"""Checks of matmul on any device against float64, and of what it promises about equal bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luce.ops.matmul import FEW_ROWS, matmul
from luce.ops.weight import RawTensor, upload_weight
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.quant_blocks import decoded, random_tensor

Matrix = NDArray[np.float32]


def _x(n: int, cols: int, seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal((n, cols)).astype(np.float32)


def _product(device: Device, x: Matrix, tensors: Sequence[RawTensor]) -> Matrix:
    return device.download(matmul(device, device.upload(x), upload_weight(device, tensors)))


def check_product(device: Device, name: str, rows: int, cols: int, n: int) -> None:
    """Against float64 of gguf's values and the NumPy reference: the error is of float32 sums of `cols` terms."""
    tensor = random_tensor(name, rows, cols, seed=rows * 31 + cols)
    x = _x(n, cols, seed=n)
    w = decoded(tensor).astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T
    limit = (4 + np.sqrt(cols)) * 2.0**-24 * size + 1e-30
    actual = _product(device, x, [tensor])
    assert actual.dtype == np.float32
    assert actual.shape == (n, rows)
    error = np.abs(actual - x.astype(np.float64) @ w.T)
    assert (error <= limit).all(), f"{(error / limit).max():.1f} times the limit"
    reference = _product(HostDevice(), x, [tensor])
    assert (np.abs(actual - reference.astype(np.float64)) <= 2 * limit).all()


def check_company(device: Device, name: str, rows: int, cols: int, counts: Sequence[int]) -> None:
    """The first rows of x have the same bits in every batch size of `counts`, and at every place in the batch."""
    tensor = random_tensor(name, rows, cols, seed=5)
    x = _x(max(counts), cols, seed=6)
    whole = _product(device, x, [tensor])
    for n in counts:
        np.testing.assert_array_equal(_product(device, x[:n], [tensor]), whole[:n], err_msg=f"{n} rows")
        turned = np.roll(x[:n], 1, axis=0)
        np.testing.assert_array_equal(_product(device, turned, [tensor]), np.roll(whole[:n], 1, axis=0))


def check_parts(device: Device, n: int) -> None:
    """A weight of several tensors and formats is the products of each side by side, bit for bit."""
    tensors = [
        random_tensor("Q4_K", 7, 512, 1),
        random_tensor("F16", 1, 512, 2),
        random_tensor("Q8_0", 130, 512, 3),
        random_tensor("Q6_K", 12, 512, 4),
    ]
    x = _x(n, 512, seed=8)
    together = _product(device, x, tensors)
    apart = np.concatenate([_product(device, x, [t]) for t in tensors], axis=1)
    np.testing.assert_array_equal(together, apart)


def check_row_stride(device: Device, name: str, n: int, cols: int) -> None:
    """Slices of a wider x, on and off 16-byte boundaries, give the bits of a copy."""
    tensor = random_tensor(name, 9, cols, seed=11)
    weight = upload_weight(device, [tensor])
    for before, after in ((4, 3), (1, 2), (8, 4)):
        wide = _x(n, before + cols + after, seed=12)
        own = slice(before, before + cols)
        sliced = device.download(matmul(device, device.upload(wide)[:, own], weight))
        np.testing.assert_array_equal(sliced, _product(device, wide[:, own].copy(), [tensor]))


def check_infinities(device: Device, n: int) -> None:
    """An infinity in the last column and a NaN in one row stay where they belong: padding makes no NaN of them."""
    weight = upload_weight(device, [random_tensor("F32", 5, 13, seed=3)])
    w = decoded(random_tensor("F32", 5, 13, seed=3))
    x = _x(n, 13, seed=4)
    x[-1, -1] = np.inf
    x[0, 2] = np.nan
    actual = device.download(matmul(device, device.upload(x), weight))
    assert np.isnan(actual[0]).all()
    np.testing.assert_array_equal(actual[-1], np.where(w[:, -1] > 0, np.inf, -np.inf))
    assert np.isfinite(actual[1:-1]).all()


def check_empty(device: Device) -> None:
    """No rows in, none out."""
    weight = upload_weight(device, [random_tensor("F32", 5, 8, seed=3)])
    assert matmul(device, device.zeros((0, 8)), weight).shape == (0, 5)


def each_few() -> list[int]:
    """The row counts that matmul_vec serves."""
    return list(range(1, FEW_ROWS + 1))
