"""Checks of the norms on any device, against their formulas in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.ops.fp16 import Halves
from luce.ops.norm import add_rms_norm, head_rms_norm, layer_norm, quantised_rms_norm, rms_norm, rms_norm_to_fp16
from luce.ops.quantise import quantise
from luce.runtime.device import Device
from tests.support.quantised import same_halves, same_rows

EPS = 1e-6


def formula(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * weight.astype(np.float64)


def rows(n: int, d: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows of very different sizes; the second is zero, the third so small that eps decides."""
    x = np.random.default_rng(seed).standard_normal((n, d)) * 10.0 ** (np.arange(n) % 7 - 3)[:, None]
    x[1:2] = 0
    x[2:3] *= 1e-4
    return x.astype(np.float32)


def vector(d: int) -> NDArray[np.float32]:
    return np.random.default_rng(d).uniform(0.2, 3, d).astype(np.float32)


def close(actual: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=3e-6, atol=1e-12)


def check_rms_norm(device: Device, n: int, d: int) -> None:
    """A contiguous matrix, and a slice of a wider one."""
    x, weight = rows(n, d), vector(d)
    w = device.upload(weight)
    close(device.download(rms_norm(device, device.upload(x), w, EPS)), formula(x, weight))
    wide = device.upload(np.pad(x, ((0, 0), (3, 4)), constant_values=np.nan))
    close(device.download(rms_norm(device, wide[:, 3 : 3 + d], w, EPS)), formula(x, weight))


def check_add_rms_norm(device: Device, n: int, d: int) -> None:
    """The stream holds the float32 sum afterwards; the columns beside the slices do not change."""
    x, delta, weight = rows(n, d), rows(n, d, 1), vector(d)
    stream = device.upload(np.pad(x, ((0, 0), (0, 5)), constant_values=7.0))
    more = device.upload(np.pad(delta, ((0, 0), (2, 0)), constant_values=np.nan))
    y = add_rms_norm(device, stream[:, :d], more[:, 2:], device.upload(weight), EPS)
    after = device.download(stream)
    np.testing.assert_array_equal(after[:, :d], x + delta)
    assert (after[:, d:] == 7).all()
    close(device.download(y), formula(x + delta, weight))


def check_layer_norm(device: Device, n: int, d: int, *, biased: bool) -> None:
    """Rows with a mean far from 0, contiguous and in a slice of a wider matrix; a row's bits are the same alone."""
    x, weight, bias = rows(n, d) + np.float32(3), vector(d), vector(d) - 2
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPS) * weight + (bias if biased else 0)
    w, b = device.upload(weight), device.upload(bias) if biased else None
    whole = device.download(layer_norm(device, device.upload(x), w, b, EPS))
    # The mean's rounding is to be seen where a row hardly differs from it.
    slack = 1e-6 * np.abs(x).max(axis=1, keepdims=True) / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPS)
    assert (np.abs(whole - expected) <= 4e-6 * np.abs(expected) + slack * np.abs(weight) + 1e-6).all()
    padded = device.upload(np.pad(x, ((0, 0), (3, 4)), constant_values=np.nan))
    np.testing.assert_array_equal(device.download(layer_norm(device, padded[:, 3 : 3 + d], w, b, EPS)), whole)
    np.testing.assert_array_equal(device.download(layer_norm(device, device.upload(x[-1:]), w, b, EPS)), whole[-1:])


def check_quantised_norm(device: Device, n: int, d: int, *, adding: bool, group: int) -> None:
    """The norm of the other ops, and the int8 rows of quantise of it; padded rows are zeros."""
    x, delta, weight = rows(n, d), rows(n, d, 1), device.upload(vector(d))
    first, second = device.upload(x), device.upload(x)
    more = device.upload(delta) if adding else None
    made = quantised_rms_norm(device, first, more, weight, EPS, group)
    plain = rms_norm(device, second, weight, EPS) if more is None else add_rms_norm(device, second, more, weight, EPS)
    assert made.shape == (n, d)
    np.testing.assert_array_equal(device.download(made.x), device.download(plain))
    np.testing.assert_array_equal(device.download(first), device.download(second))
    same_rows(device, made, quantise(device, plain, group))


