"""Routes, middlewares, start and stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.web_urldispatcher import UrlMappingMatchInfo

from luce import __version__, log
from luce.errors import (
    LuceError,
    MediaTypeError,
    MethodError,
    NotFoundError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from luce.server import (
    cache,
    cached_blocks,
    completions,
    messages,
    native,
    props,
    responses,
    slots,
    static_files,
    status,
    tokens,
)
from luce.server.auth import OPEN_PATHS
from luce.server.connection import Connection, protocol_error, refusal
from luce.server.errors import anthropic_error, openai_error
from luce.server.response import new_id
from luce.server.sockets import BACKLOG
from luce.server.state import CALL, ENDPOINTS, SERVER, Call, Server

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BaseHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = logging.getLogger("luce.http")

#: time that a connection may be idle, or its headers incomplete
KEEPALIVE_SECONDS = 75.0
_HEADER_BYTES = 64 << 10
#: time that running handlers have when the server ends
_SHUTDOWN_SECONDS = 2.0
#: time that new connections have for their first request then
_FIRST_REQUEST_SECONDS = 1.0
_CLIENT_CLOSED = 499
_LONGEST_ID = 128
_NOT_SERVED = (
    "/embeddings",
    "/rerank",
    "/audio/speech",
    "/audio/transcriptions",
    "/audio/translations",
    "/images/generations",
    "/images/edits",
    "/images/variations",
)


def create_app(server: Server) -> web.Application:
    """The application. It answers at once: until the models of the start are loaded, requests get 503."""
    app = web.Application(middlewares=[_guard], client_max_size=server.config.max_body_mib << 20)
    app[SERVER] = server
    app.on_response_prepare.append(_add_headers)
    add = app.router.add_route
    app.router.add_get("/", static_files.root if server.config.webui else status.health)
    if server.config.webui:
        app.router.add_get(static_files.PREFIX + "{path:.+}", static_files.file)
    app.router.add_get("/health", status.health)
    app.router.add_get("/livez", status.livez)
    app.router.add_get("/metrics", status.metrics)
    app.router.add_get("/cluster", status.cluster)
    app.router.add_get("/props", props.props)
    add("POST", "/completion", native.completion)
    add("POST", "/infill", native.infill)
    app.router.add_get("/slots", slots.slots)
    # Some clients leave out /v1: every path under it is also served without it.
    for version in ("/v1", ""):
        add("POST", version + "/chat/completions", completions.chat)
        add("POST", version + "/completions", completions.completions)
        add("POST", version + "/messages", messages.messages)
        add("POST", version + "/messages/count_tokens", messages.count_tokens)
        add("POST", version + "/responses", responses.responses)
        for method in ("GET", "DELETE"):
            add(method, version + "/responses/{id}", responses.stored)
        add("POST", version + "/tokenize", tokens.tokenize)
        add("POST", version + "/detokenize", tokens.detokenize)
        add("POST", version + "/apply-template", tokens.apply_template)
        app.router.add_get(version + "/models", status.models)
        app.router.add_get(version + "/models/{id:.+}", status.model_card)
        add("POST", version + "/models/load", status.load)
        add("POST", version + "/models/unload", status.unload)
        app.router.add_get(version + "/cache", cache.listing)
        add("DELETE", version + "/cache", cache.purge)
        app.router.add_get(version + "/cache/blocks", cached_blocks.blocks)
        add("POST", version + "/cache/keys", cached_blocks.keys)
        for path in _NOT_SERVED:
            add("POST", version + path, _not_supported)
    app[ENDPOINTS] = tuple(sorted(_served(app)))
    return app


def _served(app: web.Application) -> set[str]:
    """`METHOD path` of the supported routes."""
    routes = [r for r in app.router.routes() if r.method != "HEAD" and r.handler is not _not_supported]
    return {f"{route.method} {route.resource.canonical}" for route in routes if route.resource is not None}


class Listener:
    """The running application."""

    def __init__(self, runner: web.AppRunner, servers: Iterable[asyncio.Server]) -> None:
        self._runner = runner
        self._servers = tuple(servers)

    async def cleanup(self) -> None:
        """Stop listening, give new connections a moment for their request and running handlers another, and close the
        connections."""
        for server in self._servers:
            server.close()
        await self._first_requests()
        await self._runner.cleanup()

    async def _first_requests(self) -> None:
        """Wait for the first requests of connections that were accepted before the end. They are refused with a time to
        try again; a connection that closes without a response looks like a failure to its client."""
        # asyncio makes a connection of an accepted socket in two further turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        manager = self._runner.server
        assert manager is not None
        if new := [each.first_request for each in manager.connections if isinstance(each, Connection)]:
            await asyncio.wait(new, timeout=_FIRST_REQUEST_SECONDS)


async def start(server: Server, sockets: Iterable[socket.socket], *, keepalive: float = KEEPALIVE_SECONDS) -> Listener:
    """Answer on listening sockets."""
    # A client that disconnects cancels its handler, which cancels its sequences.
    runner = web.AppRunner(create_app(server), handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    manager = runner.server
    assert manager is not None
    # Around the application, not a middleware: those run after what aiohttp checks itself.
    manager.request_handler = _accounted(server, manager.request_handler)
    loop = asyncio.get_running_loop()

    def connect() -> Connection:
        return Connection(
            manager,
            server,
            loop=loop,
            keepalive_timeout=keepalive,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
            auto_decompress=False,
            access_log=None,
        )

    return Listener(runner, [await loop.create_server(connect, sock=sock, backlog=BACKLOG) for sock in sockets])


def _accounted(server: Server, handler: BaseHandler) -> BaseHandler:
    """Outermost: what is no request for any path, the request's id, error bodies, metrics and the log line."""

    async def account(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.Request)
        call = request[CALL] = Call(_request_id(request), time.monotonic())
        log.request_id.set(call.id)
        connection = request.protocol
        assert isinstance(connection, Connection)
        server.request_started()
        connection.begin(request)
        code, refused = _CLIENT_CLOSED, protocol_error(request)
        try:
            response = await _caught(request, handler) if refused is None else refusal(refused, call.id)
            if not call.client_gone:
                code = response.status
            return response
        finally:
            connection.end()
            server.request_ended()
            quiet = request.method != "POST" and code != 500 and refused is None
            _record(request, call, server, code, logging.DEBUG if quiet else logging.INFO)

    return account


