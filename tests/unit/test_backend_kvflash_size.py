"""Numbers of resident tokens (KVFlash)."""

from __future__ import annotations

import pytest

from luce.backend.kvflash_size import (
    AUTO_MOST,
    DeviceShare,
    KVFlashRequest,
    auto_size,
    describe_shares,
    resident_size,
    smallest_size,
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
    assert resident_size(wanted, tail, context) == expected


def test_the_smallest_pool_has_room_for_one_page_that_leaves_and_one_that_is_filled() -> None:
    for tail in range(1, 40):
        size = smallest_size(tail)
        assert size % 256 == 0
        assert 0 <= size // 64 - (1 + tail + 2) < 4


@pytest.mark.parametrize(
    "shares, slots, most, expected",
    [
        # 27B: 64 KiB a position; half of 2 GiB
        ([DeviceShare("d", 2 * GIB, 64 << 10)], 1, 16384, 16384),
        ([DeviceShare("d", GIB, 64 << 10)], 1, 16384, 8192),
        ([DeviceShare("d", GIB, 64 << 10)], 4, 16384, 2048),
        # the device with the least room decides; one without such layers does not
        (
            [DeviceShare("d", GIB, 32 << 10), DeviceShare("d", GIB // 4, 32 << 10), DeviceShare("d", 1, 0)],
            1,
            16384,
            4096,
        ),
        ([DeviceShare("d", 64 * GIB, 64 << 10)], 1, 16384, 16384),
        ([DeviceShare("d", 64 * GIB, 64 << 10)], 1, 100000, 100000),
        ([DeviceShare("d", -5, 64 << 10)], 1, 16384, 0),
        ([], 1, 16384, 16384),
    ],
)
def test_auto(shares: list[DeviceShare], slots: int, most: int, expected: int) -> None:
    assert auto_size(shares, slots, most) == expected


def test_the_choice_is_describe_shares() -> None:
    shares = [DeviceShare("cuda:0", GIB, 32 << 10), DeviceShare("cpu:0", 7, 0)]
    assert (
        describe_shares(shares, 2) == "cuda:0: 1073741824 bytes free / 2 / 2 sequences / 32768 bytes per token = 8192"
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("off", None),
        ("1", KVFlashRequest(1)),
        ("16384", KVFlashRequest(16384)),
        ("auto", KVFlashRequest(AUTO_MOST, auto=True)),
        ("auto:65536", KVFlashRequest(65536, auto=True)),
    ],
)
def test_what_is_asked_for(text: str, expected: KVFlashRequest | None) -> None:
    assert KVFlashRequest.parse(text) == expected


def test_the_tail_holds_the_window_wherever_it_begins() -> None:
    assert [tail_pages(n) for n in (0, 1, 192, 193, 256, 512)] == [4, 4, 4, 5, 5, 9]
