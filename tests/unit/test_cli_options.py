"""Sampling values by name."""

from __future__ import annotations

import pytest

from luce.cli import options
from luce.errors import UsageError


@pytest.mark.parametrize(
    ("name", "low", "high", "outside"),
    [
        ("temperature", 0.0, 2.0, ("-0.1", "2.01", "nan", "x", "")),
        ("top_p", 1e-3, 1.0, ("0", "1.01", "nan")),
        ("top_k", -1, 2**31 - 1, ("-2", "1.5")),
        ("min_p", 0.0, 1.0, ("-0.1", "1.1")),
        ("repetition_penalty", 0.1, 10.0, ("0", "10.1")),
        ("frequency_penalty", -2.0, 2.0, ("-2.1", "2.1", "nan")),
        ("presence_penalty", -2.0, 2.0, ("-2.1", "2.1", "inf")),
        ("seed", -(2**63), 2**63 - 1, (str(2**63), "1.0", "x")),
        ("max_tokens", 1, 2**31 - 1, ("0", "-1", str(2**31), "many")),
    ],
)
def test_ranges(name: str, low: float, high: float, outside: tuple[str, ...]) -> None:
    assert options.parse(name, repr(low), "-o") == low
    assert options.parse(name, repr(high), "-o") == high
    for text in outside:
        with pytest.raises(UsageError, match=f"^here: expected .*, got '{text}'$"):
            options.parse(name, text, "here")


def test_pairs() -> None:
    assert options.parse_pairs(["top-k=5", "seed=1"]) == {"top_k": 5, "seed": 1}
    with pytest.raises(UsageError) as caught:
        options.parse_pairs(["top_k=-2", "port=80", "seed"])
    assert [part.partition(":")[0] for part in str(caught.value).split("; ")] == [
        "-o top_k=-2",
        "-o port=80",
        "-o seed",
    ]
