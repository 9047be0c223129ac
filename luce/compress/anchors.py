"""Anchors: the chunks of a text around places where n-grams of its end occur before.

A rare key in the question also stands beside the answer. Scores alone may keep the key and drop the answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: tokens of a text's end whose n-grams are searched, and tokens of an n-gram
QUERY_TOKENS, NGRAM = 96, 4
#: by fewest chunks of a text, descending: neighbours of a hit on each side that are anchors too, and most hits of an
#: n-gram: one with more hits is a common phrase
TIERS = ((2048, 8, 32), (1024, 4, 16), (0, 2, 8))


def anchored(tokens: NDArray[np.int32], control: NDArray[np.bool_], chunk: int) -> NDArray[np.bool_]:
    """Which chunks of `chunk` tokens are anchors: int32 [n], bool [n] -> bool [chunks].

    `control`: tokens of which no n-gram counts. Headers of messages occur at the end of a conversation and before each
    of its messages, and would keep what is around all of them.
    """
    chunks = -(-len(tokens) // chunk)
    found = np.zeros(chunks, np.bool_)
    body = len(tokens) - QUERY_TOKENS - NGRAM
    if body < 0:
        return found
    radius, most = next((radius, most) for fewest, radius, most in TIERS if chunks >= fewest)
    grams = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    end = slice(len(tokens) - QUERY_TOKENS, None)
    marked: NDArray[np.bool_] = np.lib.stride_tricks.sliding_window_view(control, NGRAM)[end].max(axis=1)
    wanted = np.unique(grams[end][~marked], axis=0)
    # One pass over the body for each n-gram: few places that hold its first token hold its second one too.
    for gram in wanted:
        hits = np.flatnonzero(tokens[: body + 1] == gram[0])
        for further in range(1, NGRAM):
            hits = hits[tokens[hits + further] == gram[further]]
        if 0 < len(hits) <= most:
            for hit in (hits // chunk).tolist():
                found[max(0, hit - radius) : hit + radius + 1] = True
    return found