def check_head_rms_norm(device: Device, n: int, heads: int, d: int) -> None:
    """In place on heads with gaps between, like queries beside their gates; the gates do not change."""
    x, weight = rows(n * heads, d).reshape(n, heads, d), vector(d)
    fused = np.full((n, heads * 2 * d + 9), 7.0, np.float32)
    fused[:, : heads * 2 * d].reshape(n, heads, 2 * d)[:, :, :d] = x
    on_device = device.upload(fused)
    head_rms_norm(device, on_device[:, : heads * 2 * d].reshape(n, heads, 2 * d)[..., :d], device.upload(weight), EPS)
    after = device.download(on_device)
    parts = after[:, : heads * 2 * d].reshape(n, heads, 2 * d)
    close(parts[..., :d], formula(x, weight))
    assert (parts[..., d:] == 7).all()
    assert (after[:, heads * 2 * d :] == 7).all()


def check_rows_alone(device: Device, d: int, heads: int) -> None:
    """A row's bits are the same alone and at any place of 1..16 rows."""
    x, weight = rows(16, d), vector(d)
    w = device.upload(weight)
    whole = device.download(rms_norm(device, device.upload(x), w, EPS))
    split = x[:, : d // heads * heads].reshape(16, heads, -1)
    head_weight = device.upload(vector(d // heads))
    heads_whole = device.upload(split)
    head_rms_norm(device, heads_whole, head_weight, EPS)
    normed = device.download(heads_whole)
    for start, stop in ((0, 1), (15, 16), (3, 5), (1, 8), (2, 15)):
        part = device.download(rms_norm(device, device.upload(x[start:stop]), w, EPS))
        np.testing.assert_array_equal(part.view(np.uint32), whole[start:stop].view(np.uint32))
        heads_part = device.upload(split[start:stop])
        head_rms_norm(device, heads_part, head_weight, EPS)
        np.testing.assert_array_equal(device.download(heads_part).view(np.uint32), normed[start:stop].view(np.uint32))


def check_no_rows(device: Device) -> None:
    """A step may need no logits."""
    w = device.upload(vector(8))
    assert rms_norm(device, device.zeros((0, 8)), w, EPS).shape == (0, 8)


def check_fp16_norm(
    device: Device, n: int, d: int, *, adding: bool, beside: int = 4, more_beside: int = 0, top: int = 15
) -> None:
    """The halves of the norm's floats, and the same sums; rows that need a scale, and an infinity.

    `beside`: columns of the stream behind the d of its rows; `more_beside`: of what is added.
    """
    x, delta, weight = rows(n, d), rows(n, d, 1), device.upload(vector(d) * np.float32(2.0**-9))
    x[-1, -1] = np.inf
    streams = [device.upload(np.pad(x, ((0, 0), (0, beside)))) for _ in range(2)]
    more = device.upload(np.pad(delta, ((0, 0), (0, more_beside))))[:, :d] if adding else None
    halves = rms_norm_to_fp16(device, streams[0][:, :d], more, weight, EPS, top)
    other = streams[1][:, :d]
    floats = rms_norm(device, other, weight, EPS) if more is None else add_rms_norm(device, other, more, weight, EPS)
    same_halves(device, halves, floats, top)
    np.testing.assert_array_equal(*(device.download(stream) for stream in streams))


def check_added_halves(device: Device, n: int, d: int, *, beside: int = 4, top: int = 15) -> None:
    """The bits of the float32 delta that the halves are, and float64's norm; `beside` as above."""
    x, weight = rows(n, d), vector(d)
    values = rows(n, d, 1).clip(-1000, 1000).astype(np.float16)
    scales = (2.0 ** (np.arange(n) % 5 - 2)).astype(np.float32)
    delta = values * scales[:, None]
    streams = [device.upload(np.pad(x, ((0, 0), (0, beside)))) for _ in range(2)]
    halves, w = Halves(device.upload(values), device.upload(scales)), device.upload(weight)
    made = rms_norm_to_fp16(device, streams[0][:, :d], halves, w, EPS, top)
    floats = rms_norm_to_fp16(device, streams[1][:, :d], device.upload(delta), w, EPS, top)
    for own, other in ((made.values, floats.values), (made.scale, floats.scale), streams):
        np.testing.assert_array_equal(device.download(own), device.download(other))
    after = device.download(streams[0])
    np.testing.assert_array_equal(after[:, :d], x + delta)
    assert not after[:, d:].any()
    scale = device.download(made.scale)[:, None].astype(np.float64)
    exact = formula(x + delta, weight)
    out = device.download(made.values)[:, :d] * scale
    assert (np.abs(out - exact) <= (2.0**-11 + 3e-6) * np.abs(exact) + 2.0**-25 * scale).all()
