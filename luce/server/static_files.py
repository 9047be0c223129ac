"""The web UI: the files of luce/server/webui, which read the same endpoints as other clients.

A browser runs nothing but these files and sends nothing to another server: a reply is text of others, and the tab holds
the key.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from luce.errors import NotFoundError
from luce.server import status
from luce.server.state import SERVER

PREFIX = "/webui/"

_FOLDER = Path(__file__).with_name("webui")
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
#: the only policy of trusted types is the library's that cleans the Markdown of replies
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
_HEADERS = {
    # A browser asks each time, and gets 304 until the server is another version.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class StaticFile(NamedTuple):
    """A file as it is sent."""

    body: bytes
    content_type: str
    etag: str


@functools.cache
def static_files() -> dict[str, StaticFile]:
    """The files by their paths below PREFIX. Reads all of them, once."""
    return {path.relative_to(_FOLDER).as_posix(): _read(path) for path in _FOLDER.rglob("*") if path.is_file()}


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPES.get(path.suffix, "text/plain"), hashlib.sha256(body).hexdigest()[:32])


async def root(request: web.Request) -> web.Response:
    """GET /: the web UI for browsers, which ask for HTML; for others as /health."""
    asked = (part.partition(";")[0].strip().lower() for part in request.headers.get("Accept", "").split(","))
    response = await (_send(request, "index.html") if "text/html" in asked else status.health(request))
    response.headers["Vary"] = "Accept"
    return response


async def file(request: web.Request) -> web.Response:
    """GET /webui/{path}: a file of the web UI."""
    return await _send(request, request.match_info["path"])


async def _send(request: web.Request, name: str) -> web.Response:
    found = (await request.app[SERVER].work(static_files)).get(name)
    if found is None:
        raise NotFoundError(f"unknown endpoint: {request.method} {request.path}", code="unknown_endpoint")
    if any(tag.value in (found.etag, "*") for tag in request.if_none_match or ()):
        response = web.Response(status=304, headers=_HEADERS)
    else:
        response = web.Response(body=found.body, content_type=found.content_type, charset="utf-8", headers=_HEADERS)
    response.etag = found.etag
    return response
