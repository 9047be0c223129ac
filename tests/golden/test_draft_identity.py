"""Many replies with trained drafters, several sequences in a step: token for token those of plain decoding.

A part of it runs by default. 200 prompts of 256 tokens: `pytest -m slow tests/golden/test_draft_identity.py`.
"""

from __future__ import annotations

import pytest

from tests.support.draft_identity import CASES, PAIRS, TINY, check, some


@pytest.mark.parametrize(("name", "place"), some(case for case in CASES if PAIRS[case[0]].target.parent == TINY))
def test_some_replies(name: str, place: str) -> None:
    check(name, place, *PAIRS[name].part)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_200_replies_of_256_tokens(name: str, place: str) -> None:
    check(name, place, 200, 256)
