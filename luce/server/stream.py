"""Server-sent events over one response. A client that does not read is dropped after --write-timeout."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGoneError(Exception):
    """Nobody reads the stream any more."""


class EventStream:
    """Every method raises ClientGoneError when the client has left or did not read for `write_timeout` seconds.

    A write returns when the transport's buffer is below its mark (64 KiB), so memory is bounded.
    """

    def __init__(self, request: web.Request, write_timeout: float) -> None:
        self._request = request
        self._timeout = write_timeout
        self.response = web.StreamResponse(headers=_HEADERS)

    async def start(self) -> None:
        """Send the head."""
        await self.response.prepare(self._request)

    async def send(self, value: Any) -> None:
        """One event with a JSON value."""
        await self.send_encoded(msgspec.json.encode(value))

    async def send_encoded(self, data: bytes) -> None:
        """One event with data that is JSON already."""
        await self._write(b"data: " + data + b"\n\n")

    async def ping(self) -> None:
        """A comment, which clients skip and proxies count as life."""
        await self._write(b": ping\n\n")

    async def done(self) -> None:
        """The event that ends OpenAI's streams."""
        await self._write(b"data: [DONE]\n\n")

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError from None
        except ConnectionError:
            raise ClientGoneError from None
