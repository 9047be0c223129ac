"""tools/compare_precision.py: what it says of two sets of logits, and the rows that it compares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import luce
from tools.compare_precision import difference, perplexity, text_logits

MODEL = Path(__file__).parents[1] / "reference" / "qwen3-a-F32.gguf"


def test_equal_logits_differ_by_nothing() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    found = difference(logits, logits, np.zeros(5, np.int32))
    assert (found.nmse_median, found.nmse_p90, found.top, found.rows) == (0, 0, 1, 5)
    assert found.perplexity == found.perplexity_fp16


def test_the_difference_of_logits() -> None:
    exact = np.array([[1, -1], [1, -1], [2, -2], [2, -2]], np.float32)
    other = exact + np.array([[0.5, 0], [-3, 0], [0, 0], [0, 0]], np.float32)
    found = difference(exact, other, np.zeros(4, np.int32))
    assert found.nmse_median == pytest.approx(0.0625) and found.top == 0.75


def test_perplexity_of_known_chances() -> None:
    logits = np.log([[0.5, 0.5], [0.125, 0.875]])
    assert perplexity(logits, np.array([0, 0], np.int32)) == pytest.approx(4)


def test_the_rows_of_a_text() -> None:
    """The logits of the pieces are those of prompts of their own: the first rows of a longer piece are the same."""
    tokens = np.arange(1, 41, dtype=np.int32)
    with luce.load(MODEL, target_devices="cpu:0", max_ctx=64, cache_ram=0) as model:
        both = text_logits(model, [tokens, tokens[:20]])
    assert both.shape[0] == 39 + 19
    np.testing.assert_allclose(both[39:], both[:19], rtol=1e-4, atol=1e-4)
