"""Replies with drafters that have learned nothing, or one text: token for token those of plain decoding."""

from __future__ import annotations

import pytest

from tests.support.draft_identity import CASES, PAIRS, TINY, check, some


@pytest.mark.parametrize(
    ("name", "place"),
    some(
        case
        for case in CASES
        if PAIRS[case[0]].target.parent != TINY and not case[0].startswith(("random", "bfloat16"))
    ),
)
def test_some_replies(name: str, place: str) -> None:
    check(name, place, *PAIRS[name].part)
