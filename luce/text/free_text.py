"""Free text inside a grammar: rows at which the mask of the next token is a constant one.

Arguments that are written as they are, and text in front of a call, end with a marker that is text, such as a closing
tag on a line of its own. At such a marker's first character, a line feed, the library walks through the whole
vocabulary: 2.4 ms with 248,320 tokens. But the mask is that of any text wherever no token of the vocabulary completes
the marker, and which tokens do is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from luce.text.tokenizer import Tokenizer

#: between tokens in a text of all of them; no byte of UTF-8
_BETWEEN = b"\xff"
#: bytes of a character
_MOST_BYTES = 4


@dataclass(frozen=True)
class TextVocabulary:
    """What free texts of one vocabulary share."""

    tokenizer: Tokenizer
    #: masks of the tokens that may begin a text of any characters, uint32 [words], by whether the reply may end there
    masks: tuple[NDArray[np.uint32], NDArray[np.uint32]]
    #: the bytes of all tokens but special ones, each behind _BETWEEN
    spelled: bytes

    @classmethod
    def of(cls, tokenizer: Tokenizer, masks: tuple[NDArray[np.uint32], NDArray[np.uint32]]) -> TextVocabulary:
        """The vocabulary of a tokenizer; `masks` from the grammar library."""
        tokens = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab) if not tokenizer.is_special(token))
        return cls(tokenizer, masks, b"".join(_BETWEEN + token for token in tokens))


class TextState(NamedTuple):
    """Where a reply is, as far as its free texts ask for it."""

    #: the end of the text behind the last special token
    tail: bytes = b""
    #: whether any text may come next, up to a marker
    free: bool = False


class FreeTexts:
    """The free texts of a grammar, each of which ends with one of `markers`, or with a special token. Nothing else in
    the grammar may allow all that a free text allows."""

    def __init__(self, vocabulary: TextVocabulary, markers: Iterable[str]) -> None:
        self._vocabulary = vocabulary
        encoded = [marker.encode() for marker in markers]
        #: bytes that tell the beginning of a marker, and of a character
        self._kept = max(_MOST_BYTES, *map(len, encoded))
        #: beginnings of markers behind which a token completes the marker; the empty one: a token holds a whole marker
        self._critical = tuple(
            marker[:length]
            for marker in encoded
            for length in range(len(marker))
            if (_BETWEEN * bool(length) + marker[length:]) in vocabulary.spelled
        )

    def behind(self, state: TextState, token: int) -> TextState:
        """The state behind one more token."""
        tokenizer = self._vocabulary.tokenizer
        if tokenizer.is_special(token):
            return TextState()
        tail = (state.tail + tokenizer.token_bytes(token))[-self._kept :]
        # Where a token may have completed a marker, the next mask of the library tells whether the text goes on.
        return TextState(tail, state.free and not state.tail.endswith(self._critical))

    def mask(self, state: TextState, *, may_end: bool) -> NDArray[np.uint32] | None:
        """The mask of the next token, if it is a constant one."""
        if not state.free or state.tail.endswith(self._critical) or _is_partial(state.tail):
            return None
        return self._vocabulary.masks[may_end]

    def seen(self, state: TextState, mask: NDArray[np.uint32], *, may_end: bool) -> TextState:
        """The state once the library has made the mask of the next token: that of any text is a free text's."""
        free = state.free or np.array_equal(mask, self._vocabulary.masks[may_end])
        return state._replace(free=free)


def _is_partial(tail: bytes) -> bool:
    """Whether a text ends inside a character."""
    for length in range(1, min(len(tail), _MOST_BYTES - 1) + 1):
        byte = tail[-length]
        if byte >= 0xC0:
            return length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
