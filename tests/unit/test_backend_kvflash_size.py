"""Sizes of KVFlash's pool."""

from __future__ import annotations

import pytest

from luce.backend.kvflash_size import (
    AUTO_MOST,
    Share,
    Wanted,
    auto_pool,
    explained,
    pool_size,
    smallest_pool,
    tail_pages,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    "wanted, tail, context, expected",
    [
        (1, 4, 32768, 512),
        (512, 4, 32768, 512),
        (513, 4, 32768, 768),
        (512, 9, 32768, 768),
        (16384, 4, 262144, 16384),
        (100000, 4, 4100, 4096),
        (1024, 4, 512, 512),
        (1024, 4, 511, None),
        (768, 9, 767, None),
    ],
)
def test_sizes(wanted: int, tail: int, context: int, expected: int | None) -> None:
    assert pool_size(wanted, tail, context) == expected


def test_the_smallest_pool_has_room_for_one_page_that_leaves_and_one_that_is_filled() -> None:
    for tail in range(1, 40):
        size = smallest_pool(tail)
        assert size % 256 == 0
        assert 0 <= size // 64 - (1 + tail + 2) < 4


@pytest.mark.parametrize(
    "shares, slots, most, expected",
    [
        # 27B: 64 KiB a position; half of 2 GiB
        ([Share("d", 2 * GIB, 64 << 10)], 1, 16384, 16384),
        ([Share("d", GIB, 64 << 10)], 1, 16384, 8192),
        ([Share("d", GIB, 64 << 10)], 4, 16384, 2048),
        # the device with the least room decides; one without such layers does not
        ([Share("d", GIB, 32 << 10), Share("d", GIB // 4, 32 << 10), Share("d", 1, 0)], 1, 16384, 4096),
        ([Share("d", 64 * GIB, 64 << 10)], 1, 16384, 16384),
        ([Share("d", 64 * GIB, 64 << 10)], 1, 100000, 100000),
        ([Share("d", -5, 64 << 10)], 1, 16384, 0),
        ([], 1, 16384, 16384),
    ],
)
def test_auto(shares: list[Share], slots: int, most: int, expected: int) -> None:
    assert auto_pool(shares, slots, most) == expected


def test_the_choice_is_explained() -> None:
    shares = [Share("cuda:0", GIB, 32 << 10), Share("cpu:0", 7, 0)]
    assert explained(shares, 2) == "cuda:0: 1073741824 bytes free / 2 / 2 sequences / 32768 bytes per token = 8192"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("off", None),
        ("1", Wanted(1)),
        ("16384", Wanted(16384)),
        ("auto", Wanted(AUTO_MOST, auto=True)),
        ("auto:65536", Wanted(65536, auto=True)),
    ],
)
def test_what_is_asked_for(text: str, expected: Wanted | None) -> None:
    assert Wanted.of(text) == expected


def test_the_tail_holds_the_window_wherever_it_begins() -> None:
    assert [tail_pages(n) for n in (0, 1, 192, 193, 256, 512)] == [4, 4, 4, 5, 5, 9]