async def _caught(request: web.Request, handler: BaseHandler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error_response(request, _translated(request, error))
    except LuceError as error:
        return _error_response(request, error)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        log.failure(_log, "request handler failed", error)
        return _error_response(request, LuceError("internal error"))


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Checks of the Host header, of the Origin and of the key; paths with doubled slashes."""
    server = request.app[SERVER]
    request[CALL].route = _route(request.match_info)
    if not server.keys.required:
        server.host_check.check(request.headers.get("Host"))
    server.cors.check(request.headers.get("Origin"), request.headers.get("Host"))
    if request.method == "OPTIONS":
        return web.Response(status=204)
    path = request.path
    if not _open(request):
        server.keys.check(request.headers)
    if "//" in path:
        while "//" in path:
            path = path.replace("//", "/")
        plain = request.clone(rel_url=request.rel_url.with_path(path))
        resolved = await request.app.router.resolve(plain)
        request[CALL].route, handler = _route(resolved), resolved.handler
    return await handler(request)


def _open(request: web.Request) -> bool:
    """Whether a request needs no key. The web UI's files are those that everybody has; the page asks for the key."""
    if request.path == "/metrics":
        return request.app[SERVER].config.metrics_public
    return request.path in OPEN_PATHS or request.match_info.handler is static_files.file


async def _not_supported(request: web.Request) -> web.StreamResponse:
    # Not 501: clients repeat a request that a server error answers.
    raise RequestError(f"{request.path} is not supported", code="unsupported_endpoint")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    headers = response.headers
    headers["Server"] = f"luce/{__version__}"
    headers["x-request-id"] = headers["request-id"] = request[CALL].id
    headers["openai-processing-ms"] = str(round((time.monotonic() - request[CALL].arrived) * 1000))
    server = request.app[SERVER]
    requested = request.headers.get("Access-Control-Request-Headers")
    allowed = server.cors.headers(request.headers.get("Origin"), requested)
    if "Vary" in headers and "Vary" in allowed:
        allowed["Vary"] = f"{headers['Vary']}, {allowed['Vary']}"
    headers.update(allowed)


def _request_id(request: web.Request) -> str:
    sent = request.headers.get("x-request-id", "")
    return sent if 0 < len(sent) <= _LONGEST_ID and sent.isascii() and sent.isprintable() else new_id("req_")


def _translated(request: web.Request, error: web.HTTPException) -> LuceError:
    """An error of aiohttp as one of Luce."""
    if isinstance(error, web.HTTPNotFound):
        return NotFoundError(f"unknown endpoint: {request.method} {request.path}", code="unknown_endpoint")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(error.allowed_methods))
        return MethodError(f"{request.path} does not support {request.method}; it supports {allow}", allow=allow)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return TooLargeError("the request body is too large (--max-body-mib)")
    return RequestError(error.reason) if error.status < 500 else LuceError(error.reason)


def _error_response(request: web.Request, error: LuceError) -> web.Response:
    anthropic = request.path.rstrip("/").endswith(("/messages", "/count_tokens"))
    body = anthropic_error(error, request[CALL].id) if anthropic else openai_error(error)
    code = 529 if anthropic and error.status == 503 else error.status
    response = status.json_response(body, code)
    if isinstance(error, QueueFullError | UnavailableError):
        response.headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, MethodError):
        response.headers["Allow"] = error.allow
    if isinstance(error, MediaTypeError) and error.accepted:
        response.headers["Accept-Encoding"] = error.accepted
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _route(found: UrlMappingMatchInfo) -> str:
    """The pattern of the route, never the path from the client: it becomes a label of a metric."""
    resource = found.route.resource
    return "other" if resource is None else resource.canonical


def _record(request: web.Request, call: Call, server: Server, code: int, level: int) -> None:
    """Metrics and the log line."""
    seconds = time.monotonic() - call.arrived
    server.metrics.requests.labels(call.route, str(code)).inc()
    server.metrics.request_seconds.labels(call.route).observe(seconds)
    if server.tracing is not None and call.span is not None:
        error = str(call.log_fields.get("error", "" if code < 400 else code))
        server.tracing.record(
            call.span, request.headers, arrived=call.arrived, route=call.route, status=code, error=error
        )
    log.event(
        _log,
        "request",
        level,
        route=call.route,
        status=code,
        seconds=seconds,
        client=request.remote,
        **call.log_fields,
    )
