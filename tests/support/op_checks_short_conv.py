"""Checks of the short convolution on any device, against sums over each row's own sequence in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luce.ops.short_conv import short_conv, write_inputs
from luce.runtime.device import Device
from luce.runtime.step import PAGE, PageView, SpanArrays


def check_short_conv(device: Device, h: int, kernel: int, lengths: Sequence[tuple[int, int]]) -> None:
    """Spans of (position, rows): sequences in scattered pages, of which only those of the newest `kernel` positions
    remain; rows behind a sequence's end hold NaN, as do all other pages."""
    rng = np.random.default_rng(h)
    taps = rng.standard_normal((h, kernel)).astype(np.float32)
    histories = [rng.standard_normal((position + rows, 3 * h)).astype(np.float32) for position, rows in lengths]
    first = [max(0, position - kernel + 1) // PAGE for position, _ in lengths]
    last = [(position + rows - 1) // PAGE for position, rows in lengths]
    counts = np.array([b - a + 1 for a, b in zip(first, last, strict=True)], np.int32)
    numbers = rng.permutation(int(counts.sum()) + 2).astype(np.int32)
    pool = np.full((len(numbers) * PAGE, 1, h), np.nan, np.float32)
    table, at = np.full((2, len(lengths), int(counts.max()) + 1), -1, np.int32)
    dest: list[int] = []
    used = 0
    for span, ((position, rows), history) in enumerate(zip(lengths, histories, strict=True)):
        inputs = history[:, :h] * history[:, 2 * h :]
        place = {}
        for entry in range(counts[span]):
            page = first[span] + entry
            place[page] = table[span, entry] = numbers[used]
            at[span, entry] = page * PAGE
            used += 1
            past = inputs[page * PAGE : min(position, (page + 1) * PAGE)]
            pool[place[page] * PAGE :][: len(past), 0] = past
        dest += [place[p // PAGE] * PAGE + p % PAGE for p in range(position, position + rows)]
    fused = np.concatenate(
        [x[position : position + rows] for (position, rows), x in zip(lengths, histories, strict=True)]
    )
    starts = np.cumsum([0, *(rows for _, rows in lengths)])
    spans = np.array([(i, starts[i], rows, position) for i, (position, rows) in enumerate(lengths)], np.int32)
    positions = np.concatenate([np.arange(p, p + rows) for p, rows in lengths]).astype(np.int32)
    row_span = np.repeat(np.arange(len(lengths), dtype=np.int32), spans[:, 2])
    up = device.upload
    wide, on_device = up(np.pad(fused, ((0, 0), (0, 2)), constant_values=np.nan))[:, : 3 * h], up(pool)
    view = PageView(up(table), up(at), up(counts), up(np.array(dest, np.int32)))
    arrays = SpanArrays(up(spans), up(row_span), count=len(lengths), longest=int(spans[:, 2].max()))
    write_inputs(device, wide, on_device, view.dest)
    actual = device.download(short_conv(device, wide, up(taps), on_device, arrays, view, up(positions)))
    row = 0
    for (position, rows), history in zip(lengths, histories, strict=True):
        inputs = history[:, :h].astype(np.float64) * history[:, 2 * h :]
        for p in range(position, position + rows):
            total = sum(taps[:, s] * inputs[p - kernel + 1 + s] for s in range(kernel) if p - kernel + 1 + s >= 0)
            np.testing.assert_allclose(actual[row], total * history[p, h : 2 * h], rtol=1e-5, atol=1e-5)
            row += 1
