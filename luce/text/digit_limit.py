"""Ends numbers: JSON's have any length, and a model whose favourites are digits writes them to the limit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from luce.text.tokenizer import Tokenizer

#: digits in a row behind which no token that begins with one comes, unless nothing else may
MOST_DIGITS = 40


class DigitRun(NamedTuple):
    """Where a JSON text is: inside a string, behind a backslash in one, behind so many digits outside of strings."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def behind(self, text: bytes) -> DigitRun:
        """The state behind more of the text."""
        in_string, escaped, digits = self
        for byte in text:
            if escaped:
                escaped = False
            elif in_string and byte == ord("\\"):
                escaped = True
            elif byte == ord('"'):
                in_string = not in_string
            digits = digits + 1 if not in_string and ord("0") <= byte <= ord("9") else 0
        return DigitRun(in_string, escaped, digits)

    @property
    def full(self) -> bool:
        """Whether no digit should follow."""
        return self.digits >= MOST_DIGITS


class DigitLimit:
    """The tokens of a vocabulary by their digits; shared by all constraints of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        begins = [tokenizer.token_bytes(token)[:1].isdigit() for token in range(tokenizer.vocab)]
        bits = np.zeros(32 * -(-tokenizer.vocab // 32), np.bool_)
        bits[: len(begins)] = begins
        self._others: NDArray[np.uint32] = ~np.packbits(bits, bitorder="little").view(np.uint32)

    def behind(self, run: DigitRun, token: int) -> DigitRun:
        """The state behind one more token. Special tokens are no part of JSON: what comes behind one is a new text."""
        return DigitRun() if self._tokenizer.is_special(token) else run.behind(self._tokenizer.token_bytes(token))

    def apply(self, words: NDArray[np.uint32]) -> None:
        """Take the tokens that begin with a digit from a mask, uint32 [words], unless it has no others."""
        kept = words & self._others
        if kept.any():
            words[:] = kept
