"""Bodies of requests: their media type, reading them within time and size, and expanding compressed ones."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable

import zstandard
from aiohttp import web

from luce.errors import BodyTimeoutError, MediaTypeError, RequestError, TooLargeError
from luce.server.state import CALL, Server
from luce.server.stream_frames import record_length

_SECONDS = 60.0
# As WHATWG's MIME sniffing defines a JSON type.
_JSON = re.compile(r"(application|text)/json|[^/;\s]+/[^/;\s]+\+json")
# Bytes of one step of an expansion.
_STEP = 1 << 20
#: largest window of a zstd body, in bytes (RFC 9659)
_ZSTD_WINDOW = 8 << 20
# Parts of one body that are compressed on their own.
_MOST_MEMBERS = 64


async def read_body(request: web.Request, server: Server) -> bytes:
    """The JSON text of a request, expanded in a worker thread. A record behind it goes to the request's Call.

    Raises MediaTypeError for a body that is not JSON or encoded in another way than gzip, deflate or zstd,
    TooLargeError for one of more than --max-body-mib (expanded), BodyTimeoutError, RequestError.
    """
    limit = server.config.max_body_mib << 20
    expand = _expander(request)
    too_large = TooLargeError(f"the request body exceeds {server.config.max_body_mib} MiB (--max-body-mib)")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    try:
        async with asyncio.timeout(_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise BodyTimeoutError(f"the request body did not arrive within {_SECONDS:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:
        raise RequestError("request body: not encoded as its headers say", code="invalid_body") from None
    call = request[CALL]
    if call.relayed and (length := record_length(request.headers)):
        body, call.record = body[:-length], body[-length:]
    if expand is None:
        return body
    try:
        expanded = await server.text_work(expand, body, limit)
    except (zlib.error, zstandard.ZstdError, EOFError):
        raise RequestError("request body: not encoded as Content-Encoding says", code="invalid_body") from None
    if len(expanded) > limit:
        raise too_large
    return expanded


def _expander(request: web.Request) -> Callable[[bytes, int], bytes] | None:
    """What expands the body of a request, None if it is not compressed. Raises MediaTypeError."""
    # Web pages may send the types of forms, text/plain and bodies without a type to any server without asking it.
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not _JSON.fullmatch(kind):
        raise MediaTypeError("the body must be JSON: send the header `Content-Type: application/json`")
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise MediaTypeError("Content-Encoding: only gzip, deflate and zstd are supported", accepted=ENCODINGS)
    return _ENCODINGS[encoding]


def _gunzip(data: bytes, limit: int) -> bytes:
    """The contents of gzip members; more than `limit` bytes if there are more. Raises zlib.error, EOFError."""
    return _inflate(data, limit, 16 + zlib.MAX_WBITS)


def _deflate(data: bytes, limit: int) -> bytes:
    """As _gunzip, of a zlib stream, or of a raw one, which some clients send for `deflate`."""
    return _inflate(data, limit, zlib.MAX_WBITS if data[:1] and data[0] & 15 == 8 else -zlib.MAX_WBITS)


def _inflate(data: bytes, limit: int, window: int) -> bytes:
    parts, size = [], 0
    for _ in range(_MOST_MEMBERS):
        stream = zlib.decompressobj(window)
        while not stream.eof and size <= limit:
            part = stream.decompress(data, _STEP)
            data = stream.unconsumed_tail
            if not part and not data and not stream.eof:
                raise EOFError
            parts.append(part)
            size += len(part)
        data = stream.unused_data
        if not data or size > limit:
            return b"".join(parts)
    raise EOFError


def _unzstd(data: bytes, limit: int) -> bytes:
    """As _gunzip, of zstd frames. Raises ZstdError."""
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(data, read_across_frames=True)
    parts, size = [], 0
    while size <= limit and (part := reader.read(_STEP)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


_ENCODINGS: dict[str, Callable[[bytes, int], bytes] | None] = {
    "": None,
    "identity": None,
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _deflate,
    "zstd": _unzstd,
}
#: what Accept-Encoding tells clients
ENCODINGS = "gzip, deflate, zstd"
