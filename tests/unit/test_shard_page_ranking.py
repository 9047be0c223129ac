"""Estimates of attention from the moments of keys, against a loop in float64."""

from __future__ import annotations

import numpy as np
import pytest

from luce.shard.page_ranking import attention_estimate


@pytest.mark.parametrize(("heads", "kv_heads", "d", "n"), [(4, 2, 16, 9), (3, 1, 8, 1), (6, 6, 32, 40)])
def test_estimates(heads: int, kv_heads: int, d: int, n: int) -> None:
    rng = np.random.default_rng(n)
    mean = rng.standard_normal((n, 4, kv_heads, d)).astype(np.float32)
    variance = rng.uniform(0, 1, mean.shape).astype(np.float32)
    query = rng.standard_normal((heads, d)).astype(np.float32)
    expected = np.zeros(n)
    for head in range(heads):
        weights = np.zeros(n)
        for page in range(n):
            for group in range(4):
                logit = 0.0
                for channel in range(d):
                    at, value = (page, group, head // (heads // kv_heads), channel), 0.25 * float(query[head, channel])
                    logit += value * float(mean[at]) + value * value * float(variance[at]) / 2
                weights[page] += np.exp(logit)
        expected = np.maximum(expected, weights / weights.sum())
    found = attention_estimate(query, np.stack([mean, variance], axis=3), 0.25)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_keys_that_are_normal_get_what_attention_gives_them() -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((3, 4, 4096, 1, 8)) * rng.uniform(0.2, 0.8, (3, 4, 1, 1, 8)) + rng.standard_normal(8)
    query = rng.standard_normal((1, 8)).astype(np.float32)
    weights = np.exp(0.5 * keys[:, :, :, 0] @ query[0]).sum(axis=(1, 2))
    moments = np.stack([keys.mean(axis=2), keys.var(axis=2)], axis=3).astype(np.float32)
    np.testing.assert_allclose(attention_estimate(query, moments, 0.5), weights / weights.sum(), rtol=0.05)


def test_what_one_head_looks_for_counts() -> None:
    """A page that has what one of the heads asks for comes before one that suits all of them a little."""
    moments = np.zeros((3, 4, 1, 2, 4), np.float32)
    moments[1, 2, 0, 0] = [8, 0, 0, 0]
    moments[2, :, 0, 0] = [1, 1, 1, 1]
    scores = attention_estimate(np.eye(4, dtype=np.float32), moments, 1.0)
    assert scores.argmax() == 1


def test_scores_stay_apart_far_below_the_largest() -> None:
    moments = np.zeros((3, 4, 1, 2, 1), np.float32)
    moments[:, :, 0, 0, 0] = np.array([[400], [100], [90]])
    scores = attention_estimate(np.ones((1, 1), np.float32), moments, 1.0)
    assert scores[0] > scores[1] > scores[2] > 0
