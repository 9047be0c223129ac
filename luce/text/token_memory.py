"""Remembers the ids of the texts of replies, so that the next prompt contains a reply as it was generated.

A model may write a word with other tokens than the tokenizer would. The next request of the conversation contains the
reply as text; tokenised again, the prompt would diverge from the cached one at the first such word.
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

#: most ids that are remembered: 8 bytes each, plus the texts
CAPACITY = 2_000_000


class TokenMemory:
    """Texts between special tokens, and their ids. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, capacity: int = CAPACITY) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        #: looks up the ids of a text of an earlier run by its digest
        self.look_up: Callable[[str], Sequence[int] | None] = lambda digest: None
        self._lock = threading.Lock()
        #: by the digest of a text, or of what else is known by one
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._size = 0

    def remember(self, ids: Sequence[int]) -> Texts:
        """Remember the texts of whole characters between the special tokens of a sequence, and return them."""
        found, end = [], 0
        for special, run in groupby(ids, self._tokenizer.is_special):
            tokens = tuple(run)
            begin, end = end, end + len(tokens)
            text = "" if special else self._text(tokens)
            if text and "\ufffd" not in text:
                digest = _digest(text)
                self.add(digest, tokens)
                found.append((digest, begin, end))
        return tuple(found)

    def forget(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._known.clear()
            self._size = 0

    def recall(self, text: str) -> tuple[int, ...] | None:
        """The ids of a text, None if it is unknown."""
        return self.find(_digest(text), lambda tokens: self._text(tokens) == text)

    def find(self, digest: str, is_right: Callable[[Sequence[int]], bool]) -> tuple[int, ...] | None:
        """The ids that a digest stands for, None if it is unknown. `is_right` tests ids of an earlier run."""
        with self._lock:
            found = self._known.get(digest)
            if found is not None:
                self._known.move_to_end(digest)
                return found
        tokens = tuple(self.look_up(digest) or ())
        # Stored ids may be wrong.
        if not tokens or not is_right(tokens):
            return None
        self.add(digest, tokens)
        return tokens

    def _text(self, tokens: Sequence[int]) -> str:
        decoder = Detokenizer(self._tokenizer)
        return "".join([decoder.push(token) for token in tokens]) + decoder.flush()

    def add(self, digest: str, tokens: tuple[int, ...]) -> None:
        """Remember the ids that a digest stands for."""
        with self._lock:
            self._size += len(tokens) - len(self._known.pop(digest, ()))
            self._known[digest] = tokens
            while self._size > self._capacity:
                self._size -= len(self._known.popitem(last=False)[1])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
