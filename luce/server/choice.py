"""One reply of a job while it is generated."""

from __future__ import annotations

import time
from typing import Any

from luce.compress.compressor import CompressedPrompt
from luce.engine.events import Finished, Progress, Timings, Token
from luce.text.reply_parser import Part, ReasoningPart, ReplyParser, TextPart


class Choice:
    """One reply while it is generated, and the result of a finished one.

    `echo`: the text of the prompt if the response repeats it before the reply.
    """

    def __init__(self, index: int, reading: CompressedPrompt, echo: str | None, parser: ReplyParser) -> None:
        self.index = index
        #: the prompt as the target reads it, and how compression made it
        self.prompt = reading.ids
        self.reading = reading
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

    def so_far(self) -> Timings:
        """The timings of a reply that goes on."""
        now = time.monotonic()
        first, started = self.first_token or now, self.started or now
        return Timings(
            prompt=first - started,
            predicted=now - first,
            prompt_tokens=len(self.prompt),
            predicted_tokens=len(self.tokens),
            cached_tokens=self.cached,
        )

    def prompt_progress(self, event: Progress) -> dict[str, Any]:
        """llama.cpp's `prompt_progress`."""
        seconds = 0.0 if self.started is None else time.monotonic() - self.started
        return {
            "total": event.total,
            "cache": event.cached,
            "processed": event.done,
            "time_ms": round(seconds * 1000, 3),
        }
