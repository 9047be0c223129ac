"""Predicted seconds against the formula that the measurements follow."""

from __future__ import annotations

import numpy as np
import pytest

from luce.compress.reading_time import ReadingTime


def seconds(tokens: int, linear: float = 1e-4, quadratic: float = 1e-9) -> float:
    return linear * tokens + quadratic * tokens**2


def test_without_a_measurement_there_is_no_prediction() -> None:
    time = ReadingTime()
    assert time.predict(1000) is None
    for tokens, taken in ((511, 1.0), (1000, 0.0), (1000, -1.0)):
        time.observe(tokens, taken)
    assert time.predict(1000) is None


@pytest.mark.parametrize(("linear", "quadratic"), [(1e-4, 1e-9), (1e-4, 0.0), (0.0, 1e-9)])
def test_lengths_between_and_beyond_the_measured_ones(linear: float, quadratic: float) -> None:
    time = ReadingTime()
    for tokens in (2000, 100_000, 8000, 50_000):
        time.observe(tokens, seconds(tokens, linear, quadratic))
    for tokens in (1000, 30_000, 200_000):
        assert time.predict(tokens) == pytest.approx(seconds(tokens, linear, quadratic), rel=0.02)


def test_equal_lengths_say_nothing_about_the_quadratic_part() -> None:
    time = ReadingTime()
    for _ in range(5):
        time.observe(4000, 2.0)
    assert time.predict(8000) == pytest.approx(4.0, rel=0.01)


def test_no_part_is_negative() -> None:
    """Times that grow more slowly than the length, and faster than its square."""
    for power in (0.5, 3.0):
        time = ReadingTime()
        for tokens in (1000, 10_000, 100_000):
            time.observe(tokens, (tokens / 1000) ** power)
        found = [time.predict(tokens) for tokens in (600, 10**4, 10**5, 10**6)]
        assert all(value is not None and value > 0 for value in found) and found == sorted(found)  # type: ignore[type-var]


def test_new_measurements_outweigh_old_ones() -> None:
    time = ReadingTime()
    for _ in range(5):
        time.observe(4000, 1.0)
    for _ in range(40):
        time.observe(4000, 3.0)
    assert time.predict(4000) == pytest.approx(3.0, rel=0.05)


def test_noise_evens_out() -> None:
    rng, time = np.random.default_rng(0), ReadingTime()
    for tokens in rng.integers(1000, 130_000, 200).tolist():
        time.observe(tokens, seconds(tokens) * rng.uniform(0.9, 1.1))
    assert time.predict(60_000) == pytest.approx(seconds(60_000), rel=0.1)
