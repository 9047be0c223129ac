"""Activations in messages: their sizes, and the precision of their values."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.remote.activation_codec import TYPES, ActivationCodec
from luce.shard.sizes import activation_widths
from tests.support.reference import Reference

REFERENCE = Reference("gemma4-e-F32")
#: two of its layers are captured before the boundary, and the keys of donors cross it
SPEC, CAPTURED = REFERENCE.spec, (0, 3, 7)
BOUNDARY, ROWS = 6, 5
WIDTHS = activation_widths(SPEC, BOUNDARY, CAPTURED)
VALUES = sum(WIDTHS[:-2])


def memory() -> NDArray[np.uint8]:
    """An activation, and bytes behind it."""
    rng = np.random.default_rng(3)
    made = rng.integers(0, 256, 4 * ROWS * sum(WIDTHS) + 100, np.uint8)
    scales = 10.0 ** rng.integers(-6, 5, ROWS * VALUES)
    made[: 4 * ROWS * VALUES].view(np.float32)[:] = rng.standard_normal(ROWS * VALUES) * scales
    return made


def transferred(kind: str, source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The decoded activation, in memory of the same size."""
    codec, target = ActivationCodec(kind, SPEC, BOUNDARY, CAPTURED), np.full_like(source, 7)
    data = codec.pack(source, ROWS)
    assert data.nbytes == codec.size(ROWS)
    codec.unpack(data, target, ROWS)
    assert (target[4 * ROWS * sum(WIDTHS) :] == 7).all()
    return target[: 4 * ROWS * sum(WIDTHS)]


def test_the_example_has_all_kinds_of_arrays() -> None:
    assert len(WIDTHS) > 4 and WIDTHS[-2:] == (SPEC.hidden // 2,) * 2


@pytest.mark.parametrize("kind", TYPES)
def test_captured_outputs_stay_as_they_are(kind: str) -> None:
    source = memory()
    found = transferred(kind, source)
    begin = 4 * ROWS * VALUES
    assert (found[begin:] == source[begin : begin + len(found[begin:])]).all()
    if kind == "f32":
        assert (found == source[: len(found)]).all()
    else:
        assert ActivationCodec(kind, SPEC, BOUNDARY, CAPTURED).size(ROWS) == 4 * ROWS * sum(WIDTHS) - 2 * ROWS * VALUES


@pytest.mark.parametrize(("kind", "bits", "least"), [("f16", 11, 2.0**-14), ("bf16", 8, 2.0**-126)])
def test_values_are_the_nearest_ones(kind: str, bits: int, least: float) -> None:
    source = memory()
    values = source[: 4 * ROWS * VALUES].view(np.float32).astype(np.float64)
    values = np.clip(values, -65504, 65504) if kind == "f16" else values
    found = transferred(kind, source)[: 4 * ROWS * VALUES].view(np.float32)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), least))) - bits + 1)
    assert (found == np.rint(values / unit) * unit).all()


def test_values_beyond_float16() -> None:
    source = memory()
    values = source[: 4 * ROWS * VALUES].view(np.float32)
    values[:4] = np.inf, -1e30, np.nan, 65519.9
    found = transferred("f16", source)[:16].view(np.float32)
    assert found[:2].tolist() == [65504, -65504] and np.isnan(found[2]) and found[3] == 65504
    found = transferred("bf16", source)[:16].view(np.float32)
    assert found[0] == np.inf and abs(found[1] / -1e30 - 1) < 2**-8 and np.isnan(found[2])


@pytest.mark.parametrize("kind", TYPES)
def test_other_sizes_are_refused(kind: str) -> None:
    codec, target = ActivationCodec(kind, SPEC, BOUNDARY, CAPTURED), memory()
    for size in (0, codec.size(ROWS) - 1, codec.size(ROWS + 1)):
        with pytest.raises(BackendError, match=f"an activation of .* bytes, expected {codec.size(ROWS)}"):
            codec.unpack(np.zeros(size, np.uint8), target, ROWS)


def test_the_end_of_a_model_hands_on_captured_outputs_alone() -> None:
    codec = ActivationCodec("bf16", SPEC, len(SPEC.layers), CAPTURED)
    assert codec.size(ROWS) == 3 * ROWS * 2 * SPEC.hidden
    assert ActivationCodec("f16", REFERENCE.spec, 0).size(ROWS) == 0
