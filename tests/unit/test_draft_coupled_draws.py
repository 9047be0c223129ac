"""Draws whose noise drafters know: distributions, and how often both sides draw the same token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.draft.coupled_draws import Draws, gumbel
from luce.engine.sampling import Sampler
from luce.runtime.draws import Draw

CUTS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def draw_of(seed: int, cut: dict[str, Any]) -> Draw:
    return Draw(seed, cut["temperature"], cut.get("top_k", 0), cut.get("top_p", 1.0), cut.get("min_p", 0.0))


def distribution(seed: int, count: int = 30) -> NDArray[np.float64]:
    """Log probabilities, the likeliest first."""
    logits = -np.sort(-np.random.default_rng(seed).standard_normal(count) * 2)
    return logits - np.log(np.exp(logits).sum())


def sampled(scores: NDArray[np.float64], cut: dict[str, Any]) -> NDArray[np.float64]:
    """The probabilities after temperature and cuts."""
    mass = np.exp(scores / cut["temperature"])
    mass[cut.get("top_k") or len(mass) :] = 0
    before = np.concatenate(([0.0], np.cumsum(mass)[:-1])) / mass.sum()
    mass[before >= cut.get("top_p", 1.0)] = 0
    mass[mass < cut.get("min_p", 0.0) * mass[0]] = 0
    return mass / mass.sum()


def drawn(scores: NDArray[np.float64], draw: Draw | None, ids: NDArray[np.int32], count: int) -> NDArray[np.intp]:
    """The places of `count` tokens of one text, all of this distribution."""
    draws = Draws([draw], [40])
    tiled = (np.tile(part, (1, count, 1)) for part in (ids, scores))
    places, _ = draws.choose(0, *tiled)
    return places[0]


def chi_square(places: NDArray[np.intp], expected: NDArray[np.float64]) -> float:
    """By degree of freedom, over the cells that expect at least five."""
    found, hoped = np.bincount(places, minlength=len(expected)), expected * len(places)
    large = hoped >= 5
    assert not found[expected == 0].any()
    return float(((found - hoped)[large] ** 2 / hoped[large]).sum() / max(1, large.sum() - 1))


def test_the_noise_is_gumbel_s_and_independent() -> None:
    noise = gumbel(np.arange(40, dtype=np.uint64)[:, None, None], np.arange(50)[:, None], np.arange(60))
    assert noise.shape == (40, 50, 60)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.015) and noise.var() == pytest.approx(
        np.pi**2 / 6, 0.025
    )
    for axis in range(3):
        a, b = (
            np.take(noise, part, axis).ravel() for part in (range(noise.shape[axis] - 1), range(1, noise.shape[axis]))
        )
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    # Not one of them twice.
    assert len(np.unique(noise)) == noise.size
    assert noise[3, 4, 5] == gumbel(np.array([3], np.uint64), np.array([4]), np.array([5]))[0]


@pytest.mark.parametrize("cut", CUTS)
def test_a_drafter_draws_from_its_own_distribution(cut: dict[str, Any]) -> None:
    scores, ids = distribution(1), np.random.default_rng(2).permutation(30).astype(np.int32)
    expected = sampled(scores, cut)
    places = drawn(scores, draw_of(7, cut), ids, 4000)
    assert chi_square(places, expected) < 2
    draws = Draws([draw_of(7, cut)], [40])
    chosen, chances = draws.choose(0, np.tile(ids, (1, 50, 1)), np.tile(scores, (1, 50, 1)))
    np.testing.assert_allclose(chances[0], expected[chosen[0]])


@pytest.mark.parametrize("cut", CUTS)
def test_a_drafter_that_knows_the_distribution_draws_the_target_s_tokens(cut: dict[str, Any]) -> None:
    scores = distribution(3, 64)
    ids = np.random.default_rng(4).permutation(200)[:64].astype(np.int32)
    logits = np.full(200, -np.inf, np.float32)
    logits[ids] = scores
    target = Sampler(SamplingParams(**cut), np.zeros(40, np.int32), seed=9, ends=frozenset())
    found = []
    for _ in range(300):
        found.append(target.choose(logits))
        target.push(0)
    places = drawn(scores.astype(np.float32).astype(np.float64), draw_of(9, cut), ids, 300)
    assert ids[places].tolist() == found


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_coupled_draws_agree_about_as_often_as_the_ratio_rule(noise: float) -> None:
    """More often than a draw and a guess of the likeliest token, or an independent guess."""
    random, same, ratio, independent, likeliest = np.random.default_rng(5), [], [], [], []
    for seed in range(60):
        p = distribution(seed)
        q = p + noise * random.standard_normal(len(p))
        q -= np.log(np.exp(q).sum())
        order = np.argsort(-q, kind="stable")
        ids = np.arange(len(p), dtype=np.int32)
        target = drawn(p, Draw(seed, 1.0), ids, 200)
        guess = order[drawn(q[order], Draw(seed, 1.0), ids[order], 200)]
        assert chi_square(target, np.exp(p)) < 2.5
        both = np.exp(p), np.exp(q)
        overlap = np.minimum(*both).sum()
        same.append((target == guess).mean())
        # The bound for one position, with room for 200 of them.
        assert same[-1] > overlap / (2 - overlap) - 0.12
        ratio.append(overlap)
        independent.append((both[0] * both[1]).sum())
        likeliest.append(both[0][order[0]])
    assert np.mean(ratio) > np.mean(same) > 0.9 * np.mean(ratio)
    assert np.mean(same) > max(np.mean(likeliest), np.mean(independent)) + 0.05


def test_greedy_texts_take_the_likeliest_beside_texts_that_are_drawn() -> None:
    scores, ids = distribution(6), np.arange(30, dtype=np.int32)
    draws = Draws([None, Draw(1, 1.0)], [3, 3])
    assert draws.any and not Draws([None], [3]).any
    tiled = [np.tile(part, (2, 40, 1)) for part in (ids, scores)]
    places, chances = draws.choose(0, *tiled)
    assert not places[0].any() and places[1].any()
    np.testing.assert_array_equal(chances[0], np.exp(scores[0]))
    # Places count on: the second token at depth 0 is the first one at depth 1.
    again, _ = draws.choose(1, *(part[:, :1] for part in tiled))
    assert again[1, 0] == places[1, 1]
    pairs = np.tile(scores, (4, 1, 1))
    assert draws.perturbed(0, np.tile(ids, (4, 1)), pairs) is pairs


def test_trees_hold_what_is_drawn() -> None:
    scores, ids = distribution(8), np.arange(30, dtype=np.int32)
    draws, pairs = Draws([Draw(5, 0.8)], [9]), np.tile(distribution(8), (50, 3, 1)) - 0.2
    found = draws.perturbed(0, np.tile(ids, (50, 1)), pairs)
    places, _ = draws.choose(0, np.tile(ids, (1, 50, 1)), np.tile(scores, (1, 50, 1)))
    np.testing.assert_array_equal(found.argmax(axis=-1), np.tile(places.T, (1, 3)))
    # The candidates keep their mass together.
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), np.exp(-0.2))
