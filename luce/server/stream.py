"""Server-sent events in one response. A client that does not read them is disconnected after --write-timeout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

#: a comment, which clients skip; it keeps proxies from closing the connection
COMMENT_PING = b": ping\n\n"


class ServerSentEvent(NamedTuple):
    """One event of a stream."""

    #: a JSON value
    data: dict[str, Any]
    #: the event's name, for APIs that name events
    name: str | None = None

    def encoded(self) -> bytes:
        """The event's bytes."""
        name = b"" if self.name is None else b"event: " + self.name.encode() + b"\n"
        return name + b"data: " + msgspec.json.encode(self.data) + b"\n\n"


class ClientGoneError(Exception):
    """The client no longer reads the stream."""


class EventStream:
    """A stream of events. Methods raise ClientGoneError if the client disconnected or did not read in time.

    A write returns when the transport's buffer is below its mark (64 KiB), so memory is bounded.
    """

    def __init__(self, request: web.Request, write_timeout: float) -> None:
        self._request = request
        self._timeout = write_timeout
        self._sent_at = time.monotonic()
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def started(self) -> bool:
        """Whether status and headers are sent."""
        return self.response.prepared

    @property
    def silence(self) -> float:
        """Seconds since the last events."""
        return time.monotonic() - self._sent_at

    async def start(self) -> None:
        """Send status and headers, unless they are sent."""
        if not self.started:
            await self._sent(self.response.prepare(self._request))

    async def send(self, events: Iterable[ServerSentEvent]) -> None:
        """Events in one write; none is no write."""
        if data := b"".join([event.encoded() for event in events]):
            await self.send_encoded(data)

    async def send_encoded(self, data: bytes) -> None:
        """Events that are encoded already."""
        self._sent_at = time.monotonic()
        await self._sent(self.response.write(data))

    async def _sent(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await sending
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError from None
        except ConnectionError:
            raise ClientGoneError from None
