"""Cuts text at fixed texts, such as those of control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import tokenizers
from tokenizers import models

from luce.text.pieces import WINDOW, encode_whole

#: characters of one step over a whole text
STEP = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class Cutter:
    """Finds fixed texts: leftmost first, and the longest of those that start together. Linear in the text's length."""

    def __init__(self, ids: Mapping[str, int], window: int = WINDOW) -> None:
        self._ids = ids
        self._longest = max(map(len, ids), default=0)
        self._window = max(window, 2 * self._longest)
        # The library's added tokens are an Aho-Corasick search; a model without words returns the rest as it is.
        self._search = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._search.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ids if text])

    def cut(self, text: str) -> Iterator[tuple[int | None, str]]:
        """The text in pieces, in order: (id, text) for a text that was found, (None, text) for the text between.

        Lone surrogates, which no token can spell, become U+FFFD.
        """
        text = _without_surrogates(text)
        plain = at = 0
        while at < len(text):
            part = text[at : at + self._window]
            # A longer text than one that begins later could reach past the window.
            sure = len(part) if at + len(part) == len(text) else self._window - self._longest
            following = at + sure
            for start, end in encode_whole(self._search, part).offsets:
                token = self._ids.get(part[start:end])
                if token is None or start >= sure:
                    continue
                if plain < at + start:
                    yield None, text[plain : at + start]
                yield token, part[start:end]
                plain = at + end
                following = max(following, plain)
            at = following
        if plain < len(text):
            yield None, text[plain:]


def _without_surrogates(text: str) -> str:
    if text.isascii():
        return text
    # In steps: one call on the whole text would stop all other threads.
    return "".join(_SURROGATE.sub("\ufffd", text[at : at + STEP]) for at in range(0, len(text), STEP))
