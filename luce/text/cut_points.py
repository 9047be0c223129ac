"""Where a text may be cut: at the ends of lines, sentences and words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luce.text.tokenizer import Tokenizer

#: how well a place suits a cut: inside a character, inside a word, behind a word, a sentence, a line
CHARACTER, INSIDE, WORD, SENTENCE, LINE = range(5)
# Ends of sentences, of which the wide ones need no space behind them; a quotation mark may follow.
_STOPS, _WIDE_STOPS = (tuple(mark.encode() for mark in marks) for marks in (".!?", "。！？"))
_QUOTES = tuple(mark.encode() for mark in "\"'”’»)")


def cut_ranks(tokenizer: Tokenizer, ids: Sequence[int]) -> NDArray[np.int8]:
    """CHARACTER to LINE for the place before each token, and for the end of the text: int8 [n + 1].

    A control token begins and ends a line.
    """
    ranks = np.full(len(ids) + 1, LINE, np.int8)
    if not len(ids):
        return ranks
    known, numbers = np.unique(np.asarray(ids, np.int64), return_inverse=True)
    controls = [tokenizer.is_control(token) for token in known.tolist()]
    pieces = [
        b"\n" if control else tokenizer.token_bytes(token)
        for token, control in zip(known.tolist(), controls, strict=True)
    ]

    def of(facts: Sequence[bool]) -> NDArray[np.bool_]:
        return np.array(facts, np.bool_)[numbers]

    space_first = of([piece[:1].isspace() for piece in pieces])[1:]
    space_last = of([piece[-1:].isspace() for piece in pieces])[:-1]
    stops = of([piece.endswith(_STOPS) for piece in pieces])
    quotes = of([piece in _QUOTES for piece in pieces])
    stops[1:] |= quotes[1:] & stops[:-1]
    stop = stops[:-1] & space_first
    wide_stop = of([piece.endswith(_WIDE_STOPS) for piece in pieces])[:-1]
    line = of([piece.endswith(b"\n") for piece in pieces])[:-1] | of(controls)[1:]
    # The bytes 0x80 to 0xbf continue a character.
    within = of([bool(piece) and piece[0] & 0xC0 == 0x80 for piece in pieces])[1:]
    inner = ranks[1:-1]
    inner[:] = INSIDE
    inner[within] = CHARACTER
    inner[space_first | space_last] = WORD
    inner[stop | wide_stop] = SENTENCE
    inner[line] = LINE
    return ranks
