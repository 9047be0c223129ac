"""Prompt lookup held against a search by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.draft.drafter import Draftable
from luce.draft.ngram import NgramDrafter


def propose(tokens: list[int], most: int, block: int = 8) -> list[int]:
    drafter = NgramDrafter(block=block, longest=3, shortest=2)
    (proposal,) = drafter.propose([Draftable(0, np.array(tokens, np.int32), most)])()
    assert not proposal.probabilities
    return list(proposal.tokens)


def searched(tokens: list[int], most: int) -> list[int]:
    for size in (3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:] and len(tokens) > size:
                text = list(tokens)
                for i in range(most):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 12))
def test_it_proposes_what_followed_the_longest_known_suffix(tokens: list[int], most: int) -> None:
    assert propose(tokens, most) == searched(tokens, min(most, 8))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5], []),
        ([5, 5], []),
        ([1, 2, 9, 1, 2], [9, 1, 2, 9]),
        ([7, 1, 2, 8, 1, 2, 9, 7, 1, 2], [8, 1, 2, 9]),
        ([4, 4, 4], [4, 4, 4, 4]),
    ],
)
def test_examples(tokens: list[int], expected: list[int]) -> None:
    assert propose(tokens, 4) == expected
