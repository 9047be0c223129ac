"""What the prefix cache knows texts by."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.kvcache.disk.manifest import keys
from luce.kvcache.prefix_ids import key_bytes, prefix_ids, stored, tokens_of
from luce.runtime.step import STRETCHED


def made(pairs: list[tuple[int, int]]) -> NDArray[np.int64]:
    """Of tokens, each with the tokens that are missing before it."""
    tokens = np.array([token for token, _ in pairs], np.int32)
    gaps = np.cumsum([gap for _, gap in pairs], dtype=np.int64)
    return prefix_ids(tokens, (np.arange(len(pairs)) + gaps).astype(np.int32)).astype(np.int64)


TEXTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 1, 2, 2**20, STRETCHED])), min_size=1, max_size=12)


@given(TEXTS, TEXTS)
def test_texts_have_one_key_only_if_tokens_and_positions_are_equal(one: list[tuple[int, int]], other: Any) -> None:
    assert (key_bytes(made(one)) == key_bytes(made(other))) == (one == other)


@given(TEXTS, st.integers(0, 12))
def test_parts_give_what_the_whole_gives(pairs: list[tuple[int, int]], cut: int) -> None:
    ids = made(pairs)
    assert key_bytes(ids[:cut]) + key_bytes(ids[cut:]) == key_bytes(ids)
    lengths = sorted({min(cut, len(ids)), len(ids)})
    assert dict(keys(ids, lengths))[len(ids)] == dict(keys(ids, [len(ids)]))[len(ids)]


@given(TEXTS)
def test_tokens_come_back(pairs: list[tuple[int, int]]) -> None:
    ids = made(pairs)
    assert tokens_of(ids).tolist() == [token for token, _ in pairs] and tokens_of(ids).dtype == np.int32
    np.testing.assert_array_equal(stored(ids), ids)


def test_a_text_without_gaps_is_known_by_its_tokens() -> None:
    tokens = np.array([5, 2**31 - 1, 0], np.int32)
    ids = prefix_ids(tokens, np.arange(3, dtype=np.int32))
    assert ids.dtype == np.int32 and stored(ids).dtype == "<i4" and stored(made([(1, 0), (1, 1)])).dtype == "<i8"
    assert dict(keys(ids, [3]))[3] == hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=32).hexdigest()
