"""One reply of a job while it is generated."""

from __future__ import annotations

from collections.abc import Sequence

from luce.engine.events import Finished, Token
from luce.text.reply_parser import Part, ReasoningPart, ReplyParser, TextPart


class Choice:
    """One reply while it is generated, and the result of a finished one.

    `echo`: the text of the prompt if the response repeats it before the reply.
    """

    def __init__(self, index: int, prompt: Sequence[int], echo: str | None, parser: ReplyParser) -> None:
        self.index = index
        self.prompt = prompt
        self.echo = echo
        self.parser = parser
        self.parts: list[Part] = []
        self.tokens: list[Token] = []
        self.scores: tuple[Token, ...] = ()
        self.finished: Finished | None = None
        self.first_token: float | None = None
        self.started: float | None = None
        self.cached = 0

    @property
    def content(self) -> str:
        """The reply's text, without its reasoning."""
        return "".join([part.text for part in self.parts if isinstance(part, TextPart)])

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join([part.text for part in self.parts if isinstance(part, ReasoningPart)])
