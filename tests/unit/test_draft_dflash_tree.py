"""The likeliest beginnings, against all there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.draft.dflash.tree import Node, likeliest
from luce.draft.probabilities import log_probabilities
from luce.ops.sample import argmax_logsumexp
from luce.runtime.host import HostDevice
from luce.runtime.step import Candidates

Scores = NDArray[np.float64]


def texts_of(nodes: list[Node]) -> list[tuple[int, ...]]:
    """The ranks of each node's path."""
    texts: list[tuple[int, ...]] = []
    for node in nodes:
        texts.append((*(texts[node.parent] if node.parent >= 0 else ()), node.candidate))
        assert len(texts[-1]) == node.depth + 1
    return texts


def every_text(scores: Scores) -> list[tuple[tuple[int, ...], float]]:
    """All texts with their scores."""
    found = []
    for length in range(1, len(scores) + 1):
        for text in itertools.product(range(scores.shape[1]), repeat=length):
            total = 0.0
            for depth, rank in enumerate(text):
                total += float(scores[depth, rank])
            found.append((text, total))
    return found


@st.composite
def made_scores(draw: st.DrawFn) -> Scores:
    positions, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    # Few values, so that there are ties.
    values = draw(st.lists(st.sampled_from([-0.25, -0.5, -1.0, -2.0, -np.inf]), min_size=16, max_size=16))
    return -np.sort(-np.resize(values, (positions, ranks)), axis=1)


@given(made_scores(), st.integers(0, 24))
def test_they_are_the_likeliest_of_all(scores: Scores, budget: int) -> None:
    nodes = likeliest(scores[:, None], budget)
    texts = texts_of(nodes)
    all_texts = [(text, score) for text, score in every_text(scores) if np.isfinite(score)]
    # Among equals the shorter first, then the likelier last token.
    expected = sorted(all_texts, key=lambda one: (-one[1], len(one[0]), one[0][-1]))[:budget]
    known = dict(all_texts)
    assert [known[text] for text in texts] == [score for _, score in expected]
    assert [(len(t), t[-1]) for t in texts] == [(len(t), t[-1]) for t, _ in expected]
    assert len(set(texts)) == len(texts)
    assert all(node.parent < place for place, node in enumerate(nodes))


@given(made_scores(), st.integers(0, 12), st.integers(0, 12))
def test_a_smaller_budget_gives_the_first_ones(scores: Scores, one: int, other: int) -> None:
    least = min(one, other)
    assert likeliest(scores[:, None], one)[:least] == likeliest(scores[:, None], other)[:least]


@pytest.mark.parametrize("budget", [0, 1, 3, 9])
def test_one_candidate_makes_a_pipeline(budget: int) -> None:
    scores = np.log(np.full((5, 1), 0.7))
    assert likeliest(scores[:, None], budget) == [Node(i, 0, i - 1) for i in range(min(budget, 5))]


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.5, 0.0), (1.0, 5.0), (2.0, 30.0)])
def test_probabilities_are_of_the_whole_vocabulary(scale: float, softcap: float) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)
    values = logits.astype(np.float64) * scale
    values = softcap * np.tanh(values / softcap) if softcap else values
    norms = np.log(np.exp(values).sum(axis=1))
    ids = np.argsort(-logits, axis=1)[:, :20].astype(np.int32)
    top = Candidates(ids, np.take_along_axis(logits, ids, axis=1), norms.astype(np.float32))
    found = np.exp(log_probabilities(top, scale=scale, softcap=softcap))
    exact = np.exp(values - norms[:, None])
    np.testing.assert_allclose(found, np.take_along_axis(exact, ids, axis=1), rtol=1e-5)
    assert (found.sum(axis=1) < 0.9).all()


@pytest.mark.parametrize(("scale", "softcap"), [(0.3, 0.0), (1.7, 0.0), (1.0, 30.0)])
def test_what_is_certain_has_no_chance_above_one(scale: float, softcap: float) -> None:
    logits = np.random.default_rng(1).standard_normal((50, 99)).astype(np.float32)
    logits[:, 7] += np.linspace(60, 120, 50, dtype=np.float32)
    ids, best, norms = argmax_logsumexp(HostDevice(), logits, scale, softcap)
    top = Candidates(ids[:, None], best.view(np.float32)[:, None], norms.view(np.float32))
    found = np.exp(log_probabilities(top, scale=scale, softcap=softcap))
    assert (found <= 1).all() and found.min() > 0.99


@pytest.mark.parametrize("seed", range(8))
def test_a_pairwise_tree_is_that_of_all_paths(seed: int) -> None:
    positions, k = 3, 4
    logits = np.random.default_rng(seed).standard_normal((positions, k, k)) * 2
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)) - 0.1
    scores[0] = scores[0, 0]
    reached = {}
    for length in range(1, positions + 1):
        for text in itertools.product(range(k), repeat=length):
            reached[text] = sum(float(scores[i, text[i - 1] if i else 0, b]) for i, b in enumerate(text))
    nodes = likeliest(scores, 20)
    assert texts_of(nodes) == sorted(reached, key=lambda text: -reached[text])[:20]
