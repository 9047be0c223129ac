"""Where the parser of calls reads: text that arrives in pieces, and what comes next in it.

The parts of the parser are generators: they yield where they need more text, and go on when it is there. What they read
depends on the whole text alone, not on where it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from luce.text.json_reader import JsonReader
from luce.text.reasoning import overlap

Found = TypeVar("Found")
#: reads something; yields where it needs more text
Reads = Generator[None, None, Found]

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[-+.\w]+")


class MalformedCallError(Exception):
    """The text is no call of the dialect."""


class EndOfReplyError(Exception):
    """The reply ends before what is read is complete."""


def coming(text: str, at: int, known: Sequence[str]) -> str | None:
    """The first of the `known` texts that stands at an offset; "" if none does, None if further text must tell."""
    rest = text[at : at + max(map(len, known), default=0)]
    for one in known:
        if rest.startswith(one):
            return one
        if one.startswith(rest):
            return None
    return ""


class Cursor:
    """A place in a marked text. Offsets are valid until `commit`."""

    def __init__(self) -> None:
        self.text = ""
        #: offset of what is read next
        self.at = 0
        #: characters before `text`, which were dropped
        self.dropped = 0
        #: there is no further text
        self.ended = False

    def commit(self) -> None:
        """Drop the text that was read: it will not be read again."""
        self.dropped += self.at
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Reads[None]:
        """Wait for further text. Raises EndOfReplyError if there is none."""
        if self.ended:
            raise EndOfReplyError
        yield

    def peek(self) -> Reads[str]:
        """The next character that is no white space, which is passed over."""
        while True:
            space = _SPACE.match(self.text, self.at)
            assert space is not None
            if space.end() < len(self.text):
                self.at = space.end()
                return self.text[self.at]
            yield from self.more()

    def accept(self, text: str) -> Reads[bool]:
        """Pass over `text` if it comes next, whatever white space stands before its words. Else nothing is read."""
        begin = self.at
        for word in text.split():
            while True:
                yield from self.peek()
                have = self.text[self.at : self.at + len(word)]
                if have == word:
                    self.at += len(word)
                    break
                if not word.startswith(have):
                    self.at = begin
                    return False
                yield from self.more()
        return True

    def expect(self, text: str) -> Reads[None]:
        """Pass over `text`. Raises MalformedCallError if it does not come next."""
        if not (yield from self.accept(text)):
            raise MalformedCallError

    def until(self, stops: Sequence[str], fits: Callable[[str], bool]) -> Reads[str]:
        """The text up to the first of `stops`, which is not passed over, without white space around it.

        Raises MalformedCallError as soon as nothing that begins like it `fits`.
        """
        while True:
            found = [at for stop in stops if (at := self.text.find(stop, self.at)) >= 0]
            have = self.text[self.at : min(found, default=len(self.text))]
            if not found:
                have = have[: len(have) - max(overlap(have, stop) for stop in stops)]
            have = have.strip()
            if not fits(have):
                raise MalformedCallError
            if found:
                self.at = min(found)
                return have
            yield from self.more()

    def one_of(self, known: Sequence[str]) -> Reads[str]:
        """Pass over the first of the `known` texts that comes next, and return it; "" if none does."""
        while (found := coming(self.text, self.at, known)) is None and not self.ended:
            yield
        self.at += len(found or "")
        return found or ""

    def read_with(self, reader: JsonReader, out: Callable[[str], None] | None) -> Reads[str]:
        """What a reader makes of the text, given to `out` piece by piece, if there is one; what a reader that does not
        end lacks is given to `out` too. Raises MalformedCallError and EndOfReplyError then."""
        pieces: list[str] = []
        while True:
            text, self.at = reader.read(self.text, self.at)
            if text:
                pieces.append(text)
                if out is not None:
                    out(text)
                    self.commit()
            if reader.done:
                return "".join(pieces)
            try:
                if reader.failed:
                    raise MalformedCallError
                yield from self.more()
            except (MalformedCallError, EndOfReplyError):
                if out is not None:
                    out(reader.closing)
                raise

    def json_value(self, out: Callable[[str], None] | None = None) -> Reads[str]:
        """A JSON value as text. An object or a list is given to `out` piece by piece, if there is one.

        Raises MalformedCallError, and EndOfReplyError in the middle of a value.
        """
        first = yield from self.peek()
        if first in "{[":
            return (yield from self.read_with(JsonReader(), out))
        pattern = _STRING if first == '"' else _SCALAR
        while True:
            found = pattern.match(self.text, self.at)
            if found is not None and (first == '"' or found.end() < len(self.text)):
                self.at = found.end()
                return found[0]
            if found is None and first != '"':
                raise MalformedCallError
            yield from self.more()
