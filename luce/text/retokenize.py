"""Ids of one vocabulary to ids of another, through the text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luce.compress.scorer import Retokenized
from luce.text.tokenizer import Tokenizer


class Retokenizer:
    """Encodes the text between known control tokens with another tokenizer. A control token becomes the other's of the
    same name, or a line feed if the other has none."""

    def __init__(self, known: Tokenizer, other: Tokenizer) -> None:
        self._known = known
        self._other = other
        self._line_feed = other.encode("\n", specials=False)
        self._controls: dict[int, list[int]] = {}

    def __call__(self, ids: NDArray[np.int32]) -> Retokenized:
        """The text in the other's ids. No id spans a control token."""
        found: list[int] = []
        first: list[NDArray[np.int64]] = []
        last: list[NDArray[np.int64]] = []
        known = self._known
        controls = [i for i, token in enumerate(ids.tolist()) if known.is_control(token)]
        begin = 0
        for control in [*controls, len(ids)]:
            if begin < control:
                own, (low, high) = self._segment(ids[begin:control].tolist())
                found += own
                first.append(low + begin)
                last.append(high + begin)
            if control < len(ids):
                own = self._control(int(ids[control]))
                found += own
                first.append(np.full(len(own), control, np.int64))
                last.append(first[-1])
            begin = control + 1
        empty = [np.empty(0, np.int64)]
        return Retokenized(np.array(found, np.int32), np.concatenate(first or empty), np.concatenate(last or empty))

    def _control(self, token: int) -> list[int]:
        if token not in self._controls:
            cut = list(self._other.control.cut(self._known.spelling(token)))
            same = len(cut) == 1 and cut[0][0] is not None
            self._controls[token] = [cut[0][0]] if same and cut[0][0] is not None else self._line_feed
        return self._controls[token]

    def _segment(self, ids: list[int]) -> tuple[list[int], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The other's ids for text, and for each the first and the last of `ids` that it has a part of."""
        pieces = [self._known.token_bytes(token) for token in ids]
        others = self._other.encode(b"".join(pieces).decode(errors="replace"), specials=False)
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.float64)
        lengths = np.array([len(self._other.token_bytes(token)) for token in others], np.float64)
        # A tokenizer that composes characters, or puts a space in front, changes the number of bytes, but little.
        factor = ends[-1] / max(1.0, lengths.sum())
        stops = np.cumsum(lengths) * factor
        # Half a byte inside, so that a token that only touches another one does not count.
        inside = np.minimum(0.5, lengths * factor / 2)
        low = np.searchsorted(ends, stops - lengths * factor + inside, side="right")
        high = np.searchsorted(ends, stops - inside, side="right")
        most = len(ids) - 1
        return others, (np.minimum(low, most), np.minimum(np.maximum(low, high), most))
