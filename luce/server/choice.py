"""One reply of a job while it is generated."""

from __future__ import annotations

from collections.abc import Sequence

from luce.api import Model
from luce.engine.events import Finished, Token
from luce.text.detokenizer import Detokenizer
from luce.text.reasoning import Delta, ReasoningSplitter


class Choice:
    """One reply while it is generated, and the result of a finished one."""

    def __init__(self, index: int, prompt: Sequence[int], echo: str | None, model: Model) -> None:
        self.index = index
        self.prompt = prompt
        self.echo = echo
        self.deltas: list[Delta] = [Delta(echo)] if echo else []
        self.splitter: ReasoningSplitter | None = None
        self.reasoning_tokens = 0
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
        return "".join([delta.content for delta in self.deltas])

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join([delta.reasoning for delta in self.deltas])

    def push(self, text: str) -> Delta:
        """Add the text of one token; returns the parts that are final now."""
        if self.splitter is None:
            return Delta(text)
        before = self.splitter.inside
        delta = self.splitter.push(text)
        self.reasoning_tokens += before or self.splitter.inside
        return delta

    def flush(self, text: str) -> list[Delta]:
        """The last text of the reply, with any text held back."""
        return [Delta(text)] if self.splitter is None else [self.splitter.push(text), self.splitter.flush()]
