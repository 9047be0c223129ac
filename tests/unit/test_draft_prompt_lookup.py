"""Lookup of repeated texts, held against a search by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from luce.draft.prompt_lookup import Copy, Lookup

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def searched(own: list[int], recent: list[list[int]], most: int) -> tuple[list[int], int] | None:
    """Sizes descend; the own text comes first, then the newest recent one; places from the end."""
    for size in (3, 2):
        if size > len(own):
            continue
        for source in (own, *reversed(recent)):
            for end in range(len(source) - 1, size - 1, -1):
                if source[end - size : end] == own[-size:]:
                    found = list(source)
                    if source is own:
                        for i in range(most):
                            found.append(found[end + i])
                    return found[end : end + most], size
    return None


@given(IDS, st.lists(IDS, max_size=3), st.integers(1, 12))
def test_the_longest_suffix_decides_at_its_latest_place(own: list[int], recent: list[list[int]], most: int) -> None:
    lookup = Lookup(longest=3, shortest=2)
    for slot, ended in enumerate(recent):
        lookup.find(slot, "a", text(*ended), 1)
        lookup.forget(slot)
    found, expected = lookup.find(9, "a", text(*own), most), searched(own, recent, most)
    assert expected == (None if found is None else (found.tokens, found.matched))


@given(IDS, st.lists(IDS, max_size=3), st.integers(0, 4))
def test_what_is_known_to_be_missed_before_the_next_token_is_not_found(
    own: list[int], recent: list[list[int]], token: int
) -> None:
    lookup = Lookup(longest=3, shortest=2)
    for slot, ended in enumerate(recent):
        lookup.find(slot, "a", text(*ended), 1)
        lookup.forget(slot)
    lookup.prepare(9, "a", text(*own))
    # A pair at the very end of a recent text has nothing behind it: such a miss is not known.
    ends = any(ended[-2:] == [own[-1], token] for ended in recent)
    assert lookup.misses(9, token) == (lookup.find(9, "a", text(*own, token), 1) is None) or ends
    assert not lookup.misses(9, token) or lookup.find(9, "a", text(*own, token), 1) is None


def test_a_text_of_which_only_misses_were_known_is_a_recent_one() -> None:
    lookup = Lookup()
    lookup.prepare(0, "a", text(1, 2, 3, 4, 5))
    assert lookup.misses(0, 9)
    lookup.forget(0)
    lookup.prepare(0, "b", text(9, 1, 2))
    assert lookup.misses(0, 3)
    lookup.prepare(0, "a", text(9, 1, 2))
    assert not lookup.misses(0, 3) and lookup.find(0, "a", text(9, 1, 2, 3), 4) == Copy([4, 5], 3)


def test_a_text_of_another_session_is_not_looked_up() -> None:
    lookup = Lookup()
    lookup.find(0, "a", text(1, 2, 3, 4, 5), 4)
    lookup.forget(0)
    assert lookup.find(0, "b", text(9, 1, 2, 3), 4) is None
    assert lookup.find(1, "a", text(9, 1, 2, 3), 4) == Copy([4, 5], 3)


def test_a_text_that_goes_on_is_no_recent_one_and_a_slot_without_a_text_leaves_none() -> None:
    lookup = Lookup()
    lookup.forget(5)
    lookup.find(0, "a", text(1, 2, 3, 4, 5), 4)
    assert lookup.find(1, "a", text(9, 1, 2, 3), 4) is None
    lookup.forget(0)
    assert lookup.find(1, "a", text(9, 1, 2, 3), 4) == Copy([4, 5], 3)


def test_the_oldest_texts_are_forgotten_and_of_long_ones_the_beginning() -> None:
    lookup = Lookup()
    long = np.arange(10_000, dtype=np.int32)
    lookup.find(0, "a", long, 1)
    lookup.forget(0)
    assert lookup.find(0, "a", text(5, 6, 7), 2) is None
    assert lookup.find(0, "a", text(9000, 9001), 2) == Copy([9002, 9003], 2)
    for _ in range(20):
        lookup.find(0, "a", text(1, 1), 1)
        lookup.forget(0)
    assert lookup.find(0, "a", text(9000, 9001), 2) is None


def test_what_is_copied_grows_token_by_token() -> None:
    assert Copy([4, 5, 6], 3).lengths == [3, 4, 5]
