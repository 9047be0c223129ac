"""Remembers which tokens a text was made of, so that a reply comes back in the next prompt as it was generated.

A model may write a word with other tokens than the tokenizer would. The next turn of the conversation brings the reply
as text; were it tokenised anew, the prompt would part from the cached one at the first such word.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby

from luce.text.detokenizer import Detokenizer
from luce.text.tokenizer import Tokenizer

# Ids that are remembered, in all: 8 bytes each, beside the texts.
_MOST_IDS = 2_000_000


class TokenMemory:
    """Texts between special tokens, and their ids. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._size = 0

    def remember(self, ids: Sequence[int]) -> None:
        """Take the texts between the special tokens of a sequence, as far as they are whole characters."""
        for special, run in groupby(ids, self._tokenizer.is_special):
            if special:
                continue
            tokens = tuple(run)
            decoder = Detokenizer(self._tokenizer)
            text = "".join([decoder.push(token) for token in tokens]) + decoder.flush()
            if "\ufffd" in text:
                continue
            with self._lock:
                self._size += len(tokens) - len(self._known.pop(text, ()))
                self._known[text] = tokens
                while self._size > _MOST_IDS:
                    self._size -= len(self._known.popitem(last=False)[1])

    def recall(self, text: str) -> tuple[int, ...] | None:
        """The ids of a text, None if it is not known."""
        with self._lock:
            found = self._known.get(text)
            if found is not None:
                self._known.move_to_end(text)
            return found
