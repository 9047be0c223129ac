"""Checks of embed and take_rows on any device: exact, as there are no sums."""

from __future__ import annotations

import numpy as np

from luce.ops.embedding import embed, take_rows
from luce.ops.weight import upload_weight
from luce.runtime.device import Device
from tests.support.quant_blocks import decoded, random_tensor


def check_embed(device: Device, name: str, rows: int, cols: int, seed: int) -> None:
    """All rows in random order, some twice, equal those of the gguf package exactly (NaN: as NaN)."""
    tensor = random_tensor(name, rows, cols, seed, wild=True)
    tokens = np.random.default_rng(seed).permutation(np.arange(rows + rows // 2) % rows).astype(np.int32)
    table = upload_weight(device, [tensor])
    actual = device.download(embed(device, table, device.upload(tokens)))
    expected = decoded(tensor)[tokens]
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


def check_take_rows(device: Device, n: int, m: int, features: int) -> None:
    """A selection from a slice of a wider matrix."""
    rng = np.random.default_rng(n)
    wide = rng.standard_normal((n, features + 5)).astype(np.float32)
    rows = rng.integers(n, size=m).astype(np.int32)
    x = device.upload(wide)[:, 3 : 3 + features]
    actual = device.download(take_rows(device, x, device.upload(rows)))
    np.testing.assert_array_equal(actual, np.stack([wide[r, 3 : 3 + features] for r in rows]))


def check_nothing(device: Device) -> None:
    """No tokens and no rows: empty results of the right width."""
    table = upload_weight(device, [random_tensor("F32", 3, 8, 0)])
    none = device.upload(np.empty(0, np.int32))
    assert embed(device, table, none).shape == (0, 8)
    assert take_rows(device, device.zeros((2, 5)), none).shape == (0, 5)
