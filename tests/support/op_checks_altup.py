"""Checks of AltUp and of gates of which the largest count on any device, against the formulas in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.ops.altup import correct, keep_largest, match_magnitude, predict
from luce.runtime.device import Device

STREAMS = 4
Floats = NDArray[np.float32]


def _normal(*shapes: tuple[int, ...]) -> list[Floats]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _copies(x: Floats, beside: Floats) -> NDArray[np.float64]:
    """[n, 4, hidden]."""
    n, hidden = x.shape
    return np.concatenate((x[:, None], beside.reshape(n, STREAMS - 1, hidden)), axis=1).astype(np.float64)


def check_predict(device: Device, n: int, hidden: int) -> None:
    x, beside, router, weights = _normal((n, hidden), (n, 3 * hidden), (n, STREAMS), (STREAMS**2, STREAMS))
    copies = _copies(x, beside)
    c = np.einsum("km,nm->nk", weights.astype(np.float64), np.tanh(router.astype(np.float64)))
    expected = copies + np.einsum("nji,nih->njh", c.reshape(n, STREAMS, STREAMS), copies)
    on_device = [device.upload(each.copy()) for each in (x, beside)]
    predict(device, *on_device, device.upload(router), device.upload(weights))
    found = _copies(*(device.download(each) for each in on_device))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def check_correct(device: Device, n: int, hidden: int) -> None:
    x, beside, result, router = _normal((n, hidden), (n, 3 * hidden), (n, hidden), (n, STREAMS))
    weights, scale = _normal((STREAMS, STREAMS), (hidden,))
    copies = _copies(x, beside)
    d = 1 + np.tanh(router.astype(np.float64)) @ weights.T.astype(np.float64)
    expected = copies + d[..., None] * (result.astype(np.float64) - copies[:, 0])[:, None]
    on_device = [device.upload(each.copy()) for each in (x, beside)]
    constant = [device.upload(each) for each in (result, router, weights, scale)]
    scaled = device.download(correct(device, *on_device, *constant))
    found = _copies(*(device.download(each) for each in on_device))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scaled, expected[:, 0] * scale, rtol=1e-5, atol=1e-5)


def check_match_magnitude(device: Device, n: int, d: int) -> None:
    """One vector is too small for its own magnitude."""
    x, y = _normal((n, d), (n, 3, d))
    y[0, 1] *= np.float32(1e-4)
    square = (y.astype(np.float64) ** 2).mean(axis=2, keepdims=True)
    target = np.sqrt((x.astype(np.float64) ** 2).mean(axis=1))[:, None, None]
    expected = y * target / np.sqrt(np.maximum(square, 1e-5))
    on_device = device.upload(y.copy())
    match_magnitude(device, on_device, device.upload(x))
    np.testing.assert_allclose(device.download(on_device), expected, rtol=1e-5, atol=1e-9)


def check_keep_largest(device: Device, n: int, d: int, deviations: float) -> None:
    """In a slice of wider rows, about a mean that is not 0; what stands beside it stays."""
    (wide,) = _normal((n, 2 * d))
    wide += 3
    gate = wide[:, :d].astype(np.float64)
    spread = np.sqrt(((gate - gate.mean(axis=1, keepdims=True)) ** 2).mean(axis=1, keepdims=True))
    expected = np.maximum(0, gate - gate.mean(axis=1, keepdims=True) - deviations * spread)
    on_device = device.upload(wide.copy())
    keep_largest(device, on_device[:, :d], deviations)
    found = device.download(on_device)
    np.testing.assert_allclose(found[:, :d], expected, rtol=1e-4, atol=3e-6)
    np.testing.assert_array_equal(found[:, d:], wide[:, d:])


def check_rows_are_independent(device: Device, n: int, d: int) -> None:
    """The last row alone has the bits that it has beside others."""
    x, beside, router, weights = _normal((n, d), (n, 3 * d), (n, STREAMS), (STREAMS**2, STREAMS))
    found = []
    for rows in (slice(None), slice(n - 1, None)):
        own, others, routed = (device.upload(each[rows].copy()) for each in (x, beside, router))
        coefficients = device.upload(weights)
        predict(device, own, others, routed, coefficients)
        result = device.upload(x[rows].copy())
        scale = device.upload(np.ascontiguousarray(x[0]))
        scaled = correct(device, own, others, result, routed, coefficients[:STREAMS], scale)
        match_magnitude(device, others.reshape(-1, 3, d), own)
        keep_largest(device, own, 1.0)
        found.append([device.download(each)[-1] for each in (own, others, scaled)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
