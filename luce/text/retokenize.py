"""Ids of one vocabulary to ids of another, through the text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.text.tokenizer import Tokenizer


class Retokenizer:
    """Encodes the text of known ids with another tokenizer. Control tokens have no text."""

    def __init__(self, known: Tokenizer, other: Tokenizer) -> None:
        self._known = known
        self._other = other

    def __call__(self, ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The other's ids, int32 [n], and for each the index of the known id that holds its middle, int64 [n]."""
        pieces = [self._known.token_bytes(int(token)) for token in ids]
        others = np.array(self._other.encode(b"".join(pieces).decode(errors="replace"), specials=False), np.int32)
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.float64)
        lengths = np.array([len(self._other.token_bytes(int(token))) for token in others], np.float64)
        # A tokenizer that composes characters changes the number of bytes, but little.
        factor = ends[-1] / max(1.0, lengths.sum()) if len(ends) else 1.0
        middles = (np.cumsum(lengths) - lengths / 2) * factor
        return others, np.minimum(np.searchsorted(ends, middles, side="right"), max(0, len(ids) - 1))
