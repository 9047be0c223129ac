"""A reply's parts as segments, one behind the other: its reasoning, its text, and each of its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from luce.engine.events import Token
from luce.text.reply_parser import CallArguments, CallEnded, CallStarted, Part, ReasoningPart, TextPart


class Kind(Enum):
    """What a segment holds."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Opened(NamedTuple):
    """A segment begins; `name`: the tool of a call."""

    kind: Kind
    name: str = ""


class Extended(NamedTuple):
    """More text of the open segment; of a call, of its arguments. `tokens`: of text, as in TextPart."""

    text: str
    tokens: tuple[Token, ...] = ()


class Closed(NamedTuple):
    """The open segment ends, with all its text and tokens. `whole`: the reply went on behind it, or ended the call
    itself."""

    text: str
    whole: bool
    tokens: tuple[Token, ...] = ()


Step = Opened | Extended | Closed


class Segments:
    """Makes steps of parts. One segment is open at a time; text and reasoning of white space alone make none."""

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._pieces: list[str] = []
        self._tokens: list[Token] = []
        #: whether the segment is more than white space
        self._opened = False

    def extend(self, parts: Iterable[Part]) -> Iterator[Step]:
        """The steps for further parts."""
        for part in parts:
            if isinstance(part, TextPart):
                yield from self._text(Kind.TEXT, part.text, part.tokens)
            elif isinstance(part, ReasoningPart):
                yield from self._text(Kind.REASONING, part.text)
            elif isinstance(part, CallStarted):
                yield from self._close(whole=True)
                self._kind, self._opened = Kind.CALL, True
                yield Opened(Kind.CALL, part.name)
            elif isinstance(part, CallArguments):
                self._pieces.append(part.fragment)
                yield Extended(part.fragment)
            elif isinstance(part, CallEnded):
                yield from self._close(whole=part.whole)

    def close(self) -> Iterator[Step]:
        """The last step, at the end of the reply."""
        yield from self._close(whole=False)

    def _close(self, *, whole: bool) -> Iterator[Step]:
        opened, text, tokens = self._opened, "".join(self._pieces), tuple(self._tokens)
        self._kind, self._pieces, self._tokens, self._opened = None, [], [], False
        if opened:
            yield Closed(text, whole, tokens)

    def _text(self, kind: Kind, text: str, tokens: tuple[Token, ...] = ()) -> Iterator[Step]:
        if self._kind is not kind:
            yield from self._close(whole=True)
            self._kind = kind
        self._pieces.append(text)
        self._tokens += tokens
        if not self._opened:
            text, tokens = "".join(self._pieces), tuple(self._tokens)
            if not text.strip():
                return
            self._opened = True
            yield Opened(kind)
        yield Extended(text, tokens)
