"""Lookup: the continuation of the latest earlier place where a text ended as now, in itself or in a recent reply.

The longest suffix of `longest` down to `shortest` tokens that occurred before decides, at its latest occurrence
(Saxena, "Prompt Lookup Decoding", 2023). Each search reads the whole text: 100k tokens take half a millisecond, and an
index of them would take 100 MB. Recent texts are those of the same session: acceptance rates would tell one client what
another one's replies are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from luce.runtime.step import Int32

LONGEST, SHORTEST = 12, 2
# Ended texts that are kept for their sessions, and the most tokens of each: its end, 256 KB for all of them.
_RECENT_TEXTS, _RECENT_TOKENS = 16, 4096


@dataclass(frozen=True)
class Copy:
    """The continuation of an earlier place in a text."""

    tokens: list[int]
    #: tokens before that place that equal the text's last ones, up to the longest suffix that is looked for
    matched: int

    @property
    def lengths(self) -> list[int]:
        """Of each token how many tokens before it are known to stand before its source too."""
        return [self.matched + place for place in range(len(self.tokens))]


class Lookup:
    """Finds earlier continuations of a text's end. One thread uses it."""

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.longest = longest
        self.shortest = shortest
        self._texts: dict[int, tuple[str, Int32]] = {}
        self._recent: deque[tuple[str, Int32]] = deque(maxlen=_RECENT_TEXTS)
        #: of each slot's text that waits for its next token, the tokens with which `find` may find something
        self._following: dict[int, set[int]] = {}

    def prepare(self, slot: int, session: str, text: Int32) -> None:
        """Read a slot's text before its next token is known, int32 [n > 0], for `misses`."""
        assert self.shortest > 1, "a suffix of one token may stand anywhere"
        self._texts[slot] = session, text
        # Where the last token stands, the next one has to follow for a suffix of two.
        sources = [text, *(recent for name, recent in self._recent if name == session)]
        found = (source[1:][source[:-1] == text[-1]].tolist() for source in sources)
        self._following[slot] = {token for tokens in found for token in tokens}

    def misses(self, slot: int, token: int) -> bool:
        """Whether `find` finds nothing for the text that was prepared last for a slot and this token behind it."""
        return token not in self._following[slot]

    def find(self, slot: int, session: str, text: Int32, most: int) -> Copy | None:
        """Up to `most` > 0 tokens that may follow a slot's text, int32 [n]; None where its end does not occur before.

        The text's own places come before those of recent texts with as long a suffix.
        """
        self._texts[slot] = session, text
        place, matched = _behind(text, text[-self.longest :], self.shortest)
        source = text
        for name, recent in reversed(self._recent):
            if name == session and matched < self.longest:
                other, length = _behind(recent, text[-self.longest :], self.shortest)
                if length > matched:
                    place, matched, source = other, length, recent
        if not matched:
            return None
        tokens = source[place : place + most].tolist()
        if source is text:
            # An occurrence that overlaps the end of the text is a repetition: it continues with the copied tokens.
            for _ in range(most - len(tokens)):
                tokens.append(tokens[len(tokens) - (len(text) - place)])
        return Copy(tokens, matched)

    def forget(self, slot: int) -> None:
        """The sequence in a slot has ended: its text is a recent one."""
        self._following.pop(slot, None)
        session, text = self._texts.pop(slot, ("", None))
        if text is not None:
            self._recent.append((session, text[-_RECENT_TOKENS:].copy()))


def _behind(text: Int32, suffix: Int32, shortest: int) -> tuple[int, int]:
    """The place behind the latest occurrence of the longest part of `suffix` that has one with a token behind it, and
    that part's length; (0, 0) without one."""
    # Places behind occurrences of a suffix that grows; a token follows each.
    places = np.flatnonzero(text[:-1] == suffix[-1]) + 1
    found = 0, 0
    for size in range(1, len(suffix) + 1):
        places = places[places >= size]
        places = places[text[places - size] == suffix[-size]]
        if not len(places):
            break
        if size >= shortest:
            found = int(places[-1]), size
    return found
