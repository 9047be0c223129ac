"""Predicts how long a model takes to read a prompt, from the times of earlier prompts."""

from __future__ import annotations

import numpy as np

# Weight of earlier measurements beside a new one, and fewest tokens of a measurement.
_OLDER, _FEWEST = 0.9, 512
# Tokens in a unit of length, so that both columns of the fit have values near 1.
_UNIT = 1 << 14
# Stands for a measurement without a quadratic part: lengths that are alike determine only one of the two parts.
_PRIOR = 1e-3


class ReadingTime:
    """Seconds as a n + b n^2 of n tokens, with a, b >= 0: products take time linear in n, attention also n^2.

    The fit minimises relative errors; each measurement weighs 0.9 times as much as the next one. Not thread-safe.
    """

    def __init__(self) -> None:
        # Of the weighted least squares: x^T x of (n, n^2) / seconds, and x^T 1.
        self._squares, self._sums = np.zeros((2, 2)), np.zeros(2)

    def observe(self, tokens: int, seconds: float) -> None:
        """Note a measurement; one of less than 512 tokens says more about fixed costs, and does not count."""
        if tokens < _FEWEST or seconds <= 0:
            return
        length = tokens / _UNIT
        row = np.array([length, length**2]) / seconds
        self._squares = _OLDER * self._squares + np.outer(row, row)
        self._sums = _OLDER * self._sums + row

    def predict(self, tokens: int) -> float | None:
        """Seconds of a prompt of so many tokens; None before the first measurement."""
        if not self._squares[0, 0]:
            return None
        length = tokens / _UNIT
        linear, quadratic = self._fit()
        return float(linear * length + quadratic * length**2)

    def _fit(self) -> tuple[float, float]:
        squares, sums = self._squares.copy(), self._sums
        squares[1, 1] *= 1 + _PRIOR
        linear, quadratic = np.linalg.solve(squares, sums)
        if quadratic < 0:
            return sums[0] / squares[0, 0], 0.0
        return (linear, quadratic) if linear >= 0 else (0.0, sums[1] / squares[1, 1])
