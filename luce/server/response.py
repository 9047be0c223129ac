"""The response to a job, whole or streamed, built from the events of its sequences: what all endpoints share."""

from __future__ import annotations

import random
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from luce.api import Model
from luce.engine.events import (
    Event,
    Finished,
    Progress,
    PromptScores,
    Started,
    Timings,
    Token,
    Tokens,
)
from luce.errors import LuceError
from luce.server.choice import Choice
from luce.server.errors import openai_error
from luce.server.prepare import Job
from luce.server.stream import COMMENT_PING, ServerSentEvent
from luce.text.reply_parser import Part, ReplyParser, joined

Json = dict[str, Any]

_BASE62 = string.digits + string.ascii_letters
_SYSTEM = random.SystemRandom()


class Origin(NamedTuple):
    """What the responses of two servers to one request have in common."""

    #: ids are drawn from it
    names: random.Random
    #: in seconds since 1970
    created: int


#: that of the present request, if another server may have to go on with its response
origin: ContextVar[Origin | None] = ContextVar("origin", default=None)


def new_id(prefix: str) -> str:
    """`prefix` and 24 random base62 characters."""
    common = origin.get()
    return prefix + "".join((_SYSTEM if common is None else common.names).choices(_BASE62, k=24))


class ResponseBuilder(ABC):
    """Builds one response. `add` takes every event first; the other methods only read.

    A stream is `opening` of every reply, then for each of its events `extension`, `scores` or `progress`, then
    `closing`, and `ending` once all replies are closed, or `failure`.
    """

    #: begins the response's id
    prefix: str
    #: sent behind the last event of a stream
    end: bytes = b""

    def __init__(self, job: Job, model: Model) -> None:
        self._job = job
        self._model = model
        self.id = new_id(self.prefix)
        common = origin.get()
        self.created = int(time.time()) if common is None else common.created
        self.choices = [
            Choice(i, job.readings[i // job.n], job.echoes[i // job.n] if job.echoes else None, self._parser(i))
            for i in range(job.choices)
        ]

    def _parser(self, index: int) -> ReplyParser:
        """What divides a reply into its parts."""
        return ReplyParser()

    def add(self, index: int, event: Event) -> list[Part]:
        """Take an event; returns the parts that it adds to the reply."""
        choice = self.choices[index]
        parts: list[Part] = []
        if isinstance(event, Tokens):
            if choice.first_token is None:
                choice.first_token = time.monotonic()
            choice.tokens += event.tokens
            parts = joined(part for token in event.tokens for part in self._parts(choice, token))
        elif isinstance(event, Finished):
            choice.finished = event
            parts = joined(self._last_parts(choice, event))
        elif isinstance(event, Started):
            choice.started = time.monotonic()
        elif isinstance(event, Progress):
            choice.cached = event.cached
        elif isinstance(event, PromptScores):
            choice.scores = event.tokens
        choice.parts += parts
        return parts

    def _parts(self, choice: Choice, token: Token) -> list[Part]:
        """The parts of a reply that one more token makes certain."""
        return choice.parser.push(token.id, token.text)

    def _last_parts(self, choice: Choice, finished: Finished) -> list[Part]:
        """The parts of a reply that its end makes certain."""
        return choice.parser.flush(finished.text)

    # --- stream

    @abstractmethod
    def opening(self, index: int) -> Iterable[ServerSentEvent]:
        """The first events of a reply, sent as soon as it is admitted."""

    @abstractmethod
    def extension(self, index: int, parts: Sequence[Part], tokens: Sequence[Token] = ()) -> Iterable[ServerSentEvent]:
        """The events for the parts and tokens of one step."""

    def progress(self, index: int, event: Progress) -> Iterable[ServerSentEvent]:
        """The events for the progress of the prompt, if the request asks for them."""
        return ()

    def scores(self, index: int) -> Iterable[ServerSentEvent]:
        """The events after PromptScores. Takes time in proportion to the prompt."""
        return ()

    @abstractmethod
    def closing(self, index: int) -> Iterable[ServerSentEvent]:
        """The events that end a reply."""

    @abstractmethod
    def ending(self) -> Iterable[ServerSentEvent]:
        """The last events of the stream."""

    @staticmethod
    def refusal(error: LuceError) -> Iterable[ServerSentEvent]:
        """The last events of a stream whose request is refused after its headers were sent: it waited for its model."""
        return (ServerSentEvent(openai_error(error)),)

    def failure(self, error: LuceError) -> Iterable[ServerSentEvent]:
        """The last events of a stream that fails after its headers were sent."""
        return self.refusal(error)

    def ping(self) -> bytes:
        """What a stream sends while it waits."""
        return COMMENT_PING

    # --- whole reply

    @abstractmethod
    def reply(self) -> Json:
        """The whole reply. Takes time in proportion to its size."""

    def _finished(self) -> list[Timings]:
        """The timings of the replies that have ended."""
        return [choice.finished.timings for choice in self.choices if choice.finished is not None]

    def log_fields(self, arrived: float) -> Json:
        """Fields about tokens for the log line; `arrived`: monotonic time of the request."""
        finished = [choice.finished for choice in self.choices if choice.finished is not None]
        firsts = [choice.first_token for choice in self.choices if choice.first_token is not None]
        out = sum(len(choice.tokens) for choice in self.choices)
        predicted = max((end.timings.predicted for end in finished), default=0.0)
        return {
            "prompt": sum(len(ids) for ids in self._job.prompts),
            "compressed_from": self._compressed_from(),
            "cached": self._cached(),
            "out": out,
            "finish": ",".join(sorted({end.reason.value for end in finished})) or None,
            "queue": max((end.timings.queued for end in finished), default=None),
            "ttft": min(firsts) - arrived if firsts else None,
            "decode": f"{out / predicted:.1f}t/s" if predicted else None,
        }

    def _compressed_from(self) -> int | None:
        """Tokens of the prompts before compression; None if none was compressed."""
        readings = self._job.readings
        whole = not any(reading.shortened for reading in readings)
        return None if whole else sum(reading.original for reading in readings)

    def _cached(self) -> str:
        """Tokens from the prefix cache, and the tier of most of them."""
        done = [choice.finished.timings for choice in self.choices if choice.finished is not None]
        most = max(done, key=lambda timings: timings.cached_tokens, default=Timings())
        return f"{sum(choice.cached for choice in self.choices)}/{most.cache_tier}"
