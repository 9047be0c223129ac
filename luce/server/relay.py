"""A stream that a process in between passes on in frames, and its record, from which another server makes the rest.

A record has the seed of the request's draws and ids, and the events that the client has got. The builder of the other
server takes these events again, without sending what it says of them; its engine begins each reply with their tokens.
So the client sees one stream.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from luce.engine.events import Event, Finished, Progress, Tokens
from luce.errors import RequestError
from luce.server.prepare import Job
from luce.server.response import Origin
from luce.server.stream import EventStream
from luce.server.stream_frames import RELAY_HEADER, Frame, encoded

#: events of a record, by their name in it: builders make nothing of others that a client sees
_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Progress, Tokens, Finished)}
_SEED_BITS = 32


class FramedStream(EventStream):
    """A stream in frames. What is noted comes with the next bytes: until then the client has none of it."""

    def __init__(self, request: web.Request, write_timeout: float) -> None:
        super().__init__(request, write_timeout)
        self.response.headers[RELAY_HEADER] = "1"
        self._notes: list[Any] = []

    def abort(self) -> None:
        """End the connection in the middle of the stream: it goes on elsewhere."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def note(self, *values: Any) -> None:
        """Add a note."""
        self._notes.append(values)

    def note_event(self, choice: int, event: Event) -> None:
        """Note an event whose parts the next bytes have."""
        if (name := type(event).__name__) in _EVENTS:
            self.note("event", choice, name, event)

    async def send_encoded(self, data: bytes) -> None:
        """Events that are encoded already, in a frame."""
        notes, self._notes = self._notes, []
        await super().send_encoded(encoded(Frame(data, msgspec.json.encode(notes))))


@dataclasses.dataclass
class StreamRecord:
    """What a client has got of a stream."""

    #: of the ids in the response
    ids: str
    #: the response's time, in seconds since 1970
    created: int
    #: of the draws
    seed: int
    #: choices whose first events were sent
    opened: set[int] = dataclasses.field(default_factory=set)
    events: list[tuple[int, Event]] = dataclasses.field(default_factory=list)
    #: whether the events behind all replies were sent, and what follows these
    closed: bool = False
    over: bool = False

    @classmethod
    def new(cls, job: Job) -> StreamRecord:
        """That of a stream that begins."""
        seed = secrets.randbits(_SEED_BITS) if job.params.seed is None else job.params.seed
        return cls(secrets.token_hex(16), int(time.time()), seed)

    @classmethod
    def read(cls, data: bytes) -> StreamRecord:
        """A record as luce.server.stream_frames.record_of makes it. Raises RequestError."""
        try:
            notes = [tuple(note) for frame in msgspec.json.decode(data) for note in frame]
            (head,) = [values for name, *values in notes if name == "head"]
            record = cls(*msgspec.convert(head, tuple[str, int, int]))
            record.opened = {int(values[0]) for name, *values in notes if name == "opened"}
            record.closed, record.over = (any(note[0] == name for note in notes) for name in ("closed", "over"))
            for choice, name, fields in (values for name, *values in notes if name == "event"):
                record.events.append((int(choice), msgspec.convert(fields, _EVENTS[name])))
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"this is no record of a stream: {error}") from None
        return record

    @property
    def head(self) -> tuple[str, str, int, int]:
        """The note of a stream's first frame."""
        return "head", self.ids, self.created, self.seed

    @property
    def origin(self) -> Origin:
        """Where ids and time of the response come from."""
        return Origin(random.Random(self.ids), self.created)

    @property
    def ended(self) -> frozenset[int]:
        """Choices whose last events were sent."""
        return frozenset(choice for choice, event in self.events if isinstance(event, Finished))

    def given(self, choices: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """By choice, the tokens that its reply begins with."""
        tokens: dict[int, list[int]] = {choice: [] for choice in choices}
        for choice, event in self.events:
            if isinstance(event, Tokens) and choice in tokens:
                tokens[choice] += [token.id for token in event.tokens]
        return {choice: tuple(found) for choice, found in tokens.items() if found}


def begins_record(job: Job) -> bool:
    """Whether a stream can go on elsewhere: scores of a prompt would have to be made again."""
    return job.stream and job.params.prompt_logprobs is None
