"""/health, /livez, /v1/models and /metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from luce.api import Model
from luce.server.codex_models import codex_entry
from luce.server.errors import unknown_model
from luce.server.prepare import names
from luce.server.state import SERVER, Server


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
    """GET /v1/models: the model, with its further names as aliases; for Codex, which sends its version, in its form."""
    server = request.app[SERVER]
    if "client_version" in request.query:
        return json_response({"models": [codex_entry(server.ready_model())]})
    entry = _entry(server.ready_model(), server)
    return json_response(
        {"object": "list", "data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    )


async def model_card(request: web.Request) -> web.Response:
    """GET /v1/models/{id}, also by an alias. Names may hold slashes."""
    server = request.app[SERVER]
    model, name = server.ready_model(), request.path.partition("/models/")[2].lstrip("/")
    if name not in names(model):
        raise unknown_model(name)
    return json_response(_entry(model, server))


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics in the Prometheus text format."""
    server = request.app[SERVER]
    text = await server.work(server.metrics.text)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def capabilities(model: Model) -> list[str]:
    """The kinds of requests that the model supports."""
    return ["completion", *(["chat"] if model.chat.template is not None else []), "structured_outputs"]


def _entry(model: Model, server: Server) -> dict[str, Any]:
    name, *aliases = names(model)
    return {
        "id": name,
        "aliases": aliases,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": server.started,
        "created_at": datetime.fromtimestamp(server.started, UTC).isoformat(),
        "owned_by": "luce",
        "context_length": model.context,
        "max_model_len": model.context,
        "max_output_tokens": model.context,
        "capabilities": capabilities(model),
    }
