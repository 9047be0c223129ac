"""Checks of the rotary embedding on any device: angles against exact fractions, rotations against complex products."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from luce.ops.qkv import HeadNorms, Rotation, prepare_queries, temper
from luce.ops.rope import rope_table
from luce.runtime.device import Device
from luce.runtime.step import STRETCHED

# pi to 60 digits, to reduce angles exactly.
_TURN = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494")


def turned(position: int, frequency: float) -> tuple[float, float]:
    """cos and sin of the exact product of an integer and a double."""
    angle = Fraction(frequency) * position
    reduced = float(angle - _TURN * round(angle / _TURN))
    return math.cos(reduced), math.sin(reduced)


def frequencies(half: int, base: float) -> NDArray[np.float64]:
    return np.array([base ** (-i / half) for i in range(half)])


def check_table(device: Device, positions: NDArray[np.int32], half: int, base: float) -> None:
    """Each value is within float32 rounding of the exact one, also at a million positions."""
    omega = frequencies(half, base)
    axes = (np.arange(half) % 3).astype(np.int32)
    table = device.download(rope_table(device, device.upload(positions), device.upload(omega), device.upload(axes)))
    assert table.dtype == np.float32
    assert table.shape == (len(positions), half, 2)
    for row, position in enumerate(positions.tolist()):
        for i in range(half):
            own = position if positions.ndim == 1 else position[axes[i]]
            # The double product is off by up to half an ulp: 1e-10 at a million; float32 rounds to 6e-8.
            np.testing.assert_allclose(table[row, i], turned(own, omega[i]), rtol=0, atol=6.1e-8)


def check_stretched(device: Device, half: int) -> None:
    """Positions from STRETCHED on count from there and take the second frequencies; the others have the bits that they
    have alone."""
    short, long = frequencies(half, 1e4), frequencies(half, 1e4) / np.linspace(1.1, 9, half)
    positions = np.array([0, 5, 4095, STRETCHED - 1, STRETCHED, STRETCHED + 5, STRETCHED + 131071], np.int32)
    axes = device.upload(np.zeros(half, np.int32))

    def table(positions: NDArray[np.int32], frequencies: NDArray[np.float64]) -> NDArray[np.float32]:
        return device.download(rope_table(device, device.upload(positions), device.upload(frequencies), axes))

    found = table(positions, np.stack((short, long)))
    np.testing.assert_array_equal(found[:4], table(positions[:4], short))
    np.testing.assert_array_equal(found[4:], table(positions[4:] - np.int32(STRETCHED), long))
    assert (found[4, :, 0] == 1).all() and (found[5] != found[1]).any()


def check_rope(device: Device, n: int, heads: int, d: int, half: int, *, adjacent: bool) -> None:
    """Pairs as complex numbers times e^(i phi); the other elements, and the columns beside, keep their bits."""
    rng = np.random.default_rng(n * d)
    x = rng.standard_normal((n, heads, d)).astype(np.float32)
    phi = rng.uniform(-np.pi, np.pi, (n, half))
    table = np.stack((np.cos(phi), np.sin(phi)), axis=-1).astype(np.float32)
    fused = np.full((n, heads * (d + 3) + 2), 7.0, np.float32)
    fused[:, : heads * (d + 3)].reshape(n, heads, d + 3)[:, :, :d] = x
    on_device = device.upload(fused)
    view = on_device[:, : heads * (d + 3)].reshape(n, heads, d + 3)[..., :d]
    prepare_queries(device, view, HeadNorms(), Rotation(device.upload(table), adjacent))
    after = device.download(on_device)
    parts = after[:, : heads * (d + 3)].reshape(n, heads, d + 3)
    turn = table[:, None, :, 0].astype(np.float64) + 1j * table[:, None, :, 1].astype(np.float64)
    real = [2 * i if adjacent else i for i in range(half)]
    imaginary = [2 * i + 1 if adjacent else i + half for i in range(half)]
    expected = (x[..., real].astype(np.float64) + 1j * x[..., imaginary].astype(np.float64)) * turn
    np.testing.assert_allclose(parts[..., real], expected.real, rtol=0, atol=1e-6)
    np.testing.assert_allclose(parts[..., imaginary], expected.imag, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(parts[..., 2 * half : d], x[..., 2 * half :])
    assert (parts[..., d:] == 7).all()
    assert (after[:, heads * (d + 3) :] == 7).all()


def check_rows_alone(device: Device, heads: int, d: int) -> None:
    """A row's bits are the same alone and at any place of 16 rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, heads, d)).astype(np.float32)
    positions = rng.integers(0, 1 << 20, 16).astype(np.int32)
    omega, axes = device.upload(frequencies(d // 2, 1e6)), device.upload(np.zeros(d // 2, np.int32))

    def run(start: int, stop: int) -> NDArray[np.uint32]:
        part = device.upload(x[start:stop].copy())
        table = rope_table(device, device.upload(positions[start:stop]), omega, axes)
        prepare_queries(device, part, HeadNorms(), Rotation(table, adjacent=False))
        bits: NDArray[np.uint32] = device.download(part).view(np.uint32)
        return bits

    whole = run(0, 16)
    for start, stop in ((0, 1), (15, 16), (3, 5), (1, 8), (2, 15)):
        np.testing.assert_array_equal(run(start, stop), whole[start:stop])


def check_temper(device: Device, n: int, heads: int, d: int) -> None:
    """Each row by its own position's factor; of four axes the first counts; columns beside do not change."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, heads, d)).astype(np.float32)
    positions = rng.choice([0, 63, 64, 127, 128, 100_000, 262143], n).astype(np.int32)
    factors = [1 + 0.1 * math.log(1 + position // 64) for position in positions.tolist()]
    expected = x * np.array(factors)[:, None, None]
    axes = np.stack((positions, *rng.integers(0, 9, (3, n))), axis=1).astype(np.int32)
    for given in (positions, axes):
        fused = device.upload(np.pad(x, ((0, 0), (0, 0), (0, 3)), constant_values=7.0))
        temper(device, fused[..., :d], device.upload(given), scale=0.1, length=64)
        after = device.download(fused)
        np.testing.assert_allclose(after[..., :d], expected, rtol=2e-7)
        assert (after[..., d:] == 7).all()
