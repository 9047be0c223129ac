"""Tensor decoding against float64 formulas, against gguf in one call, and within its memory bound."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from luce.errors import UnsupportedError
from luce.gguf.quants import block_size, dequantize, supported

T = GGMLQuantizationType
TYPES = list(T)
#: the least that Luce reads; the gguf package may decode more
NEEDED = [
    *(T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K),
    *(T.IQ4_NL, T.IQ4_XS, T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.MXFP4),
]


def random_rows(type: GGMLQuantizationType, rows: int, cols: int) -> NDArray[np.uint8]:
    elements, size = block_size(type)
    return np.random.default_rng(type).integers(0, 256, (rows, cols // elements * size), dtype=np.uint8)


def test_needed_types_are_supported() -> None:
    assert [type for type in NEEDED if not supported(type)] == []


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_block_size_is_what_the_decoder_takes(type: GGMLQuantizationType) -> None:
    elements, size = block_size(type)
    if supported(type):
        assert dequantize(np.zeros((3, 2 * size), np.uint8), type).shape == (3, 2 * elements)
    else:
        with pytest.raises(UnsupportedError, match=type.name):
            dequantize(np.zeros((3, 2 * size), np.uint8), type)


@pytest.mark.parametrize("type", [type for type in TYPES if supported(type)], ids=lambda type: type.name)
def test_chunks_join_to_what_one_call_gives(type: GGMLQuantizationType) -> None:
    # 300 rows of 1280 elements: more than one chunk, and the chunks' ends fall inside rows.
    raw = random_rows(type, 300, 1280)
    raw.flags.writeable = False
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, type)
    result = dequantize(raw, type)
    assert result.dtype == np.float32 and result.shape == (300, 1280)
    assert result.tobytes() == expected.astype(np.float32).tobytes()


def halves(raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float64)


def scaled(type: GGMLQuantizationType, scale_at: int) -> NDArray[np.uint8]:
    """One random block per row, its float16 at `scale_at` a number of moderate size."""
    raw = random_rows(type, 50, block_size(type)[0])
    scales = np.random.default_rng(0).normal(size=50).astype(np.float16)
    raw[:, scale_at : scale_at + 2] = scales.view(np.uint8).reshape(50, 2)
    return raw


def test_q8_0_formula() -> None:
    raw = scaled(T.Q8_0, 0)
    expected = halves(raw[:, :2]) * raw[:, 2:].astype(np.int8)
    np.testing.assert_allclose(dequantize(raw, T.Q8_0), expected, rtol=1e-6)


def test_q4_0_formula() -> None:
    raw = scaled(T.Q4_0, 0)
    codes = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=1).astype(np.float64)
    expected = halves(raw[:, :2]) * (codes - 8)
    np.testing.assert_allclose(dequantize(raw, T.Q4_0), expected, rtol=1e-6)


def test_q6_k_formula() -> None:
    raw = scaled(T.Q6_K, 208)
    expected = np.empty((50, 256))
    scales = raw[:, 192:208].astype(np.int8).astype(np.float64)
    for i in range(256):
        # Element i: 128-element half, quarter of it, place in the quarter.
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        low = raw[:, 64 * half + 32 * (quarter % 2) + place] >> (4 * (quarter // 2)) & 15
        high = raw[:, 128 + 32 * half + place] >> (2 * quarter) & 3
        expected[:, i] = halves(raw[:, 208:210])[:, 0] * scales[:, i // 16] * ((low | high << 4).astype(int) - 32)
    np.testing.assert_allclose(dequantize(raw, T.Q6_K), expected, rtol=1e-6)


def test_float_types() -> None:
    values = np.random.default_rng(1).normal(size=(7, 64)).astype(np.float32)
    half = values.astype(np.float16)
    assert np.array_equal(dequantize(half.view(np.uint8), T.F16), half.astype(np.float32))
    # A bfloat16 is the upper half of a float32.
    upper = np.ascontiguousarray(values.view(np.uint16)[:, 1::2])
    expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(dequantize(upper.view(np.uint8), T.BF16), expected)


def test_f32_is_a_view_when_aligned() -> None:
    buffer = np.arange(65, dtype=np.float32).view(np.uint8)
    aligned = buffer[4:260].reshape(4, 64)
    view = dequantize(aligned, T.F32)
    assert np.shares_memory(view, buffer)
    assert view.tolist() == (1 + np.arange(64.0)).reshape(4, 16).tolist()
    shifted = np.concatenate([[0], aligned.ravel()]).astype(np.uint8)[1:].reshape(4, 64)
    copy = dequantize(shifted, T.F32)
    assert copy.flags.aligned and np.array_equal(copy, view)


@pytest.mark.parametrize("rows", [1, 4096])
def test_temporary_memory_is_bounded(rows: int) -> None:
    # gguf's decoder in one call takes 12 bytes for each of these 8 million elements.
    raw = np.ones((rows, 8_388_608 // 32 * 34 // rows), np.uint8)
    tracemalloc.start()
    try:
        result = dequantize(raw, T.Q8_0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < result.nbytes + 64_000_000
