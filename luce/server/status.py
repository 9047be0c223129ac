"""/health, /livez, /v1/models, /cluster and /metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from luce.api import Model
from luce.errors import NotFoundError, RequestError
from luce.server.body import read_body
from luce.server.codex_models import codex_entry
from luce.server.errors import invalid, unknown_model
from luce.server.model_pool import ModelEntry
from luce.server.schema import named_model
from luce.server.state import SERVER, Server, admins_server


def json_response(value: Any, status: int = 200) -> web.Response:
    """A JSON body."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def health(request: web.Request) -> web.Response:
    """GET / and /health: whether the server answers requests now."""
    status, body = request.app[SERVER].health()
    response = json_response(body, status)
    if status == 503:
        response.headers["Retry-After"] = "1"
    return response


async def livez(request: web.Request) -> web.Response:
    """GET /livez: the event loop runs."""
    return json_response({"status": "ok"})


async def models(request: web.Request) -> web.Response:
    """GET /v1/models: the models, with their further names as aliases; for Codex, which sends its version, those that
    are loaded, in its form."""
    server = request.app[SERVER]
    server.check_open()
    if "client_version" in request.query:
        loaded = [entry.model for entry in server.pool.entries if entry.model is not None]
        return json_response({"models": [codex_entry(model) for model in loaded]})
    entries = [_entry(entry, server) for entry in server.pool.entries]
    first, last = entries[0]["id"], entries[-1]["id"]
    return json_response({"object": "list", "data": entries, "has_more": False, "first_id": first, "last_id": last})


async def model_card(request: web.Request) -> web.Response:
    """GET /v1/models/{id}, also by an alias. Names may hold slashes."""
    server = request.app[SERVER]
    server.check_open()
    name = request.path.partition("/models/")[2].lstrip("/")
    found = next((entry for entry in server.pool.entries if name in entry.names), None)
    if found is None:
        raise unknown_model(name)
    return json_response(_entry(found, server))


async def load(request: web.Request) -> web.Response:
    """POST /v1/models/load: load a model now, and wait for it."""
    return await _changed(request, load=True)


async def unload(request: web.Request) -> web.Response:
    """POST /v1/models/unload: unload a model behind the requests that use it."""
    return await _changed(request, load=False)


async def _changed(request: web.Request, *, load: bool) -> web.Response:
    server = admins_server(request)
    server.check_open()
    name = (await server.work(named_model, await read_body(request, server))).model
    if name is None:
        raise invalid("model", "is required")
    if not server.pool.several:
        raise RequestError("this server has one model, which stays loaded", param="model", code="pinned")
    entry = server.pool.entry(name)
    await (server.pool.load(entry) if load else server.pool.unload(entry))
    return json_response(_entry(entry, server))


async def cluster(request: web.Request) -> web.Response:
    """GET /cluster: the members and the placement, as `luce cluster status --json` shows them."""
    server = admins_server(request)
    if server.cluster is None:
        raise NotFoundError("this server has no cluster (--cluster)", code="no_cluster")
    return json_response(await server.work(server.cluster))


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics in the Prometheus text format."""
    server = request.app[SERVER]
    text = await server.work(server.metrics.text)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def capabilities(model: Model) -> list[str]:
    """The kinds of requests that the model supports."""
    return ["completion", *(["chat"] if model.chat.template is not None else []), "structured_outputs"]


def _entry(entry: ModelEntry, server: Server) -> dict[str, Any]:
    """A model; what only its file says is null until it is loaded."""
    name, *aliases = entry.names
    model = entry.model
    context = entry.config.max_ctx or None if model is None else model.context
    return {
        "id": name,
        "aliases": aliases,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": server.started,
        "created_at": datetime.fromtimestamp(server.started, UTC).isoformat(),
        "owned_by": "luce",
        "context_length": context,
        "max_model_len": context,
        "max_output_tokens": context,
        "capabilities": None if model is None else capabilities(model),
        "loaded": model is not None,
        "state": entry.state,
        "pinned": entry.pinned,
    }
