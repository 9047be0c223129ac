"""The parts of a reply while it is generated: reasoning, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from luce.engine.events import Token
from luce.text.reasoning import Delta, Splitter

if TYPE_CHECKING:
    from luce.text.call_parser import CallParser


class TextPart(NamedTuple):
    """New text of the reply."""

    text: str
    #: the tokens that it is made of, where a response scores them
    tokens: tuple[Token, ...] = ()


class ReasoningPart(NamedTuple):
    """New text of the reasoning before the reply."""

    text: str


class CallStarted(NamedTuple):
    """A call of a tool begins; calls are numbered from 0 in a reply."""

    call: int
    name: str
    #: the id that the model wrote
    id: str | None = None
    #: the number in the conversation that the model wrote
    number: str | None = None


class CallArguments(NamedTuple):
    """A further piece of a call's arguments; all pieces of a call together are the JSON text of an object."""

    call: int
    fragment: str


class CallEnded(NamedTuple):
    """A call is over. `whole`: the model ended it; otherwise its arguments were closed where it was cut."""

    call: int
    whole: bool = True


Part = TextPart | ReasoningPart | CallStarted | CallArguments | CallEnded


class ReplyParser:
    """Divides the text of one reply into its parts. The parts, each kind joined, do not depend on the division of the
    text into pieces.

    `splitter` separates the reasoning; None: the model marks no reasoning. `calls` finds calls in what is left; None:
    the request has no tools.
    """

    def __init__(self, splitter: Splitter | None = None, calls: CallParser | None = None) -> None:
        self._splitter = splitter
        self._calls = calls
        #: tokens of the reasoning between its markers
        self.reasoning_tokens = 0

    @property
    def calls(self) -> int:
        """Calls that have started."""
        return 0 if self._calls is None else self._calls.calls

    @property
    def bad_calls(self) -> int:
        """Calls that came as text because they were malformed, or called no tool of the request."""
        return 0 if self._calls is None else self._calls.bad_calls

    @property
    def cut_calls(self) -> int:
        """Calls that ended before they were whole."""
        return 0 if self._calls is None else self._calls.cut_calls

    def push(self, token: int, text: str) -> list[Part]:
        """The parts that one more token makes final, with the text that it makes certain."""
        splitter = self._splitter
        if splitter is None:
            return self._parts(Delta(text))
        before = splitter.inside
        delta = splitter.push(text)
        self.reasoning_tokens += before and splitter.inside
        return self._parts(delta)

    def flush(self, text: str) -> list[Part]:
        """The last parts, with the text that was held back until the reply's end."""
        splitter = self._splitter
        deltas = [Delta(text)] if splitter is None else [splitter.push(text), splitter.flush()]
        found = [part for delta in deltas for part in self._parts(delta)]
        return found if self._calls is None else [*found, *self._calls.flush()]

    def _parts(self, delta: Delta) -> list[Part]:
        found: list[Part] = []
        calls = self._calls
        if delta.reasoning:
            found.append(ReasoningPart(delta.reasoning if calls is None else calls.spelled(delta.reasoning)))
        if delta.content:
            found += [TextPart(delta.content)] if calls is None else calls.push(delta.content)
        return found


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts, neighbours of one kind as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            found[-1] = TextPart(last.text + part.text, last.tokens + part.tokens)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            found[-1] = ReasoningPart(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.call == last.call:
            found[-1] = CallArguments(part.call, last.fragment + part.fragment)
        else:
            found.append(part)
    return found
