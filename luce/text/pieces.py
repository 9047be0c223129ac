"""Long texts in pieces: the same ids as of the whole text, in bounded memory, with a stop between two pieces.

The library takes about 450 bytes per token of one call, and a call cannot be interrupted. So a text is encoded in
windows. Of each window the tokens up to a cut are taken, and the next window begins at the cut. Why that is exact:

Between words. A pre-tokenizer's patterns match from left to right, and look at most one character past a match, but
for a run of whitespace, where they look for a line feed later in the run. So a match that does not reach the end of
its window is a match of the whole text if a window that ends within such a run is told of a later line feed.

Within a word (runs of letters, digits, marks or whitespace; for some vocabularies the whole text). BPE merges the
leftmost pair of the best rank first. Of tokens a b of an encoding, no merge crosses the boundary, so `ab` alone encodes
as a b; and a sequence of tokens in which each adjacent pair encodes as itself is the encoding of its text, because a
first merge across some boundary would also happen in that pair alone. A window that begins with the token that follows
the cut in the window before thus continues its encoding. If it does not begin so, a larger window is tried; and if a
window no longer begins so once it is larger, the window before it is tried larger instead.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import tokenizers

from luce.errors import RequestError
from luce.text.prompt_limit import PromptLimit

#: characters of a window
WINDOW = 32768
# Characters of the largest window: no text that people write has such a run.
_LARGEST = 1 << 20
# Characters by which a word goes on behind a cut within it: more than any pattern looks ahead.
_AHEAD = 4
_SPACES = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*")
_BREAK = re.compile(r"\r\n|[\r\n]")
# Texts of this many characters or more are encoded without the interpreter lock.
_LONG = 4096


def encode_whole(library: tokenizers.Tokenizer, text: str) -> Any:
    """The library's encoding of one text."""
    if len(text) < _LONG:
        return library.encode(text, add_special_tokens=False)
    # `encode` holds the interpreter lock, for 1 s on 1 MiB; the batch form releases it, but costs more on short texts.
    return library.encode_batch([text], add_special_tokens=False)[0]


def encode(
    library: tokenizers.Tokenizer, text: str, limit: PromptLimit, before: int = 0, window: int = WINDOW
) -> list[int]:
    """The ids of a text. `before`: tokens of the prompt in front of it.

    Raises what `limit` raises, and RequestError for a run of characters that cannot be cut.
    """
    if len(text) <= window:
        return list(encode_whole(library, text).ids)
    return _Windows(library, text, window).ids(limit, before)


def moves(char: str) -> bool:
    """Whether composing (NFC) may move a character to before the one in front of it."""
    # Three Tibetan vowels are no marks that move, but consist of such.
    return bool(unicodedata.combining(unicodedata.normalize("NFD", char)[0]))


class _Windows:
    def __init__(self, library: tokenizers.Tokenizer, text: str, size: int) -> None:
        self._library = library
        self._text = text
        self._size = size
        self._composes = library.normalizer is not None
        # The last run of whitespace that a window ended in: its end, and its next line break (None: it has no more).
        self._run: tuple[int, re.Match[str] | None] = (-1, None)

    def ids(self, limit: PromptLimit, before: int) -> list[int]:
        found: list[int] = []
        start, width = 0, self._size
        window = self._encoded(start, width)
        # The first id of the window, for which the cut before it was accepted; and start, width, first id and number of
        # ids before it of each window in front.
        first, taken = list(window.ids[:1]), list[tuple[int, int, list[int], int]]()
        while start + width < len(self._text):
            limit.check(before + len(found))
            ids = window.ids
            cut = self._cut(window, start, width)
            if cut is not None:
                token, offset = cut
                following = self._encoded(start + offset, self._size)
                if following.ids[:1] == ids[token : token + 1]:
                    taken.append((start, width, first, len(found)))
                    found += ids[:token]
                    start, width, window, first = start + offset, self._size, following, ids[token : token + 1]
                    continue
            window, width = self._widened(start, width)
            # A mark behind the end may compose with the first character: then the cut before it was wrong.
            while taken and window.ids[:1] != first:
                start, width, first, count = taken.pop()
                del found[count:]
                window, width = self._widened(start, width)
        return found + list(window.ids)

    def _widened(self, start: int, width: int) -> tuple[Any, int]:
        """A window of twice the width, and that width."""
        width *= 2
        if width > _LARGEST:
            raise RequestError(f"the prompt has a run of {width // 2} characters that cannot be tokenised in parts")
        return self._encoded(start, width), width

    def _encoded(self, start: int, width: int) -> Any:
        end = min(start + width, len(self._text))
        return encode_whole(self._library, self._text[start:end] + self._hint(end))

    def _hint(self, end: int) -> str:
        """The next line break of the run of whitespace around `end`, if it has one later. Of the vocabularies that look
        for one, Laguna's tells a line feed, with or without a return in front, from a return alone."""
        text = self._text
        if end >= len(text) or not (text[end - 1].isspace() and text[end].isspace()):
            return ""
        stop, found = self._run
        if stop <= end:
            run = _SPACES.match(text, end)
            stop = end if run is None else run.end()
            self._run = stop, _BREAK.search(text, end, stop)
        elif found is not None and found.end() <= end:
            self._run = stop, _BREAK.search(text, end, stop)
        found = self._run[1]
        return "" if found is None else found[0][-1]

    def _cut(self, window: Any, start: int, width: int) -> tuple[int, int] | None:
        """Index and offset of the token at which the next window begins: between words if there is such a place near
        the end, otherwise within a word."""
        margin = max(self._size // 16, _AHEAD)
        inside: tuple[int, int] | None = None
        for token in range(len(window) - 1, 0, -1):
            begin, _ = window.token_to_chars(token)
            if begin > width - margin:
                continue
            if begin == 0 or (inside is not None and begin < width - 2 * margin):
                break
            # Not within a character, which may be several tokens. One that composes has the range of its first part.
            if window.token_to_chars(token - 1)[1] > begin or not self._starts(start + begin):
                continue
            word = window.token_to_word(token)
            if word != window.token_to_word(token - 1):
                return token, begin
            if inside is None and self._restarts(start, begin, *window.word_to_chars(word)):
                inside = token, begin
        return inside

    def _restarts(self, start: int, begin: int, word: int, end: int) -> bool:
        """Whether the patterns find the same end of a word from `begin` within it."""
        if end < begin + _AHEAD:
            return False
        # Line feeds behind punctuation belong to its word; alone, with the whitespace behind them, they are another.
        return self._text[start + begin] not in "\r\n" or self._text[start + word : start + word + 2].isspace()

    def _starts(self, at: int) -> bool:
        """Whether composing (NFC) moves no character from behind this position to before it. A character that composes
        with one before it begins no token."""
        return not (self._composes and moves(self._text[at]))
