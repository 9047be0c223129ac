"""Checks of luce.ops.features and luce.layers.features over any device, against the gguf package's bfloat16."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from luce.layers.features import FeatureRing
from luce.ops.features import capture
from luce.runtime.device import Device
from luce.runtime.step import Span, Step


def check_capture(device: Device, rows: int, hidden: int) -> None:
    """Two layers side by side: one as it is, one with a delta to be added."""
    rng = np.random.default_rng(rows)
    x, delta = (rng.standard_normal((rows, hidden)).astype(np.float32) for _ in range(2))
    x[:, :4] = [0.0, -0.0, np.inf, 3.4e38]
    x[0, 5] = np.nan
    delta[:, :4] = 0
    out = device.zeros((rows, 2 * hidden), np.uint16)
    given = device.upload(x), device.upload(delta)
    capture(device, given[0], None, out[:, :hidden])
    capture(device, *given, out[:, hidden:])
    for found, values in zip(np.split(device.download(out), 2, axis=1), (x, x + delta), strict=True):
        expected = gguf.quants.quantize(values, GGMLQuantizationType.BF16).view(np.uint16)
        numbers = np.isfinite(values)
        np.testing.assert_array_equal(found[numbers], expected[numbers])
        floats = (found.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(np.isnan(floats), np.isnan(values))
        np.testing.assert_array_equal(floats[:, 2], np.inf)


def check_ring(device: Device) -> None:
    """Rows are at the places of their positions; rejected rows are overwritten; the end of a long span remains."""
    ring = FeatureRing(device, (1, 4), 6, slots=3, capacity=8)
    held = np.zeros((3, 8, 12), np.uint16)
    position = [0, 0, 0]
    rng = np.random.default_rng(1)
    for lengths, counted in (((5, 0, 3), None), ((20, 4, 6), (20, 2, 1)), ((1, 8, 9), None)):
        spans, tokens, at = [], [], 0
        for slot, rows in enumerate(lengths):
            if rows:
                spans.append(Span(slot, at, rows, position[slot]))
                tokens.append(np.arange(position[slot], position[slot] + rows))
            at += rows
        features = rng.integers(0, 2**16, (at, 12)).astype(np.uint16)
        positions = np.concatenate(tokens).astype(np.int32)
        ring.put(
            Step.of_spans(spans, positions, ()),
            [device.upload(features[:, own]) for own in (slice(6), slice(6, 12))],
        )
        for span in spans:
            for row in range(span.rows):
                held[span.slot, (span.position + row) % 8] = features[span.start + row]
            position[span.slot] += span.rows if counted is None else counted[span.slot]
        np.testing.assert_array_equal(device.download(ring.rows).reshape(held.shape), held)


def check_tails(device: Device, width: int) -> None:
    """Rows read from a ring and stored in another, at any place and across its end."""
    ring, other = (FeatureRing(device, (1, 4), width, slots=3, capacity=8) for _ in range(2))
    rows = np.random.default_rng(2).integers(0, 1 << 16, (8, 2 * width), np.uint16)
    for slot, position in ((0, 0), (1, 3), (2, 16), (1, 7)):
        ring.write(slot, position, rows)
        waits = [ring.read(slot, range(position + low, position + high)) for low, high in ((0, 8), (2, 5), (7, 8))]
        # Copies are of the rows as they are now.
        ring.write(slot, position, np.zeros_like(rows))
        found, some, last = (wait() for wait in waits)
        np.testing.assert_array_equal(found, rows)
        np.testing.assert_array_equal(some, rows[2:5])
        np.testing.assert_array_equal(last, rows[7:])
        other.write(slot, position - min(position, 2), np.concatenate((rows[:2], found))[2 - min(position, 2) :])
        np.testing.assert_array_equal(other.read(slot, range(position, position + 8))(), rows)
    held = device.download(other.rows).reshape(3, 8, -1)
    np.testing.assert_array_equal(held[1], np.roll(rows, 7, axis=0))
