"""Checks of the grouped dynamic convolution on any device, against a loop over rows and channels in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce.ops.dynamic_conv import dynamic_conv
from luce.runtime.device import Device
from luce.runtime.step import SpanArrays


def check_dynamic_conv(device: Device, h: int, taps: int, group: int, lengths: Sequence[int]) -> None:
    """Spans of so many rows; strides are longer than the rows, and what lies between is NaN."""
    rng = np.random.default_rng(h + taps)
    n, groups = sum(lengths), h // group
    x, base = rng.standard_normal((n, h)).astype(np.float32), rng.standard_normal((taps, h)).astype(np.float32)
    coefficients = rng.standard_normal((n, 2, taps, groups)).astype(np.float32)
    coefficients[:, 0] = np.nan
    starts = np.cumsum([0, *lengths])
    table = np.array([(i, starts[i], rows, 5) for i, rows in enumerate(lengths)], np.int32)
    row_span = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    up = device.upload
    wide = up(np.pad(x, ((0, 0), (0, 3)), constant_values=np.nan))[:, :h]
    spans = SpanArrays(up(table), up(row_span), count=len(lengths), longest=max(lengths))
    actual = device.download(dynamic_conv(device, wide, up(base), up(coefficients)[:, 1], spans))
    expected = np.zeros((n, h))
    for start, rows in zip(starts, lengths, strict=False):
        for row in range(rows):
            for channel in range(h):
                for tap in range(min(taps, row + 1)):
                    weight = float(base[tap, channel]) + float(coefficients[start + row, 1, tap, channel // group])
                    expected[start + row, channel] += weight * float(x[start + row - tap, channel])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
