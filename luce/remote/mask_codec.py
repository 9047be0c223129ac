"""Masks in messages: each in its shortest form, since a vocabulary of 248,320 tokens has 31 KB of them per row.

Where a grammar is between two parts of its text, few tokens may come; in free text, few may not. Inside a string
neither is so, but the mask of one token is mostly that of the token before it: both sides remember the last masks that
were sent as a whole, and a message then names one.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.errors import BackendError
from luce.runtime.step import Int32, RowMasks

#: the forms of a mask: the ids that may come, those that may not, all words, and the number of a remembered mask
ALLOWED, FORBIDDEN, WORDS, REMEMBERED = range(4)
# Most ids of a mask in a message, and most masks that both sides remember: 2 MB of a vocabulary of 248,320.
_MOST_IDS = 2048
_MOST_REMEMBERED = 64


class WireMasks(msgspec.Struct):
    """Masks of output rows."""

    #: int32 [k]: numbers of output rows
    rows: Int32
    #: uint8 [k]: the form of each mask
    forms: NDArray[np.uint8]
    #: int32 [k]: how many values of `data` each mask has
    counts: Int32
    #: int32 [n]: ids, words or numbers of remembered masks
    data: Int32


class MaskEncoder:
    """Encodes masks for one daemon, in the order of the messages."""

    def __init__(self) -> None:
        #: numbers of remembered masks by their words, the one that is forgotten first in front
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def encode(self, masks: RowMasks, vocab: int) -> WireMasks:
        """The message of masks for a model of so many tokens."""
        forms, parts = [], []
        for words in masks.words:
            form, values = self._encode(words, vocab)
            forms.append(form)
            parts.append(values)
        counts = np.array([len(values) for values in parts], np.int32)
        data = np.concatenate(parts) if parts else np.empty(0, np.int32)
        return WireMasks(masks.rows, np.array(forms, np.uint8), counts, data)

    def _encode(self, words: NDArray[np.uint32], vocab: int) -> tuple[int, Int32]:
        allowed = int(np.bitwise_count(words).sum())
        if allowed <= _MOST_IDS:
            return ALLOWED, _ids(words, vocab)
        if vocab - allowed <= _MOST_IDS:
            return FORBIDDEN, _ids(~words, vocab)
        key = words.tobytes()
        if key in self._numbers:
            return REMEMBERED, np.array([self._numbers[key]], np.int32)
        number = len(self._numbers)
        if number == _MOST_REMEMBERED:
            _, number = self._numbers.popitem(last=False)
        self._numbers[key] = number
        return WORDS, words.view(np.int32)


class MaskDecoder:
    """The other side of a MaskEncoder, for a model of `vocab` tokens."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._width = -(-vocab // 32)
        self._remembered: list[NDArray[np.uint32]] = []
        self._sent = 0

    def decode(self, message: WireMasks, outputs: int) -> RowMasks:
        """The masks of a message for a step of so many output rows. Raises BackendError if it is not valid."""
        rows, counts, count = message.rows, message.counts, len(message.rows)
        shapes = rows.ndim == message.data.ndim == 1 and message.forms.shape == counts.shape == (count,)
        dtypes = message.forms.dtype == np.uint8 and rows.dtype == counts.dtype == message.data.dtype == np.int32
        if not (shapes and dtypes) or (counts < 0).any() or counts.sum() != len(message.data):
            raise BackendError("the fields of the masks do not fit each other")
        if count and (rows[0] < 0 or rows[-1] >= outputs or (np.diff(rows) <= 0).any()):
            raise BackendError(f"masks of rows that a step of {outputs} output rows does not have")
        words = np.empty((count, self._width), np.uint32)
        parts = np.split(message.data, np.cumsum(counts)[:-1]) if count else []
        for own, form, values in zip(words, message.forms.tolist(), parts, strict=True):
            own[:] = self._decode(form, values)
        return RowMasks(rows, words)

    def _decode(self, form: int, values: Int32) -> NDArray[np.uint32]:
        if form == WORDS and len(values) == self._width:
            words = values.view(np.uint32).copy()
            if len(self._remembered) < _MOST_REMEMBERED:
                self._remembered.append(words)
            else:
                self._remembered[self._sent % _MOST_REMEMBERED] = words
            self._sent += 1
            return words
        if form == REMEMBERED and len(values) == 1 and 0 <= values[0] < len(self._remembered):
            return self._remembered[int(values[0])]
        inside = not len(values) or (values.min() >= 0 and values.max() < self._vocab)
        if form not in (ALLOWED, FORBIDDEN) or not inside:
            raise BackendError("a mask of a step is not valid")
        bits = np.full(32 * self._width, form == FORBIDDEN, np.bool_)
        bits[values] = form == ALLOWED
        bits[self._vocab :] = False
        return np.packbits(bits, bitorder="little").view(np.uint32)


def _ids(words: NDArray[np.uint32], vocab: int) -> Int32:
    """The ids below `vocab` of the bits that are set, of which there are few."""
    places = np.flatnonzero(words)
    rows, bits = np.nonzero(np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 32))
    ids = 32 * places[rows] + bits
    return ids[ids < vocab].astype(np.int32)
