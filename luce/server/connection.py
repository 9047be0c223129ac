"""One client's connection: what is no HTTP/1.1, and clients that have sent their last byte."""

from __future__ import annotations

import asyncio
import logging
import socket
from email.utils import formatdate
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from luce import __version__, log
from luce.errors import ExpectationError, LuceError, MalformedError, NotSupportedError, VersionError
from luce.server.errors import openai_error
from luce.server.response import new_id
from luce.server.state import Server
from luce.server.stream import COMMENT_PING

_log = logging.getLogger("luce.http")

# Seconds between looks at a client that has sent its last byte, and looks between two probes.
_WATCH_SECONDS = 0.1
_WATCHES_PER_PROBE = 100
# A first line that is longer is aiohttp's to refuse.
_LONGEST_LINE = 1 << 16
# Clients skip it before the response.
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(web.RequestHandler):
    """aiohttp's connection with these differences:

    What is no HTTP gets a body of Luce's, closes the connection, and leaves one line in the log that holds nothing of
    it: aiohttp's messages quote what it could not read, which may be a key or a prompt.

    A client may half-close its connection behind its request and still gets its reply. TCP does not distinguish this
    from a client that has left, until something is sent: then the kernel of a client that has left answers with a
    reset. So the connection sends something that clients skip, soon and every 10 s, and looks for the reset.
    """

    def __init__(self, manager: web.Server, server: Server, **options: Any) -> None:
        """`manager` is aiohttp's server, `options` are those of web.RequestHandler."""
        super().__init__(manager, **options)
        self._server = server
        self._served: web.BaseRequest | None = None
        self._half_closed = False
        self._watches = 0
        self._probe: asyncio.Task[None] | None = None
        #: done once the connection has had a request, or has ended without one
        self.first_request: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: the connection's first line as far as it has come; None once it is whole
        self._first_line: bytes | None = b""

    def data_received(self, data: bytes) -> None:
        """Bytes of the client. A first line without a version is all of an HTTP/0.9 request: no head follows, for which
        aiohttp would wait."""
        super().data_received(data)
        if self._first_line is None:
            return
        line, end, rest = (self._first_line + data).partition(b"\n")
        self._first_line = None if end or len(line) > _LONGEST_LINE else line
        if end and line.strip() and b" HTTP/" not in line and not rest and self.transport is not None:
            super().data_received(b"\r\n")

    def begin(self, request: web.BaseRequest) -> None:
        """The handler of a request starts."""
        self._served = request
        self._had_request()

    def end(self) -> None:
        """The handler of the request has returned."""
        self._served = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection has ended."""
        self._had_request()
        super().connection_lost(exc)

    def _had_request(self) -> None:
        if not self.first_request.done():
            self.first_request.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to what aiohttp cannot read."""
        if isinstance(exc, HttpProcessingError):
            error: LuceError = MalformedError("the request is not valid HTTP/1.1")
            log.event(_log, "malformed request", logging.WARNING, status=error.status, client=request.remote)
        else:
            error = LuceError("internal error")
            log.failure(_log, "a connection failed", exc)
        self._server.metrics.requests.labels("other", str(error.status)).inc()
        return refusal(error, new_id("req_"))

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log a failure inside of aiohttp, without its message."""
        error = options.get("exc_info")
        log.failure(_log, "a connection failed", error if isinstance(error, BaseException) else None)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own type
        """The client has sent its last byte; True keeps the connection open."""
        if not self._half_closed:
            self._half_closed = True
            asyncio.get_running_loop().call_later(_WATCH_SECONDS, self._watch)
        return True

    def _watch(self) -> None:
        """Close the connection if nothing more is asked for, or if the client has left."""
        transport, request = self.transport, self._served
        if transport is None or transport.is_closing():
            return
        sock = transport.get_extra_info("socket")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
        elif request is None or not request.content.is_eof():
            transport.close()
        else:
            if self._watches % _WATCHES_PER_PROBE == 0:
                self._send_probe(transport, request)
            self._watches += 1
            asyncio.get_running_loop().call_later(_WATCH_SECONDS, self._watch)

    def _send_probe(self, transport: asyncio.Transport, request: web.BaseRequest) -> None:
        if request.writer.output_size:
            # A response of which a part is sent while its handler runs is a stream of events.
            self._probe = asyncio.ensure_future(_ping(request))
        elif request.version >= (1, 1):
            transport.write(_INTERIM)


async def _ping(request: web.BaseRequest) -> None:
    try:
        await request.writer.write(COMMENT_PING)
    except ConnectionError:
        return


def protocol_error(request: web.BaseRequest) -> LuceError | None:
    """Why a request cannot be served whatever its path is; None if it can be."""
    if not (1, 0) <= request.version <= (1, 1):
        return VersionError("only HTTP/1.0 and HTTP/1.1 are supported")
    if request.method == "CONNECT":
        return NotSupportedError("CONNECT is not supported: this is no proxy")
    connection = request.headers.get("Connection", "").lower()
    upgrade = request.headers.get("Upgrade", "").strip().lower()
    # Java's client offers h2c with each of its requests and goes on in HTTP/1.1.
    if upgrade not in ("", "h2c") and "upgrade" in (word.strip() for word in connection.split(",")):
        return NotSupportedError("the protocol cannot be changed (Upgrade): only HTTP/1.1 is supported")
    if request.headers.get("Expect", "100-continue").strip().lower() != "100-continue":
        return ExpectationError("Expect: only 100-continue is supported")
    return None


def refusal(error: LuceError, request_id: str) -> web.StreamResponse:
    """A response that ends the connection, for requests that may not be HTTP/1.1."""
    response = _Refusal(
        body=msgspec.json.encode(openai_error(error)),
        status=error.status,
        content_type="application/json",
        headers={"Server": f"luce/{__version__}", "x-request-id": request_id, "request-id": request_id},
    )
    response.force_close()
    return response


class _Refusal(web.Response):
    """Says HTTP/1.1, where aiohttp repeats the version of the request or what it takes for one."""

    async def prepare(self, request: web.BaseRequest) -> Any:
        body = self.body
        assert isinstance(body, bytes)
        self.headers.update({"Content-Length": str(len(body)), "Connection": "close", "Date": formatdate(usegmt=True)})
        self._out = request.writer
        await self._out.write_headers(f"HTTP/1.1 {self.status} {self.reason}", self.headers)
        return self._out

    async def write_eof(self, data: bytes = b"") -> None:
        body = self.body
        assert isinstance(body, bytes)
        await self._out.write_eof(body)
