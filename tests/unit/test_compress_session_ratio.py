"""Keep ratios of conversations, against the same rule in plain numbers."""

from __future__ import annotations

import numpy as np
import pytest

from luce.compress.session_ratio import FIRST, LEAST, MOST, MOST_SESSIONS, SessionRatios


def formula(shares: list[float]) -> float:
    ratio, mean = 0.1, shares[0]
    for share in shares:
        mean = 0.7 * mean + 0.3 * share
        step = -0.01 if mean > 0.9 else -0.005 if mean > 0.85 else 0.01 if mean < 0.7 else 0.005 if mean < 0.75 else 0.0
        ratio = min(0.2, max(0.025, ratio + step))
    return ratio


@pytest.mark.parametrize("middle", [0.2, 0.72, 0.8, 0.87, 0.97])
def test_the_ratio_follows_the_shares(middle: float) -> None:
    ratios, random, shares = SessionRatios(), np.random.default_rng(1), []
    assert ratios.ratio("a") == FIRST
    for _ in range(40):
        shares.append(float(np.clip(middle + random.normal(0, 0.05), 0, 1)))
        ratios.observe("a", shares[-1])
        assert ratios.ratio("a") == pytest.approx(formula(shares), abs=1e-12)
        assert LEAST <= ratios.ratio("a") <= MOST
    assert ratios.ratio("b") == FIRST


def test_prompts_that_are_covered_keep_less_and_others_more() -> None:
    ratios = SessionRatios()
    for _ in range(30):
        ratios.observe("covered", 1.0)
        ratios.observe("scattered", 0.1)
    assert (ratios.ratio("covered"), ratios.ratio("scattered")) == (LEAST, MOST)


def test_the_least_recently_used_session_is_forgotten() -> None:
    ratios = SessionRatios()
    for session in range(MOST_SESSIONS):
        ratios.observe(str(session), 0.1)
    ratios.ratio("0")
    ratios.observe("new", 0.1)
    assert ratios.ratio("0") != FIRST and ratios.ratio("1") == FIRST
