"""Server-sent events in one response. A client that does not read them is disconnected after --write-timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

#: a comment, which clients skip
PING = b": ping\n\n"


class ClientGoneError(Exception):
    """The client no longer reads the stream."""


class EventStream:
    """A stream of events. Methods raise ClientGoneError if the client disconnected or did not read in time.

    A write returns when the transport's buffer is below its mark (64 KiB), so memory is bounded.
    """

    def __init__(self, request: web.Request, write_timeout: float) -> None:
        self._request = request
        self._timeout = write_timeout
        self.response = web.StreamResponse(headers=_HEADERS)

    async def start(self) -> None:
        """Send status and headers."""
        await self._sent(self.response.prepare(self._request))

    async def send(self, value: Any) -> None:
        """One event with a JSON value."""
        await self.send_encoded(msgspec.json.encode(value))

    async def send_encoded(self, data: bytes) -> None:
        """One event with encoded JSON."""
        await self._write(b"data: " + data + b"\n\n")

    async def ping(self) -> None:
        """A comment, which clients skip; it keeps proxies from closing the connection."""
        await self._write(PING)

    async def done(self) -> None:
        """The event that ends OpenAI's streams."""
        await self._write(b"data: [DONE]\n\n")

    async def _write(self, data: bytes) -> None:
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
