"""One reply of a job while it grows."""

from __future__ import annotations

from collections.abc import Sequence

from luce.api import Model
from luce.engine.events import Finished, Token
from luce.text.detokenizer import Detokenizer
from luce.text.reasoning import ReasoningSplitter, Said


class Choice:
    """One reply while it grows, and what a finished one leaves."""

    def __init__(self, index: int, prompt: Sequence[int], echo: str | None, model: Model) -> None:
        self.index = index
        self.prompt = prompt
        self.echo = echo
        self.said: list[Said] = [Said(echo)] if echo else []
        self.splitter: ReasoningSplitter | None = None
        self.thinking = 0
        self.tokens: list[Token] = []
        self.scores: tuple[Token, ...] = ()
        self.finished: Finished | None = None
        self.first_token: float | None = None
        self.started: float | None = None
        self.cached = 0
        #: characters before the next token, for `text_offset`
        self.offset = len(echo or "")
        self.decoder = Detokenizer(model.tokenizer)

    @property
    def content(self) -> str:
        """The reply's text, without its reasoning."""
        return "".join([said.content for said in self.said])

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join([said.reasoning for said in self.said])

    def say(self, text: str) -> Said:
        """One token's text, as the parts that are certain now."""
        if self.splitter is None:
            return Said(text)
        before = self.splitter.inside
        said = self.splitter.push(text)
        self.thinking += before or self.splitter.inside
        return said

    def end(self, text: str) -> list[Said]:
        """The reply's last text, and what was held back."""
        return [Said(text)] if self.splitter is None else [self.splitter.push(text), self.splitter.flush()]
