"""Remembers which tokens a text was made of, so that a reply comes back in the next prompt as it was generated.

A model may write a word with other tokens than the tokenizer would. The next turn of the conversation brings the reply
as text; were it tokenised anew, the prompt would part from the cached one at the first such word.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby

from luce.engine.events import Texts
from luce.text.detokenizer import Detokenizer
from luce.text.tokenizer import Tokenizer

# Ids that are remembered, in all: 8 bytes each, beside the texts.
_MOST_IDS = 2_000_000


class TokenMemory:
    """Texts between special tokens, and their ids. Thread-safe.

    elsewhere: the ids of texts of earlier runs by their digest, where these are known
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.elsewhere: Callable[[str], Sequence[int] | None] = lambda digest: None
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._size = 0

    def remember(self, ids: Sequence[int]) -> Texts:
        """Take the texts between the special tokens of a sequence, those that are whole characters, and return them."""
        found, end = [], 0
        for special, run in groupby(ids, self._tokenizer.is_special):
            tokens = tuple(run)
            begin, end = end, end + len(tokens)
            text = "" if special else self._text(tokens)
            if text and "\ufffd" not in text:
                self._learn(text, tokens)
                found.append((_digest(text), begin, end))
        return tuple(found)

    def forget(self) -> None:
        """Know none of them any longer."""
        with self._lock:
            self._known.clear()
            self._size = 0

    def recall(self, text: str) -> tuple[int, ...] | None:
        """The ids of a text, None if it is not known."""
        with self._lock:
            found = self._known.get(text)
            if found is not None:
                self._known.move_to_end(text)
                return found
        tokens = tuple(self.elsewhere(_digest(text)) or ())
        # Whoever keeps them may be wrong.
        if not tokens or self._text(tokens) != text:
            return None
        self._learn(text, tokens)
        return tokens

    def _text(self, tokens: Sequence[int]) -> str:
        decoder = Detokenizer(self._tokenizer)
        return "".join([decoder.push(token) for token in tokens]) + decoder.flush()

    def _learn(self, text: str, tokens: tuple[int, ...]) -> None:
        with self._lock:
            self._size += len(tokens) - len(self._known.pop(text, ()))
            self._known[text] = tokens
            while self._size > _MOST_IDS:
                self._size -= len(self._known.popitem(last=False)[1])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
