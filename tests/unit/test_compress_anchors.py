"""Anchors against a search that compares every place of a text."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.compress import anchors
from luce.compress.anchors import NGRAM, QUERY_TOKENS

CHUNK = 32


def anchored(tokens: NDArray[np.int32], control: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    return anchors.anchored(tokens, np.zeros(len(tokens), np.bool_) if control is None else control, CHUNK)


def searched(tokens: NDArray[np.int32], control: int = -1) -> NDArray[np.bool_]:
    """Every 4-gram of the last 96 tokens without a control token at every place of the body."""
    n = len(tokens)
    chunks = -(-n // CHUNK)
    radius, most = (2, 8) if chunks < 1024 else (4, 16) if chunks < 2048 else (8, 32)
    found = np.zeros(chunks, np.bool_)
    known = tokens.tolist()
    for at in range(max(0, n - QUERY_TOKENS), n - NGRAM + 1):
        gram = known[at : at + NGRAM]
        if control in gram:
            continue
        hits = [place for place in range(n - QUERY_TOKENS - NGRAM + 1) if known[place : place + NGRAM] == gram]
        if 0 < len(hits) <= most:
            for hit in hits:
                found[max(0, hit // CHUNK - radius) : hit // CHUNK + radius + 1] = True
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_what_comparing_every_place_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for n in (5, 99, 100, 101, 300, 700):
        tokens = rng.integers(0, 4 if seed % 2 else 9, n).astype(np.int32)
        np.testing.assert_array_equal(anchored(tokens), searched(tokens))
        np.testing.assert_array_equal(anchored(tokens, tokens == 3), searched(tokens, 3))


def planted(chunks: int, times: int) -> NDArray[np.int32]:
    """A text in which the end's last 4-gram occurs `times` times, 24 chunks apart from chunk 20 on."""
    tokens = np.arange(chunks * CHUNK, dtype=np.int32)
    for i in range(times):
        at = (20 + 24 * i) * CHUNK
        tokens[at : at + NGRAM] = tokens[-NGRAM:]
    return tokens


@pytest.mark.parametrize(("chunks", "radius", "most"), [(1023, 2, 8), (1024, 4, 16), (2047, 4, 16), (2048, 8, 32)])
def test_tiers(chunks: int, radius: int, most: int) -> None:
    for times in (1, most):
        found = np.flatnonzero(anchored(planted(chunks, times))).tolist()
        assert found == [20 + 24 * i + j for i in range(times) for j in range(-radius, radius + 1)]
    assert not anchored(planted(chunks, most + 1)).any(), "a common phrase"


def test_neighbours_end_at_the_borders() -> None:
    tokens = np.arange(640, dtype=np.int32)
    tokens[:NGRAM] = tokens[-NGRAM:]
    assert np.flatnonzero(anchored(tokens)).tolist() == [0, 1, 2]


def test_headers_of_messages_are_no_anchors() -> None:
    """Eight messages begin alike, as does the last one, whose text occurs once before."""
    tokens = np.arange(100, 100 + 200 * CHUNK, dtype=np.int32)
    header = np.array([1, 2, 3, 4, 5], np.int32)
    for at in (*range(0, 160 * CHUNK, 20 * CHUNK), len(tokens) - 20):
        tokens[at : at + 5] = header
    tokens[50 * CHUNK : 50 * CHUNK + NGRAM] = tokens[-NGRAM:]
    control = tokens == 2
    assert np.flatnonzero(anchored(tokens, control)).tolist() == [*range(48, 53)]
    assert anchored(tokens).sum() > 30
