"""The tool that compares the predicted speed of the CPU with what `luce bench` measures."""

from __future__ import annotations

import pytest

from tools.check_cpu_prediction import AFTER, BEFORE, measured, medians, rates, verdict

REAL = 50.0, 400.0


@pytest.mark.parametrize(
    ("predicted", "most", "good"),
    [
        ((60.0, 300.0), BEFORE, True),
        ((66.0, 400.0), BEFORE, False),
        ((50.0, 250.0), BEFORE, False),
        ((45.0, 440.0), AFTER, True),
        ((42.0, 400.0), AFTER, False),
        ((50.0, 470.0), AFTER, False),
    ],
)
def test_both_rates_must_be_close_and_closer_once_observed(
    predicted: tuple[float, float], most: float, good: bool
) -> None:
    assert verdict(predicted, REAL, most) is good


def test_rates_are_those_of_decoding_behind_the_prompt_and_of_the_whole_prompt() -> None:
    results = [{"results": [{"test": "prompt 512", "tokens_per_second": 3.0}]}]
    results += [{"results": [{"test": "decode 128 at 512", "tokens_per_second": 1.0}]}]
    assert measured(results, 512) == (1.0, 3.0)
    assert rates({"decode_tok_s": 1.0, "prompt_tok_s": 2.0}) == (1.0, 2.0)


def test_phases_have_a_median_each() -> None:
    assert medians([(1.0, 30.0), (3.0, 20.0), (2.0, 10.0)]) == (2.0, 20.0)
