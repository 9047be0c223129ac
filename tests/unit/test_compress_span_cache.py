"""What was kept of earlier prompts."""

from __future__ import annotations

import numpy as np

from luce.compress.selection import Keep, PromptTokens
from luce.compress.span_cache import SpanCache


def test_a_key_changes_with_all_that_what_is_kept_depends_on() -> None:
    prompt = PromptTokens.plain(np.arange(100, dtype=np.int32))
    some, other, cut = (PromptTokens.plain(np.arange(100, dtype=np.int32)) for _ in range(3))
    some.protected[3] = True
    other.ids[99] = 0
    cut.cut_ranks[50] = 1
    cache = SpanCache("1 a.gguf", 1 << 20)
    keys = [
        cache.key(prompt, Keep(0.05), 1000),
        cache.key(prompt, Keep(0.050001), 1000),
        cache.key(prompt, Keep(0.05, mass=True), 1000),
        cache.key(prompt, Keep(0.05, mass=True, most=0.5), 1000),
        cache.key(prompt, Keep(0.05), 1001),
        cache.key(some, Keep(0.05), 1000),
        cache.key(other, Keep(0.05), 1000),
        cache.key(cut, Keep(0.05), 1000),
        cache.key(PromptTokens.plain(prompt.ids[:99]), Keep(0.05), 1000),
        SpanCache("1 b.gguf", 1 << 20).key(prompt, Keep(0.05), 1000),
        SpanCache("2 a.gguf", 1 << 20).key(prompt, Keep(0.05), 1000),
    ]
    assert len({*keys}) == len(keys)
    assert SpanCache("1 a.gguf", 1).key(prompt, Keep(0.05), 1000) == keys[0]


def test_the_least_recently_used_goes_first() -> None:
    cache = SpanCache("", 3 * (256 + 128))
    for name in (b"a", b"b", b"c"):
        cache.put(name, ((0, 5),))
    assert cache.get(b"a") == ((0, 5),)
    cache.put(b"d", ((1, 2),))
    assert cache.get(b"b") is None
    assert [cache.get(name) for name in (b"a", b"c", b"d")] == [((0, 5),), ((0, 5),), ((1, 2),)]


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = SpanCache("", 1000)
    cache.put(b"a", tuple((i, i + 1) for i in range(0, 20, 2)))
    assert cache.get(b"a") is None
    cache.put(b"b", ((0, 1),))
    assert cache.get(b"b") == ((0, 1),)
